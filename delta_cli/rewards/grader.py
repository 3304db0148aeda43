"""Grading responses: in this process if that takes microseconds, otherwise in worker processes that can be killed."""

from __future__ import annotations

import math
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from delta_cli.data.problem import Problem
from delta_cli.errors import UserError
from delta_cli.recipe.reward import JudgeSection, Reward, RewardKind
from delta_cli.rewards.code.sandbox import find_sandbox
from delta_cli.rewards.judge import JudgeClient, JudgeUsage, check_template
from delta_cli.rewards.math.verdict import quick_verdict
from delta_cli.rewards.verifiers import verifier, well_formed
from delta_cli.rewards.worker_pool import GradingRequest, Score, WorkerPool, failure

MODEL_START_SECONDS = 1800.0  # for a worker to load a reward model
QUICK_CHARACTERS = 20_000  # a longer response is graded in a worker, whatever its reward


@dataclass(frozen=True)
class Verdict:
    """What a response earned."""

    reward: float  # with shaping
    correct: bool  # the verifier's verdict, without shaping
    failure: str | None  # "timeout", "worker died", "error: …"; the reward is then 0
    parts: Mapping[str, float] = field(default_factory=dict)  # of several rewards: each alone, before its weight
    void: bool = False  # there is no verdict: the response has no advantage, and the reward means nothing


@dataclass(frozen=True)
class GroupPlace:
    """Where a response belongs: the group of its prompt, and its place in it."""

    groups: ResponseGroups
    group: int
    place: int


class ResponseGroups:
    """Collects the responses of a rollout by prompt; a group is graded when its last response is there.

    A response that is reported again, because it had to be drawn again, replaces the earlier one, and its group is
    graded again.
    """

    def __init__(self, samples: int) -> None:
        self.samples = samples
        self._lock = threading.Lock()
        self._texts: defaultdict[tuple[int, int], dict[int, str]] = defaultdict(dict)  # of a pool and group, by place
        self._waiting: defaultdict[tuple[int, int], list[tuple[int, Future[Score]]]] = defaultdict(list)

    def add(self, pool: WorkerPool, problem: Problem, group: int, place: int, response: str) -> Future[Score]:
        """The score of a response among those of its group, from a worker of ``pool``."""
        key, result = (id(pool), group), Future[Score]()
        with self._lock:
            self._texts[key][place] = response
            self._waiting[key].append((place, result))
            if len(self._texts[key]) < self.samples:
                return result
            waiting = self._waiting.pop(key)
            responses = tuple(self._texts[key][place] for place in range(self.samples))

        def settle(done: Future[Score]) -> None:
            score = Score(0.0, failure="error: the grader was closed") if done.cancelled() else done.result()
            for own, future in waiting:
                future.set_result(score if score.values is None else _own_score(score.values[own]))

        pool.submit(GradingRequest("", problem, responses=responses)).add_done_callback(settle)
        return result


class Grader:
    """Grades responses with one reward. Grading never raises: a failure is a verdict with reward 0.

    ``max_tokens`` is the limit of a response and ``form`` the verifier whose form a reward of kind
    format asks for. A response may take ``reward.timeout`` seconds (for programs ``run_seconds``
    more), after which its worker is killed. Raises UserError if the reward cannot run on this machine.
    """

    def __init__(
        self, reward: Reward, max_tokens: int = 1, form: RewardKind = "math", verdicts: Path | None = None
    ) -> None:
        self.reward = reward
        self.max_tokens = max_tokens
        self.form = form
        timeout = reward.timeout
        if reward.kind == "code":
            find_sandbox(reward.allow_unsandboxed)
            timeout += reward.run_seconds  # the sandbox ends a program in time; the rest is for what hangs outside it
        self._quick = quick_verifier(reward, form)
        if reward.model is None:
            self._pool = WorkerPool(reward, form, reward.workers, timeout)
        else:  # one process, since each has the model in memory
            self._pool = WorkerPool(reward, form, 1, reward.model.timeout, MODEL_START_SECONDS)
        self._judge: JudgeClient | None = None
        self._right = 1.0  # the score from which a response is right
        if reward.kind == "judge":
            settings = reward.judge or JudgeSection()
            self._judge = JudgeClient(settings, verdicts)
            self._right = (settings.right or settings.best) / settings.best
        elif reward.model is not None:
            self._right = reward.model.right

    def __enter__(self) -> Grader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def check(self, problem: Problem) -> None:
        """Grade an empty response to one problem. Raises UserError with one line if that fails.

        A judge is not asked; only its template is tried.
        """
        if self._judge is not None:
            check_template(self._judge.template, problem)
            return
        request = GradingRequest("", problem, responses=("",) if self._by_group else None)
        problem_found = self._pool.submit(request).result().failure
        if problem_found is not None:
            reward = self.reward
            name = f"{reward.custom_file}:{reward.custom_function}"
            what = name if reward.kind == "custom" else f"the {reward.kind} reward"
            raise UserError(f"{what} cannot grade problem '{problem.id}': {problem_found.removeprefix('error: ')}")

    def submit(
        self,
        response: str,
        problem: Problem,
        length: int,
        truncated: bool,
        earned: float | None = None,
        place: GroupPlace | None = None,
    ) -> Future[Verdict]:
        """Grade a response of ``length`` tokens; ``truncated`` says whether it reached the limit.

        ``earned`` is the reward of its environment, ``place`` its place among the responses to its prompt, which a
        reward that compares them needs.
        """
        result: Future[Verdict] = Future()

        def settle(done: Future[Score]) -> None:
            score = Score(0.0, failure="error: the grader was closed") if done.cancelled() else done.result()
            result.set_result(self._verdict(score, length))

        try:
            graded = self._graded(response, problem, length, truncated, earned, place)
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
        if self._judge is not None:
            self._judge.close()

    def used(self) -> JudgeUsage | None:
        """What a judge was asked since the last call; None without one."""
        return None if self._judge is None else self._judge.used()

    def _graded(
        self,
        response: str,
        problem: Problem,
        length: int,
        truncated: bool,
        earned: float | None,
        place: GroupPlace | None,
    ) -> Score | Future[Score]:
        """The score at once if no text has to be read for long; otherwise from a worker, or from a judge."""
        reward = self.reward
        if self._judge is not None:
            return self._judge.submit(response, problem)
        if self._by_group:
            place = place or GroupPlace(ResponseGroups(1), 0, 0)
            return place.groups.add(self._pool, problem, place.group, place.place, response)
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

    @property
    def _by_group(self) -> bool:
        """Whether workers take all responses to a prompt at once."""
        return self.reward.group or self.reward.kind == "model"

    def _verdict(self, score: Score, length: int) -> Verdict:
        if score.failure is not None or not math.isfinite(score.value):
            void = score.void or self.reward.kind == "model"  # no zero: a reward model's scores have no natural zero
            return Verdict(0.0, False, score.failure or "error: the reward is not finite", void=void)
        added = shaping(self.reward, length, self.max_tokens, score.well_formed)
        return Verdict(score.value + added, score.value >= self._right, None)


def quick_verifier(reward: Reward, form: RewardKind) -> Callable[[str, Problem], float | None]:
    """What needs no worker: a verifier that takes microseconds on a short response, and None if it cannot decide."""
    if reward.kind == "math" and reward.verifier == "strict":
        return lambda response, problem: quick_verdict(response, str(problem.answer), problem.question)
    if reward.kind == "number" or (reward.kind == "format" and reward.pattern is None):
        return verifier(reward, form)
    return lambda response, problem: None


def shaping(reward: Reward, length: int, max_tokens: int, well_formed: bool) -> float:
    """What is added to the verdict on a response of ``length`` tokens."""
    total = -reward.length_penalty * length / 1000 + reward.format_bonus * well_formed
    if reward.overlong_buffer is not None:
        total += overlong_penalty(length, max_tokens, reward.overlong_buffer, reward.overlong_factor)
    return total


def overlong_penalty(length: int, limit: int, buffer: int, factor: float) -> float:
    """Zero up to ``limit - buffer`` tokens, then falling linearly to ``-factor`` at ``limit`` (method, section 3)."""
    return min(-(length - (limit - buffer)) / buffer, 0.0) * factor


def _own_score(value: float | None) -> Score:
    """The score of one response of a group. A reward model has none for what is too long for it."""
    if value is None:
        return Score(0.0, failure="error: longer than the reward model reads (reward.model.max_length)", void=True)
    return Score(value)
