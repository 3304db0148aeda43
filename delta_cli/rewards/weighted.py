"""Several rewards as one: each is graded on its own, and they are added up by weight."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, replace
from types import TracebackType

from delta_cli.data.problem import Problem
from delta_cli.rewards.grader import Grader, GroupPlace, Verdict
from delta_cli.rewards.judge import JudgeUsage


@dataclass(frozen=True)
class RewardTerm:
    """One of the rewards, with workers and a time limit of its own."""

    grader: Grader
    name: str = ""  # unique among the terms
    weight: float = 1.0
    verifies: bool = True  # whether it says what is right


class WeightedReward:
    """What a response is worth: the weighted sum of one reward or several.

    A response is right if all rewards that verify say so. A reward whose grading fails adds nothing,
    and makes the response wrong if it verifies; the others count as usual. If a judge has no verdict, the sum has none.
    Without terms nothing is graded.
    """

    def __init__(self, terms: Sequence[RewardTerm]) -> None:
        self.terms = tuple(terms)

    def __enter__(self) -> WeightedReward:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def verifying(self) -> WeightedReward:
        """Only the rewards that say what is right, for evaluations, with the same workers."""
        return WeightedReward([term for term in self.terms if term.verifies])

    def submit(
        self,
        response: str,
        problem: Problem,
        length: int,
        truncated: bool,
        earned: float | None = None,
        place: GroupPlace | None = None,
    ) -> Future[Verdict]:
        """Grade a response of ``length`` tokens; see :meth:`Grader.submit`."""
        result: Future[Verdict] = Future()
        if not self.terms:
            result.set_result(Verdict(0.0, False, None))
        left, lock = len(self.terms), threading.Lock()
        futures = [term.grader.submit(response, problem, length, truncated, earned, place) for term in self.terms]

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
            for term in self.terms:
                stack.callback(term.grader.close)

    def used(self) -> JudgeUsage | None:
        """What judges were asked since the last call; None without a judge."""
        usages = [usage for term in self.terms if (usage := term.grader.used()) is not None]
        return sum(usages, JudgeUsage()) if usages else None

    def _sum(self, verdicts: Sequence[Verdict]) -> Verdict:
        graded = list(zip(self.terms, verdicts, strict=True))
        total = sum(term.weight * verdict.reward for term, verdict in graded)
        if len(graded) == 1:
            return replace(verdicts[0], reward=total)
        failures = [f"{term.name}: {verdict.failure}" for term, verdict in graded if verdict.failure is not None]
        return Verdict(
            reward=total,
            correct=all(verdict.correct for term, verdict in graded if term.verifies),
            failure="; ".join(failures) or None,
            void=any(verdict.void for verdict in verdicts),
            parts={term.name: verdict.reward for term, verdict in graded},
        )
