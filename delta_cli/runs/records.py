"""Read the folder of a run, finished or not: metrics, evaluations, recorded responses and the tokenizer."""

from __future__ import annotations

import gzip
import tomllib
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from backends.arrays import Bools, Doubles, Ids
from delta_cli.assets import model_path
from delta_cli.data.tokenizer import Tokenizer
from delta_cli.errors import UserError
from delta_cli.runs.folder import JsonObject, RunFolder, read_lines


@dataclass(frozen=True)
class RecordedResponse:
    """A recorded response of n tokens, with the credit and scores of each token."""

    group: int  # index of its prompt in the batch
    problem: str
    prompt: str
    answer: str
    text: str
    tokens: Ids  # [n]
    coefficients: Doubles  # [n]
    logprobs: Doubles  # [n] nats, under the policy before the update
    entropies: Doubles  # [n] nats
    reward: float
    correct: bool
    failure: str | None
    advantage: float
    truncated: bool
    region: Ids | None = None  # [m] of an episode: the environment's tokens too
    own: Bools | None = None  # [m] which of them the model wrote
    episode: Mapping[str, Any] = field(default_factory=dict)  # how an episode went; empty without an environment
    rewards: Mapping[str, float] = field(default_factory=dict)  # by name, before its weight; empty if only one

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def whole_region(self) -> tuple[Ids, Bools]:
        """All ids after the prompt, and which of them the model wrote."""
        if self.region is None or self.own is None:
            return self.tokens, np.ones(len(self.tokens), bool)
        return self.region, self.own

    @property
    def each_reward(self) -> str:
        """Each reward in words, if there are several; otherwise empty."""
        return f" ({', '.join(f'{name} {value:g}' for name, value in self.rewards.items())})" if self.rewards else ""

    @classmethod
    def read(cls, record: JsonObject) -> RecordedResponse:
        """Parse a line of a rollouts file."""
        return cls(
            group=record["group"],
            problem=str(record["problem"]),
            prompt=record["prompt"],
            answer=str(record["answer"]),
            text=record["response"],
            tokens=np.array(record["tokens"], np.int64),
            coefficients=np.array(record["coefficients"], np.float64),
            logprobs=np.array(record["logprobs"], np.float64),
            entropies=np.array(record["entropies"], np.float64),
            reward=np.nan if record["reward"] is None else record["reward"],
            correct=record["correct"],
            failure=record["failure"],
            advantage=record["advantage"],
            truncated=record["truncated"],
            rewards=record.get("rewards", {}),
            region=np.array(record["region"], np.int64) if "region" in record else None,
            own=np.array(record["own"], bool) if "own" in record else None,
            episode=record.get("episode", {}),
        )


class RecordedRun:
    """What a run has written so far; works for running and killed runs too."""

    def __init__(self, path: Path) -> None:
        """Raises UserError if the folder holds no run."""
        self.path = path
        self.name = path.resolve().name
        self._folder = RunFolder(path)
        if not self._folder.started:
            raise UserError(f"{path}: holds no run (no recipe.toml); give the folder that delta train wrote")

    @cached_property
    def recipe(self) -> JsonObject:
        """recipe.toml without validation, because another version may have written it."""
        try:
            return tomllib.loads(self._folder.recipe.read_text(encoding="utf-8"))
        except ValueError as error:
            raise UserError(f"{self._folder.recipe}: not valid TOML ({error})") from error

    @cached_property
    def metrics(self) -> list[JsonObject]:
        """One record per step."""
        return self._lines(self._folder.metrics)

    @cached_property
    def evaluations(self) -> list[JsonObject]:
        """One record per evaluation on held-out problems. Raises UserError if a line lacks one of its numbers."""
        found = self._lines(self._folder.evaluations)
        for record in found:
            numbers = (record.get(name) for name in ("step", "accuracy", "low", "high"))
            if not all(isinstance(number, int | float) for number in numbers):
                raise UserError(f"{self._folder.evaluations}: not an evaluation: {str(record)[:60]}; delete the line")
        return found

    @cached_property
    def notices(self) -> list[JsonObject]:
        """The warnings of the run: step, name, text."""
        return self._lines(self._folder.notices)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the exported model, or of the recipe's base model if nothing is exported yet."""
        if (self._folder.model / "tokenizer.json").is_file():
            return Tokenizer.load(str(self._folder.model))
        return Tokenizer.load(model_path(self.recipe["model"]["path"]))

    @cached_property
    def steps(self) -> list[int]:
        """The steps with recorded responses, ascending."""
        return sorted(int(file.name[5:11]) for file in self._folder.rollouts.glob("step-*.jsonl.gz"))

    def check_step(self, step: int | None) -> int:
        """The given step, or the last recorded one for None; raises UserError if it is not recorded."""
        if not self.steps:
            raise UserError(f"{self._folder.rollouts}: no responses are recorded; see checkpoint.rollouts_every")
        if step is None:
            return self.steps[-1]
        if step not in self.steps:
            near = min(self.steps, key=lambda known: abs(known - step))
            raise UserError(f"{self.path}: step {step} is not recorded; the nearest recorded step is {near}")
        return step

    def responses(self, step: int) -> Iterator[RecordedResponse]:
        """The responses of a recorded step in order, grouped by prompt."""
        file = self._folder.rollout_file(step)
        try:
            for record in read_lines(file):
                try:
                    response = RecordedResponse.read(record)
                except (KeyError, TypeError, ValueError) as error:
                    reason = f"{type(error).__name__}: {error}"
                    raise UserError(f"{file}: not a recorded response ({reason}); choose another --step") from None
                yield response
        except (EOFError, gzip.BadGzipFile, zlib.error):
            return  # a truncated copy: everything read so far is intact

    def _lines(self, file: Path) -> list[JsonObject]:
        return list(read_lines(file)) if file.exists() else []
