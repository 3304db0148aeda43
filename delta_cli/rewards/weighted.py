"""Several rewards as one: each graded on its own, and added up by weight."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, replace
from types import TracebackType

from delta_cli.data.problem import Problem
from delta_cli.rewards.grader import Grader, Verdict


@dataclass(frozen=True)
class Part:
    """One of the rewards, with workers and a time limit of its own."""

    grader: Grader
    name: str = ""  # different from the others'
    weight: float = 1.0
    verifies: bool = True  # whether it says what is right


class Graders:
    """What a response is worth: the weighted sum of one reward or several.

    A response is right where all rewards that verify say so. One whose grading fails adds nothing, a
    verifying one makes the response wrong, and the others count as ever.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = tuple(parts)

    def __enter__(self) -> Graders:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def verifying(self) -> Graders:
        """Those alone that say what is right, for evaluations. Their workers are the same ones."""
        return Graders([part for part in self.parts if part.verifies])

    def submit(self, response: str, problem: Problem, length: int, truncated: bool) -> Future[Verdict]:
        """Grade a response of ``length`` tokens; ``truncated`` when it ran into the limit."""
        result: Future[Verdict] = Future()
        left, lock = len(self.parts), threading.Lock()
        futures = [part.grader.submit(response, problem, length, truncated) for part in self.parts]

        def count(_: Future[Verdict]) -> None:
            nonlocal left
            with lock:
                left -= 1
                last = left == 0
            if last:
                result.set_result(self._sum([future.result() for future in futures]))

        for future in futures:
            future.add_done_callback(count)
        return result

    def close(self) -> None:
        """End the workers. What is still being graded fails."""
        with ExitStack() as stack:
            for part in self.parts:
                stack.callback(part.grader.close)

    def _sum(self, verdicts: Sequence[Verdict]) -> Verdict:
        graded = list(zip(self.parts, verdicts, strict=True))
        total = sum(part.weight * verdict.reward for part, verdict in graded)
        if len(graded) == 1:
            return replace(verdicts[0], reward=total)
        failures = [f"{part.name}: {verdict.failure}" for part, verdict in graded if verdict.failure is not None]
        return Verdict(
            reward=total,
            correct=all(verdict.correct for part, verdict in graded if part.verifies),
            failure="; ".join(failures) or None,
            parts={part.name: verdict.reward for part, verdict in graded},
        )
