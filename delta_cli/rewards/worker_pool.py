"""Worker processes that grade responses and can be killed."""

from __future__ import annotations

import json
import pickle
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from delta_cli.data.problem import Problem
from delta_cli.errors import UserError, typed_line
from delta_cli.recipe.reward import Reward, RewardKind

START_SECONDS = 120.0  # for a worker to import what it needs
MAX_GRADED = 4096  # responses a worker grades before a fresh one takes over, which bounds what leaks
# A worker runs this instead of the main module of whoever started it: a script without a main guard is not run again.
START = """
import pickle, socket, sys
link = socket.socket(fileno=int(sys.argv[1]))
requests = link.makefile("rb")
sys.path[:] = pickle.load(requests)
from delta_cli.rewards.worker import main
main(link, requests)
"""


@dataclass(frozen=True)
class GradingRequest:
    """What a worker is asked: to verify a response, to look at its form, or both."""

    response: str
    problem: Problem
    value: float | None = None  # the verifier's value, if it is known already
    form: bool = False  # whether to look at the form
    responses: tuple[str, ...] | None = None  # of a whole group, for a reward that compares them


@dataclass(frozen=True)
class Score:
    """What came of it. ``failure`` is "timeout", "worker died" or "error: …"."""

    value: float
    well_formed: bool = False
    failure: str | None = None
    values: tuple[float | None, ...] | None = None  # of a whole group; None: too long for a reward model
    void: bool = False  # there is no score at all, not even 0: the response teaches nothing


class WorkerPool:
    """Up to ``workers`` processes, started when requests need them, each killed after ``timeout`` seconds on one."""

    def __init__(
        self, reward: Reward, form: RewardKind, workers: int, timeout: float, start_seconds: float = START_SECONDS
    ) -> None:
        self.timeout = timeout
        self._start_seconds = start_seconds
        self._setup = pickle.dumps((reward, form, timeout))
        self._threads = ThreadPoolExecutor(workers, "grading")  # one waits for each worker
        self._lock = threading.Lock()
        self._workers: set[_Worker] = set()
        self._idle: list[_Worker] = []
        self._closed = False

    def submit(self, request: GradingRequest) -> Future[Score]:
        """Grade in a worker. The future is cancelled if the pool is closed; it holds no exception."""
        return self._threads.submit(self._grade, request)

    def close(self) -> None:
        """Kill the workers and cancel what waits."""
        with self._lock:
            self._closed = True
            for worker in self._workers:
                worker.kill()
        self._threads.shutdown(cancel_futures=True)
        for worker in list(self._workers):
            self._end(worker)

    def _grade(self, request: GradingRequest) -> Score:
        worker = None
        try:
            message = pickle.dumps(request)
            worker = self._take()
            score = Score(**json.loads(worker.ask(message, self.timeout)))
        except Exception as error:
            if worker is not None:
                self._end(worker)
            return Score(0.0, failure="error: the grader was closed" if self._closed else failure(error))
        self._give_back(worker)
        return score

    def _take(self) -> _Worker:
        """An idle worker that lives, or a new one."""
        while True:
            with self._lock:
                if not self._idle:
                    break
                worker = self._idle.pop()
            if worker.alive():
                return worker
            self._end(worker)
        worker = _Worker()
        with self._lock:
            self._workers.add(worker)
            if self._closed:
                worker.kill()
        try:
            started = Score(**json.loads(worker.ask(self._setup, self._start_seconds)))
        except Exception:
            self._end(worker)
            raise
        if started.failure is not None:
            self._end(worker)
            raise WorkerStartError(started.failure)
        return worker

    def _give_back(self, worker: _Worker) -> None:
        if worker.graded >= MAX_GRADED:
            self._end(worker)
            return
        with self._lock:
            self._idle.append(worker)

    def _end(self, worker: _Worker) -> None:
        worker.kill()
        worker.wait()
        with self._lock:
            self._workers.discard(worker)


class WorkerStartError(Exception):
    """A worker that could not start; the text is a ``failure``."""


class _Worker:
    """One process and the socket to it: pickled requests go out, lines of JSON come back."""

    def __init__(self) -> None:
        self._link, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-P", "-c", START, str(theirs.fileno())]
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=(theirs.fileno(),))
        self._link.sendall(pickle.dumps(sys.path))
        self.graded = 0

    def alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, message: bytes, seconds: float) -> bytes:
        """The answer to a message. Raises TimeoutError after ``seconds`` and EOFError if the process is gone."""
        deadline = time.monotonic() + seconds
        self.graded += 1
        answer = b""
        try:
            self._link.settimeout(seconds)
            self._link.sendall(len(message).to_bytes(8, "big") + message)
            while not answer.endswith(b"\n"):
                self._link.settimeout(max(deadline - time.monotonic(), 1e-3))
                part = self._link.recv(65536)
                if not part:
                    raise EOFError
                answer += part
        except (BrokenPipeError, ConnectionResetError):
            raise EOFError from None
        return answer

    def kill(self) -> None:
        self._process.kill()

    def wait(self) -> None:
        self._process.wait()
        self._link.close()


def failure(error: BaseException) -> str:
    """One line on why a response has no score."""
    if isinstance(error, TimeoutError):
        return "timeout"
    if isinstance(error, EOFError):
        return "worker died"
    if isinstance(error, WorkerStartError):
        return str(error)
    if isinstance(error, UserError):
        return f"error: {error}"[:1000]
    return f"error: {typed_line(error)}"
