"""What drawing several steps ahead costs in accuracy on the embedded task, at a rate where it matters.

    python benchmarks/async_learning.py --out benchmarks/results/async_learning.json

Twenty steps from the base that ships with the package, for each seed and arm: on-policy at learning rate 1e-3, and one,
two and four steps ahead, with that rate and with one that is divided by the square root of 1 + steps ahead. The sampler
is a second copy of the model in this process that loads published weights as a vLLM server does, so nothing else has to
be installed. Each run is written to the file when it ends, and the same command continues with the missing ones.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

from common import kept_runs, show

from backends import registry
from backends.interface import Completions, Engine, OnFinished, PublishedWeights, RolloutRequest
from backends.settings import BackendSettings
from delta_cli.recipe import load_recipe
from delta_cli.runs.folder import RunFolder, read_lines
from delta_cli.runs.observer import Observer
from delta_cli.training.setup import open_trainer

KEYS: dict[str, Any] = {
    "update.learning_rate": 1e-3,
    "update.mini_batches": 2,
    "run.steps": 20,
    "evaluation.every": 20,
    "evaluation.problems": 250,
    "checkpoint.every": 20,
    "checkpoint.rollouts_every": 0,
}


class Arm(NamedTuple):
    """How far ahead batches are drawn, what corrects for it, and whether the learning rate allows for it."""

    ahead: int
    correction: str
    slower: bool  # the learning rate is divided by the square root of 1 + steps ahead

    @property
    def rate(self) -> float:
        """The learning rate, to two digits."""
        fast = float(KEYS["update.learning_rate"])
        return float(f"{fast / math.sqrt(1 + self.ahead):.1e}") if self.slower else fast


ARMS = {
    "on-policy": Arm(0, "none", slower=False),
    "1 ahead, slower": Arm(1, "decoupled_seq_is", slower=True),
    "2 ahead, slower": Arm(2, "decoupled_seq_is", slower=True),
    "4 ahead, slower": Arm(4, "decoupled_seq_is", slower=True),
    "1 ahead": Arm(1, "decoupled_seq_is", slower=False),
    "2 ahead": Arm(2, "decoupled_seq_is", slower=False),
    "2 ahead, by token": Arm(2, "decoupled_token_is", slower=False),
}
MEDIANS = ("staleness", "engine_gap_p99", "ess_token", "ess_sequence", "clip_fraction", "learning_rate", "seconds")


class InProcessSampler:
    """Draws from a model of its own that loads what the learner publishes; see ``backends.interface.Sampler``."""

    def __init__(self, inbox: Path) -> None:
        self.inbox = inbox
        self.version = -1
        self._engine: Engine | None = None

    def load_weights(self, weights: PublishedWeights) -> None:
        """Load another model in place of the present one."""
        if weights.version == self.version:
            return
        self.close()
        self._engine = registry.create("cpu", BackendSettings.of(str(weights.folder), frozen=True))
        self.version = weights.version

    def rollout(self, request: RolloutRequest, on_finished: OnFinished | None = None) -> Completions:
        """What a server returns: tokens and log-probabilities, neither entropies nor features."""
        assert self._engine is not None
        plain = replace(request, entropies=False, proxy=None)
        return replace(self._engine.rollout(plain, on_finished), version=self.version)

    def close(self) -> None:
        """Free the model."""
        if self._engine is not None:
            self._engine.close()


def learn(arm: Arm, seed: int, steps: int, folder: Path) -> dict[str, float]:
    """Held-out accuracy before and after a run, with the means of what the gap did in between."""
    changes = KEYS | {"run.seed": seed, "run.steps": steps, "evaluation.every": steps}
    changes |= {"correction.preset": arm.correction, "update.learning_rate": arm.rate}
    if arm.ahead:
        changes |= {"engine.kind": "vllm", "engine.url": ["http://in-process"], "engine.async_steps": arm.ahead}
    recipe = load_recipe(None, [f"{key}={json.dumps(value)}" for key, value in changes.items()])

    @contextmanager
    def in_process(*_: Any) -> Iterator[InProcessSampler]:
        sampler = InProcessSampler(folder / "inbox")
        try:
            yield sampler
        finally:
            sampler.close()

    with (
        patch("delta_cli.rollout.open_vllm.open_training_servers", in_process),
        open_trainer(recipe, "cpu", folder / "run", Observer()) as trainer,
    ):
        trainer.run()
    first, last = (list(read_lines(RunFolder(folder / "run").evaluations))[place] for place in (0, -1))
    found = {"before": first["accuracy"]} | {name: last[name] for name in ("accuracy", "low", "high")}
    records = list(read_lines(RunFolder(folder / "run").metrics))
    for name in MEDIANS:
        values = [record[name] for record in records if record.get(name) is not None]
        found[name] = statistics.median(values) if values else 0.0
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON file of results, which is continued")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--arms", nargs="*", choices=list(ARMS), default=list(ARMS))
    options = parser.parse_args()
    seeds = range(options.seeds)
    parts = {
        f"{arm}, seed {seed}": partial(learn, ARMS[arm], seed, options.steps) for seed in seeds for arm in options.arms
    }
    runs = kept_runs(options.out, parts, settings=KEYS)
    rows = []
    for arm in options.arms:
        cells = [runs[f"{arm}, seed {seed}"] for seed in seeds]
        shown = [f"{cell['accuracy']:.1%} ({cell['low']:.1%} to {cell['high']:.1%})" for cell in cells]
        rows.append({"arm": arm} | {f"seed {seed}": text for seed, text in enumerate(shown)})
    show("Accuracy after drawing ahead", rows)


if __name__ == "__main__":
    main()
