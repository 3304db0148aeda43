"""Grading responses: in this process if that takes microseconds, otherwise in worker processes that can be killed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import TracebackType

from delta_cli.data.problem import Problem
from delta_cli.errors import UserError
from delta_cli.recipe.reward import Reward, RewardKind
from delta_cli.rewards.code.sandbox import find_sandbox
from delta_cli.rewards.verifiers import quick_verifier, well_formed
from delta_cli.rewards.worker_pool import GradingRequest, Score, WorkerPool, failure

QUICK_CHARACTERS = 20_000  # a longer response is graded in a worker, whatever its reward


@dataclass(frozen=True)
class Verdict:
    """What a response earned."""

    reward: float  # with shaping
    correct: bool  # the verifier's verdict, without shaping
    failure: str | None  # "timeout", "worker died", "error: …"; the reward is then 0
    parts: Mapping[str, float] = field(default_factory=dict)  # of several rewards: each alone, before its weight


class Grader:
    """Grades responses with one reward. Grading never raises: a failure is a verdict with reward 0.

    ``max_tokens`` is the limit of a response and ``form`` the verifier whose form a reward of kind
    format asks for. A response may take ``reward.timeout`` seconds (for programs ``run_seconds``
    more), after which its worker is killed. Raises UserError if the reward cannot run on this machine.
    """

    def __init__(self, reward: Reward, max_tokens: int = 1, form: RewardKind = "math") -> None:
        self.reward = reward
        self.max_tokens = max_tokens
        self.form = form
        timeout = reward.timeout
        if reward.kind == "code":
            find_sandbox(reward.allow_unsandboxed)
            timeout += reward.run_seconds  # the sandbox ends a program in time; the rest is for what hangs outside it
        self._quick = quick_verifier(reward, form)
        self._pool = WorkerPool(reward, form, reward.workers, timeout)

    def __enter__(self) -> Grader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def check(self, problem: Problem) -> None:
        """Grade an empty response to one problem. Raises UserError with one line if that fails."""
        problem_found = self._pool.submit(GradingRequest("", problem)).result().failure
        if problem_found is not None:
            reward = self.reward
            name = f"{reward.custom_file}:{reward.custom_function}"
            what = name if reward.kind == "custom" else f"the {reward.kind} reward"
            raise UserError(f"{what} cannot grade problem '{problem.id}': {problem_found.removeprefix('error: ')}")

    def submit(
        self, response: str, problem: Problem, length: int, truncated: bool, earned: float | None = None
    ) -> Future[Verdict]:
        """Grade a response of ``length`` tokens; ``truncated`` says whether it reached the limit.

        ``earned`` is the reward of its environment.
        """
        result: Future[Verdict] = Future()

        def settle(done: Future[Score]) -> None:
            score = Score(0.0, failure="error: the grader was closed") if done.cancelled() else done.result()
            result.set_result(self._verdict(score, length))

        try:
            graded = self._graded(response, problem, length, truncated, earned)
            if isinstance(graded, Score):
                result.set_result(self._verdict(graded, length))
            else:
                graded.add_done_callback(settle)
        except Exception as error:
            result.set_result(self._verdict(Score(0.0, failure=failure(error)), length))
        return result

    def close(self) -> None:
        """End the workers. What is still being graded fails."""
        self._pool.close()

    def _graded(
        self, response: str, problem: Problem, length: int, truncated: bool, earned: float | None
    ) -> Score | Future[Score]:
        """The score at once if no text has to be read for long; otherwise from a worker."""
        reward = self.reward
        short = len(response) <= QUICK_CHARACTERS
        form = reward.format_bonus != 0 and not truncated
        value = None
        if reward.kind == "length":
            value = max(1 - length / self.max_tokens, 0.0)
        elif reward.kind == "environment" and earned is None:
            return Score(0.0, failure="error: the environment gave no reward")
        elif reward.kind == "environment":
            value = earned
        elif reward.kind == "format" and truncated:
            value = 0.0
        elif short:
            value = self._quick(response, problem)
        if value is not None and (short or not form):
            return Score(value, form and well_formed(response, reward.kind))
        return self._pool.submit(GradingRequest(response, problem, value, form))

    def _verdict(self, score: Score, length: int) -> Verdict:
        if score.failure is not None or not math.isfinite(score.value):
            return Verdict(0.0, False, score.failure or "error: the reward is not finite")
        added = shaping(self.reward, length, self.max_tokens, score.well_formed)
        return Verdict(score.value + added, score.value >= 1.0, None)


def shaping(reward: Reward, length: int, max_tokens: int, well_formed: bool) -> float:
    """What is added to the verdict on a response of ``length`` tokens."""
    total = -reward.length_penalty * length / 1000 + reward.format_bonus * well_formed
    if reward.overlong_buffer is not None:
        total += overlong_penalty(length, max_tokens, reward.overlong_buffer, reward.overlong_factor)
    return total


def overlong_penalty(length: int, limit: int, buffer: int, factor: float) -> float:
    """Zero up to ``limit - buffer`` tokens, then falling linearly to ``-factor`` at ``limit`` (method, section 3)."""
    return min(-(length - (limit - buffer)) / buffer, 0.0) * factor
