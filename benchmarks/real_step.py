"""A step of a pretrained model: what each part takes, what is saved, and the share of the processor's peak.

    python benchmarks/real_step.py --model models/smollm2-135m --out benchmarks/results/real_step.json

The recipe is recipes/smollm2_135m.toml: 128 responses of at most 24 tokens to 16 word problems with two solved ones
before them, two updates. Rewards are made up, so that a known share of the prompts has nothing to teach. The ways are
those of step.py: every response scored and updated on; what is learned from; and that with scores as they were drawn.
One step of each in every round, in turns, on one model.

``of peak`` is the arithmetic of scoring's forward (of updating, three times that) by its time, as a share of what a
product of two large square matrices reaches with the same threads.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from common import median_ratio, show, write
from workload import PHASES, EveryResponse

from backends import registry
from backends.interface import Engine
from delta_cli.data import sampler
from delta_cli.recipe import Recipe, load_recipe
from delta_cli.rewards.responses import RolloutWorker
from delta_cli.training.clock import Clock
from delta_cli.training.rollouts import RolloutBatch, roll
from delta_cli.training.seeds import derive
from delta_cli.training.setup import backend_settings, load_data, load_tokenizer, make_grader, template_of
from delta_cli.training.update import Updater

HIDDEN = 576  # of SmolLM2-135M
WAYS: dict[str, tuple[type[Updater], str]] = {
    "every response": (EveryResponse, "fresh"),
    "fresh": (Updater, "fresh"),
    "as drawn": (Updater, "rollout"),
}


@dataclass
class RealSteps:
    """Steps of one way; ``seconds`` of each phase of each."""

    recipe: Recipe
    engine: Engine
    worker: RolloutWorker
    updater: Updater
    unmixed: float
    seconds: list[dict[str, float]] = field(default_factory=list)
    flops: list[float] = field(default_factory=list)  # of one forward over what was updated on

    def __call__(self, number: int) -> None:
        """One step."""
        clock, updater, rollout = Clock(), self.updater, self.recipe.rollout
        problems = load_data(self.recipe, self.worker.tokenizer).problems
        drawn = sampler.batch(problems, number, rollout.prompts, 0)
        with clock.phase("rollout"):
            waiting = roll(self.worker, drawn, rollout, derive(0, number, "rollout"), proxy=updater.drawn_proxy)
        with clock.phase("reward"):
            batch = self._rewarded(waiting.result())
        with clock.phase("score"):
            scored = updater.score(batch)
        with clock.phase("credit"):
            credit = updater.credit(batch, scored, number)
        with clock.phase("update"):
            updater.update(batch, credit, number)
        self.seconds.append({phase: clock.seconds[phase] for phase in PHASES})
        seen = credit.advantages != 0
        if isinstance(updater, EveryResponse):
            seen[:] = True
        self.flops.append(self._forward(batch, seen))

    def _rewarded(self, batch: RolloutBatch) -> RolloutBatch:
        """Every other response is right, but for the share of prompts where all are."""
        group = np.arange(len(batch.problems))
        equal = np.floor((group + 1) * self.unmixed) > np.floor(group * self.unmixed)
        rewards = np.where(np.repeat(equal, batch.samples), 1.0, np.arange(len(batch.texts)) % 2)
        verdicts = zip(batch.verdicts, rewards, strict=True)
        return replace(batch, verdicts=tuple(replace(v, reward=float(reward)) for v, reward in verdicts))

    def _forward(self, batch: RolloutBatch, seen: np.ndarray[Any, Any]) -> float:
        """Products and sums of matrices in a forward over the chosen responses, attention left out."""
        head = self.engine.vocabulary * HIDDEN
        tokens = float(batch.tokens_of_groups(seen).sum())
        return 2 * ((self.engine.parameters - head) * tokens + head * float(batch.sequences.lengths[seen].sum()))


def peak(size: int = 2048, times: int = 5) -> float:
    """Operations a second of a product of square matrices."""
    import torch

    a, b = torch.randn(2, size, size)
    a @ b
    start = time.perf_counter()
    for _ in range(times):
        a @ b
    return times * 2 * size**3 / (time.perf_counter() - start)


def measure(model: str, unmixed: float, rounds: int) -> dict[str, dict[str, Any]]:
    """Median seconds of each way's phases; a round before the first is left out."""
    steps: dict[str, RealSteps] = {}
    recipe = load_recipe(Path("recipes/smollm2_135m.toml"), [f"model.path={model}", "data.limit=200"])
    tokenizer = load_tokenizer(recipe)
    with make_grader(recipe) as grader:
        engine = registry.create("cpu", backend_settings(recipe))
        worker = RolloutWorker(engine, tokenizer, grader, template_of(recipe))
        for name, (kind, score) in WAYS.items():
            own = recipe.model_copy(update={"update": recipe.update.model_copy(update={"score": score})})
            steps[name] = RealSteps(own, engine, worker, kind(own, engine), unmixed)
        steps["as drawn"](0)  # allocates gradient and moments
        steps["as drawn"].seconds.clear()
        steps["as drawn"].flops.clear()
        for number in range(1, rounds + 1):
            for step in steps.values():
                step(number)
        top = peak()
    wholes = {name: [sum(row.values()) for row in step.seconds] for name, step in steps.items()}
    result = {}
    for name, step in steps.items():
        seconds = {phase: statistics.median(row[phase] for row in step.seconds) for phase in PHASES}
        flops = statistics.median(step.flops)
        result[name] = {
            "seconds": seconds,
            "step": statistics.median(wholes[name]),
            "rounds": wholes[name],
            "faster": median_ratio(wholes["every response"], wholes[name]),
            "of_peak": {
                "score": flops / seconds["score"] / top if seconds["score"] > 0.1 else None,
                "update": 3 * flops / seconds["update"] / top,
            },
            "threads": step.engine.threads,
            "peak_flops": top,
        }
    engine.close()
    return result


def table(result: dict[str, dict[str, Any]]) -> list[dict[str, str]]:
    """One row for each way."""
    return [
        {
            "": name,
            **{phase: f"{row['seconds'][phase]:.1f}" for phase in PHASES},
            "step (s)": f"{row['step']:.1f}",
            "faster": f"{row['faster']:.2f}×",
            "of peak": ", ".join(f"{what} {share:.0%}" for what, share in row["of_peak"].items() if share),
        }
        for name, row in result.items()
    ]


def main() -> None:
    """Measure, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of SmolLM2-135M-Instruct")
    parser.add_argument("--unmixed", type=float, default=0.5, help="share of prompts without anything to teach")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--out", help="where to write the JSON")
    args = parser.parse_args()
    result = measure(args.model, args.unmixed, args.rounds)
    show(f"one step of SmolLM2-135M, {args.unmixed:.0%} of the prompts unmixed", table(result))
    write(args.out, {"benchmark": "real_step", "unmixed": args.unmixed, "rounds": args.rounds, "results": result})


if __name__ == "__main__":
    main()
