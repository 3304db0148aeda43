"""A policy of characters whose answers are random digits, and a grader that reads the last box at once."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np

from backends.interface import Completions, Ids, OnFinished, RolloutRequest, Sampling, starts_of
from backends.stop_strings import StopText
from delta_cli.data.problem import Problem
from delta_cli.rewards.grader import GroupPlace
from delta_cli.rewards.math.boxed import last_box

EOS = 0


class CharacterTokenizer:
    """An id is a code point; 0 ends a sequence and has no text."""

    eos_ids = (EOS,)

    def stop_text(self, strings: Sequence[str]) -> StopText | None:
        return StopText.of(strings, self.decode, 128) if strings else None

    def encode(self, text: str, special: bool = True) -> Ids:
        return np.array([ord(character) for character in text], dtype=np.int64)

    def decode(self, ids: Ids) -> str:
        return "".join(chr(token) for token in ids if token != EOS)


class DigitBackend:
    """Answers ``\\boxed{d}`` with a digit below ``digits`` drawn from (seed, row); every fifth draw on average
    breaks off instead. Records each call; raises KeyboardInterrupt at call number ``stop_at``."""

    name = "fake"

    def __init__(self, digits: int = 3, stop_at: int | None = None) -> None:
        self.digits = digits
        self.stop_at = stop_at
        self.calls: list[tuple[int, Sampling]] = []  # prompts, settings

    def rollout(self, request: RolloutRequest, on_finished: OnFinished) -> Completions:
        sampling = request.sampling
        if len(self.calls) == self.stop_at:
            raise KeyboardInterrupt
        self.calls.append((len(request.prompts), sampling))
        rows = len(request)
        tokens = [self._response(sampling.seed, row) for row in range(rows)]
        for row in np.random.default_rng(0).permutation(rows):  # in whatever order they finish
            on_finished(int(row), tokens[row])
        starts = starts_of([len(each) for each in tokens])
        truncated = np.array([each[-1] != EOS for each in tokens])
        return Completions(np.concatenate(tokens), starts, np.zeros(int(starts[-1]), np.float32), truncated)

    def _response(self, seed: int, row: int) -> Ids:
        rng = np.random.default_rng([seed, row])
        if rng.random() < 0.2:
            return np.array([ord(character) for character in "I think"])
        return np.array([*(ord(character) for character in f"\\boxed{{{rng.integers(self.digits)}}}"), EOS])


@dataclass(frozen=True)
class FakeVerdict:
    correct: bool
    failure: str | None = None


class BoxGrader:
    """Right where the last box is the gold answer; a gold answer "crash" makes the grading fail."""

    def submit(
        self, response: str, problem: Problem, length: int, truncated: bool, place: GroupPlace | None = None
    ) -> Future[FakeVerdict]:
        future: Future[FakeVerdict] = Future()
        failed = problem.answer == "crash"
        future.set_result(FakeVerdict(last_box(response) == problem.answer, "timeout" if failed else None))
        return future


def problems(count: int, answer: str = "1") -> list[Problem]:
    return [Problem(id=f"p{index}", question=f"What is {index}?", answer=answer) for index in range(count)]
