"""Grading in worker processes that can be killed, beside whatever else is going on."""

from __future__ import annotations

import multiprocessing
import resource
import sys
import threading
import time
from collections.abc import Mapping
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field
from types import TracebackType

from pebble import ProcessExpired, ProcessPool

from delta_cli.data.problem import Problem
from delta_cli.errors import UserError
from delta_cli.rewards.code.sandbox import find_sandbox
from delta_cli.rewards.code.verdict import code_blocks
from delta_cli.rewards.math.boxed import closed_boxes
from delta_cli.rewards.math.last_number import MARK, last_number, number_reward
from delta_cli.rewards.math.verdict import quick_verdict
from delta_cli.rewards.spec import Kind, RewardSpec
from delta_cli.rewards.verifiers import Verifier, verifier

WORKER_BYTES = 4 * 2**30  # address space of a worker, at most
TICK = 0.05  # seconds between two looks at what runs
WORKER_TASKS = 4096  # responses a worker grades before a fresh one takes over


@dataclass(frozen=True)
class Verdict:
    """What a response earned."""

    reward: float  # with shaping
    correct: bool  # the verifier's verdict, without it
    failure: str | None  # "timeout", "worker died", "error: …"; the reward is then 0
    parts: Mapping[str, float] = field(default_factory=dict)  # of several rewards each alone, before its weight


class Grader:
    """Grades responses with one reward. Grading never raises: a failure is a verdict with reward 0.

    ``timeout`` is the seconds one response may take, after which its worker is killed; ``workers``
    processes start when the first response needs them, which plain numbers do not. Raises UserError
    where the reward cannot run on this machine.
    """

    def __init__(self, reward: RewardSpec, workers: int, timeout: float) -> None:
        if reward.kind == "code":
            find_sandbox(reward.allow_unsandboxed)
            timeout += reward.run_seconds  # the sandbox ends a program in time; this is for what hangs outside it
        self.spec = reward
        self.workers = workers
        self.timeout = timeout
        self._pool: ProcessPool | None = None
        self._lock = threading.Lock()
        self._clock: _Clock | None = None
        self._pending: set[Future[Verdict]] = set()

    def __enter__(self) -> Grader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def check(self, problem: Problem) -> None:
        """Grade an empty response to one example. Raises UserError with one line where that fails."""
        try:
            error = self._schedule("", problem).exception()
        except CancelledError:
            error = FutureTimeoutError()
        if error is not None:
            spec = self.spec
            what = f"{spec.path}:{spec.function}" if spec.kind == "custom" else f"the {spec.kind} reward"
            raise UserError(f"{what} cannot grade problem '{problem.id}': {_failure(error).removeprefix('error: ')}")

    def submit(self, response: str, problem: Problem, length: int, truncated: bool) -> Future[Verdict]:
        """Grade a response of ``length`` tokens; ``truncated`` when it ran into the limit."""
        result: Future[Verdict] = Future()
        shaping = self._shaping(response, length, truncated)
        base = self._at_once(response, problem, length, truncated)
        if base is not None:
            result.set_result(Verdict(base + shaping, base >= 1.0, None))
            return result
        self._pending.add(result)
        self._schedule(response, problem).add_done_callback(lambda done: self._finish(result, done, shaping))
        return result

    def close(self) -> None:
        """End the workers. What is still being graded fails."""
        with self._lock:
            pool, self._pool = self._pool, None
            clock, self._clock = self._clock, None
        if clock is not None:
            clock.stop()
        for result in list(self._pending):
            self._settle(result, Verdict(0.0, False, "error: the grader was closed"))
        if pool is not None:
            pool.stop()
            pool.join()

    def _at_once(self, response: str, problem: Problem, length: int, truncated: bool) -> float | None:
        """What takes microseconds and needs no worker; None where one has to look."""
        spec = self.spec
        if spec.kind == "math" and spec.grader == "strict":
            return quick_verdict(response, str(problem.answer), problem.question)
        if spec.kind == "number":
            return number_reward(response, str(problem.answer), problem.question)
        if spec.kind == "length":
            return max(1 - length / spec.limit, 0.0)
        if spec.kind == "format" and (truncated or spec.pattern is None):
            return float(not truncated and _well_formed(response, spec.form))
        return None

    def _shaping(self, response: str, length: int, truncated: bool) -> float:
        spec = self.spec
        total = -spec.length_penalty * length / 1000
        if spec.format_bonus and not truncated:
            total += spec.format_bonus * _well_formed(response, spec.kind)
        return total + (spec.overlong(length) if spec.overlong else 0.0)

    def _schedule(self, response: str, problem: Problem) -> Future[float]:
        with self._lock:
            if self._pool is not None and not self._pool.active:  # pebble gives up a pool whose idle worker died
                self._pool.stop()
                self._pool.join()
                self._pool = None
            if self._pool is None:
                self._pool = ProcessPool(
                    max_workers=self.workers,
                    max_tasks=WORKER_TASKS,
                    initializer=_start_worker,
                    initargs=(self.spec,),
                    context=multiprocessing.get_context("spawn"),  # a fork would inherit the threads of torch
                )
            if self._clock is None:
                self._clock = _Clock(self.timeout)
            return self._clock.watch(self._pool.schedule(_grade, args=(self.spec, response, problem)))

    def _finish(self, result: Future[Verdict], done: Future[float], shaping: float) -> None:
        if result not in self._pending:
            return  # the grader was closed meanwhile
        error = FutureTimeoutError() if done.cancelled() else done.exception()
        if error is None:
            base = done.result()
            self._settle(result, Verdict(base + shaping, base >= 1.0, None))
        else:
            self._settle(result, Verdict(0.0, False, _failure(error)))

    def _settle(self, result: Future[Verdict], verdict: Verdict) -> None:
        try:
            self._pending.remove(result)
        except KeyError:
            return  # settled already: the grader was closed meanwhile
        result.set_result(verdict)


class _Clock:
    """Ends what has run for longer than the limit, by a clock that cannot jump.

    The pool's own limit reads the time of day: set forward, it would end every verification at once.
    """

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self._stopped = threading.Event()
        self._watched: dict[Future[float], float | None] = {}  # when each was first seen to run
        self._lock = threading.Lock()
        threading.Thread(target=self._run, daemon=True).start()

    def watch(self, future: Future[float]) -> Future[float]:
        with self._lock:
            self._watched[future] = None
        return future

    def stop(self) -> None:
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.wait(TICK):
            with self._lock:
                self._watched = {future: start for future, start in self._watched.items() if not future.done()}
                running = [future for future in self._watched if future.running()]
                now = time.monotonic()
                for future in running:
                    self._watched[future] = self._watched[future] or now
            for future in running:
                if now - (self._watched.get(future) or now) > self.limit:
                    future.cancel()  # which kills its worker


def _well_formed(response: str, form: Kind) -> bool:
    """Whether a response has exactly one answer, in the form that a verifier reads."""
    if form == "code":
        return len(code_blocks(response)) == 1
    if form == "number":
        return response.count(MARK) == 1 and last_number(response) is not None
    boxes, unfinished = closed_boxes(response)
    return len(boxes) == 1 and not unfinished


def _failure(error: BaseException) -> str:
    if isinstance(error, FutureTimeoutError):
        return "timeout"
    if isinstance(error, ProcessExpired):
        return "worker died"
    if isinstance(error, UserError):
        return f"error: {error}"
    lines = str(error).strip().splitlines()
    return f"error: {type(error).__name__}: {lines[0][:200] if lines else ''}"


# ---------------------------------------------------------------------------- in a worker process

_verifiers: dict[RewardSpec, Verifier] = {}


def _start_worker(spec: RewardSpec) -> None:
    """Bound the memory, then import what grading needs before the first response's clock starts."""
    if sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_AS, (WORKER_BYTES, WORKER_BYTES))
    if spec.kind != "custom":  # a user's file may fail or hang; its clock starts with the first response
        _verifiers[spec] = verifier(spec)


def _grade(spec: RewardSpec, response: str, problem: Problem) -> float:
    if spec not in _verifiers:
        _verifiers[spec] = verifier(spec)
    return _verifiers[spec](response, problem)
