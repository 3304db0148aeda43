"""A training step of known size: a random model, prompts and responses of known lengths, a trivial reward."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from lengths import schedule, scheduled_rollout
from make_tiny_base import write_tokenizer
from numpy.typing import NDArray

from backends import registry
from backends.interface import Ids
from delta_cli.assets.random_model import write_qwen3
from delta_cli.credit import Surrogate, TokenCoefficients
from delta_cli.data.problem import Problem
from delta_cli.data.tokenizer import Tokenizer
from delta_cli.recipe import Recipe
from delta_cli.recipe.backend_settings import backend_settings
from delta_cli.rollout.batch import RolloutBatch
from delta_cli.rollout.collect import sample_batch
from delta_cli.rollout.worker import RolloutWorker
from delta_cli.runs.observer import PhaseClock
from delta_cli.seeds import derive
from delta_cli.training.setup import make_grader
from delta_cli.training.update import ScoredBatch, Updater

BYTE_TOKENS = 258  # of the tokenizer before it is extended
PHASES = ("rollout", "reward", "score", "credit", "update")


@dataclass(frozen=True)
class Workload:
    """The sizes of a step; the lengths of its responses are known beforehand."""

    vocabulary: int = 4096
    hidden: int = 384
    layers: int = 6
    prompts: int = 8
    responses: int = 8  # for each prompt
    prompt: int = 16  # tokens
    response: int = 128  # tokens of the longest
    spread: int = 1  # the longest has so many times the tokens of the shortest
    mini_batches: int = 4
    head_chunk: int = 512  # tokens whose logits exist at a time
    feature_bytes: int = 2**33  # of token features kept; the others are computed anew
    learning_rate: float = 1e-6
    weight_decay: float = 0.1
    unmixed: float = 0.0  # share of prompts whose responses all get one reward
    backend: str = "cpu"
    dtype: str = "float32"  # of the compute; weights are float32

    @classmethod
    def from_arguments(cls, parser: argparse.ArgumentParser, **defaults: Any) -> tuple[Workload, argparse.Namespace]:
        """Add an option for each size, parse the command line, and return the workload and all arguments."""
        for each in fields(cls):
            default = defaults.get(each.name, each.default)
            name = f"--{each.name.replace('_', '-')}"
            parser.add_argument(name, type=type(default), default=default, metavar=str(default))
        args = parser.parse_args()
        return cls(**{each.name: getattr(args, each.name) for each in fields(cls)}), args

    def as_options(self) -> list[str]:
        """The command line's options of this workload."""
        return [f"--{name.replace('_', '-')}={value}" for name, value in asdict(self).items()]

    @property
    def lengths(self) -> Ids:
        """Tokens of each response."""
        return schedule(self.prompts * self.responses, self.response, self.spread)

    @property
    def stop(self) -> int:
        """The id that ends a response."""
        return self.vocabulary - 1

    @property
    def equal(self) -> NDArray[np.bool_]:
        """Which responses get the reward of all others to their prompt: those of every so many prompts, [R]."""
        return np.repeat(spread_out(self.prompts, self.unmixed), self.responses)

    def questions(self) -> list[str]:
        """Texts of ``prompt`` tokens: the tokenizer reads bytes."""
        rng = np.random.default_rng(0)
        return ["".join(rng.choice(list("abcdefgh"), self.prompt)) for _ in range(self.prompts)]

    def write(self, folder: Path) -> Path:
        """A model folder; returns it."""
        write_qwen3(
            folder,
            vocab_size=self.vocabulary,
            hidden=self.hidden,
            layers=self.layers,
            heads=self.hidden // 64,
            kv_heads=max(1, self.hidden // 128),
            head_dim=64,
            intermediate=3 * self.hidden,
            max_positions=self.prompt + self.response,
        )
        write_tokenizer(folder)
        _extend_tokenizer(folder / "tokenizer.json", self.vocabulary)
        return folder

    def recipe(self, model: Path, preset: str, score: str = "recompute") -> Recipe:
        """The recipe of such a step."""
        return Recipe.model_validate(
            {
                "model": {"path": str(model), "dtype": self.dtype},
                "rollout": {"prompts": self.prompts, "responses": self.responses, "max_tokens": self.response},
                "reward": {"kind": "custom", "custom_file": str(Path(__file__).with_name("reward.py")), "workers": 1},
                "method": {"preset": preset},
                "update": {
                    "old_logprobs": score,
                    "learning_rate": self.learning_rate,
                    "weight_decay": self.weight_decay,
                    "mini_batches": self.mini_batches,
                    "head_chunk_tokens": self.head_chunk,
                    "feature_bytes": self.feature_bytes,
                    "feature_host_bytes": 0,
                },
            }
        )


def _extend_tokenizer(file: Path, vocabulary: int) -> None:
    """Give every id of the model a text: responses that read alike would all earn one reward."""
    content = json.loads(file.read_text(encoding="utf-8"))
    content["model"]["vocab"] |= {f"w{token}": token for token in range(BYTE_TOKENS, vocabulary)}
    file.write_text(json.dumps(content), encoding="utf-8")


class EveryResponse(Updater):
    """Scores and updates on all responses, those without advantage included, as if each had something to teach."""

    def score(self, batch: RolloutBatch, every: bool = True) -> ScoredBatch:
        """One forward over the whole batch."""
        return super().score(batch, every=True)

    def surrogate(self, batch: ScoredBatch, coefficients: TokenCoefficients, groups: Ids, seed: int = 0) -> Surrogate:
        """The objective, shown every response of a mini-batch that has any to learn from."""
        found = super().surrogate(batch, coefficients, groups, seed)
        return _Shown(found.method, found.batch)


class _Shown(Surrogate):
    @property
    def learned_from(self) -> NDArray[np.bool_]:
        found = super().learned_from
        return np.full(len(found), found.any())


def spread_out(count: int, share: float) -> NDArray[np.bool_]:
    """A share of so many places, evenly spread over them, [count]."""
    place = np.arange(count)
    return np.asarray(np.floor((place + 1) * share) > np.floor(place * share))


def timed_step(
    updater: Updater,
    worker: RolloutWorker,
    problems: Sequence[Problem],
    number: int,
    rewarded: Callable[[RolloutBatch], RolloutBatch],
) -> tuple[dict[str, float], ScoredBatch]:
    """A step as the trainer takes it, records and checkpoints left out: seconds of its phases, and its scored batch.

    ``rewarded`` gives the batch the rewards of the measurement.
    """
    clock = PhaseClock()
    with clock.phase("rollout"):
        seed = derive(0, number, "rollout")
        waiting = sample_batch(worker, problems, updater.recipe.rollout, seed, proxy=updater.sampler_proxy)
    with clock.phase("reward"):
        batch = rewarded(waiting.result())
    with clock.phase("score"):
        scored = updater.score(batch)
    with clock.phase("credit"):
        coefficients = updater.credit(scored, number)
    with clock.phase("update"):
        updater.update(scored, coefficients, number)
    return {phase: clock.seconds[phase] for phase in PHASES}, scored


class Steps:
    """Training steps on a workload, one a call, see :func:`timed_step`."""

    def __init__(self, workload: Workload, worker: RolloutWorker, updater: Updater) -> None:
        self.learner = updater.learner
        self.seconds: list[dict[str, float]] = []  # of the phases of each step
        self._worker = worker
        self._updater = updater
        self._problems = [Problem(text, text, "", "benchmark") for text in workload.questions()]
        self._workload = workload

    def __call__(self) -> None:
        """One step."""
        with scheduled_rollout(self._workload.lengths):
            seconds, scored = timed_step(self._updater, self._worker, self._problems, len(self.seconds), self._rewarded)
        assert np.array_equal(scored.rollout.sequences.lengths, self._workload.lengths)
        self.seconds.append(seconds)

    def _rewarded(self, batch: RolloutBatch) -> RolloutBatch:
        verdicts = zip(batch.verdicts, self._workload.equal, strict=True)
        return replace(batch, verdicts=tuple(replace(v, reward=1.0) if equal else v for v, equal in verdicts))


@contextmanager
def steps(
    workload: Workload,
    model: Path,
    preset: str,
    backend_name: str | None = None,
    score: str = "recompute",
    updates: type[Updater] = Updater,
) -> Iterator[Steps]:
    """Steps with a preset on a model of their own, read from the folder ``model``."""
    recipe = workload.recipe(model, preset, score)
    tokenizer = Tokenizer.load(str(model))
    tokenizer.eos_ids = (workload.stop,)
    with make_grader(recipe) as grader:
        engine = registry.create(backend_name or workload.backend, backend_settings(recipe))
        try:
            yield Steps(workload, RolloutWorker(engine, tokenizer, grader, "plain"), updates(recipe, engine))
        finally:
            engine.close()
