"""Reading a run's folder, finished or not: metrics, evaluations, recorded responses, and its tokenizer."""

from __future__ import annotations

import gzip
import tomllib
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np

from backends.arrays import Doubles, Ids
from delta_cli.assets import model_path
from delta_cli.data.tokenizer import Tokenizer
from delta_cli.errors import UserError
from delta_cli.runs.folder import JsonObject, RunFolder, read_lines


@dataclass(frozen=True)
class RecordedResponse:
    """A recorded response of n tokens, with what the update did with each."""

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
    rewards: Mapping[str, float] = field(default_factory=dict)  # of several each alone, before its weight

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def each_reward(self) -> str:
        """Of several rewards each alone, in words; nothing where there is one."""
        return f" ({', '.join(f'{name} {value:g}' for name, value in self.rewards.items())})" if self.rewards else ""

    @classmethod
    def read(cls, record: JsonObject) -> RecordedResponse:
        """From a line of rollouts/."""
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
            reward=record["reward"],
            correct=record["correct"],
            failure=record["failure"],
            advantage=record["advantage"],
            truncated=record["truncated"],
            rewards=record.get("rewards", {}),
        )


class RecordedRun:
    """What a run has written so far. A run that is still going, or was killed, reads like any other."""

    def __init__(self, path: Path) -> None:
        """Raises UserError where there is no run."""
        self.path = path
        self.name = path.resolve().name
        self._folder = RunFolder(path)
        if not self._folder.started:
            raise UserError(f"{path}: holds no run (no recipe.toml); give the folder that delta train wrote")

    @cached_property
    def recipe(self) -> JsonObject:
        """recipe.toml as it stands, unchecked: it may come from another version."""
        try:
            return tomllib.loads(self._folder.recipe.read_text(encoding="utf-8"))
        except ValueError as error:
            raise UserError(f"{self._folder.recipe}: not valid TOML ({error})") from error

    @cached_property
    def metrics(self) -> list[JsonObject]:
        """A record for each step."""
        return self._lines(self._folder.metrics)

    @cached_property
    def evaluations(self) -> list[JsonObject]:
        """A record for each evaluation on held-out problems."""
        return self._lines(self._folder.evaluations)

    @cached_property
    def notices(self) -> list[JsonObject]:
        """What tripwires said: step, name, text."""
        return self._lines(self._folder.notices)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Of the exported model, or while there is none of the model that the recipe began with."""
        if (self._folder.model / "tokenizer.json").is_file():
            return Tokenizer.load(str(self._folder.model))
        return Tokenizer.load(model_path(self.recipe["model"]["path"]))

    @cached_property
    def steps(self) -> list[int]:
        """Steps whose responses are recorded, in order."""
        return sorted(int(file.name[5:11]) for file in self._folder.rollouts.glob("step-*.jsonl.gz"))

    def check_step(self, step: int | None) -> int:
        """The step asked for, the last one without it; raises UserError where it is not recorded."""
        if not self.steps:
            raise UserError(f"{self._folder.rollouts}: no responses are recorded; see checkpoint.rollouts_every")
        if step is None:
            return self.steps[-1]
        if step not in self.steps:
            near = min(self.steps, key=lambda known: abs(known - step))
            raise UserError(
                f"{self.path}: step {step} is not recorded; {len(self.steps)} steps from {self.steps[0]} to "
                f"{self.steps[-1]} are, the nearest is {near}"
            )
        return step

    def responses(self, step: int) -> Iterator[RecordedResponse]:
        """The responses of a recorded step in order, those of one prompt together."""
        try:
            for record in read_lines(self._folder.rollout_file(step)):
                yield RecordedResponse.read(record)
        except (EOFError, gzip.BadGzipFile, zlib.error):
            return  # the file was cut off while it was copied; what came before is whole

    def _lines(self, file: Path) -> list[JsonObject]:
        return list(read_lines(file)) if file.exists() else []
