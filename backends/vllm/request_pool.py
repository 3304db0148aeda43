"""Many requests at a time to several servers, each made again where that cannot count anything twice."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from backends.interface import BackendError, Ids, Sampling
from backends.vllm.api import ServerError, ServerTimeout, VllmApi, VllmResponse
from backends.vllm.open_connections import CallAborted, OpenConnections

TICK_SECONDS = 0.1  # between two looks at whether to stop
RETRY_SECONDS = (0.3, 1.0, 3.0)  # waited before a call is made again; an answer is whole or counts nothing


@dataclass(frozen=True)
class ResponseRequest:
    """A response to draw."""

    place: int  # its index in the result
    prompt: Ids
    seed: int


@dataclass(frozen=True)
class ServedResponse:
    """A response, and which of the servers it is from."""

    answer: VllmResponse
    server: int


@dataclass(frozen=True)
class _Lost:
    """A server that does not answer any more."""

    server: int
    reason: str


class _Ended:
    """A thread has nothing left to do."""


def draw(
    servers: Sequence[VllmApi],
    jobs: Sequence[ResponseRequest],
    sampling: Sampling,
    *,
    concurrency: int,
    deadline: float,
    vocabulary: int | None,
    on_answer: Callable[[int, Ids], None],
    tick: Callable[[], None],
) -> tuple[dict[int, ServedResponse], dict[int, str]]:
    """Responses by place, and why servers were lost; what these had left is missing where no other took it over.

    ``tick`` is called in this thread every now and then, and what it or ``on_answer`` raises ends everything:
    connections are closed, so the servers stop drawing. Raises BackendError for a request that is refused.
    """
    team = _Team(servers, jobs, sampling, concurrency, deadline, vocabulary)
    found: dict[int, ServedResponse] = {}
    lost: dict[int, str] = {}
    try:
        team.start()
        running = len(team.threads)
        while running:
            tick()
            try:
                event = team.events.get(timeout=TICK_SECONDS)
            except queue.Empty:
                continue
            if isinstance(event, _Ended):
                running -= 1
            elif isinstance(event, _Lost):
                lost.setdefault(event.server, event.reason)
            elif isinstance(event, BackendError):
                raise event
            else:
                place, drawn = event
                found[place] = drawn
                on_answer(place, drawn.answer.tokens)
    finally:
        team.end()
    return found, lost


class _Team:
    """Threads that take jobs from one queue, each making one request at a time to one server."""

    def __init__(
        self,
        servers: Sequence[VllmApi],
        jobs: Sequence[ResponseRequest],
        sampling: Sampling,
        concurrency: int,
        deadline: float,
        vocabulary: int | None,
    ) -> None:
        self.events: queue.SimpleQueue[tuple[int, ServedResponse] | _Lost | _Ended | BackendError] = queue.SimpleQueue()
        self._jobs = deque(jobs)  # its append and popleft are atomic
        self._sampling, self._deadline, self._vocabulary = sampling, deadline, vocabulary
        self._calls = [OpenConnections() for _ in servers]
        self._stop = [threading.Event() for _ in servers]
        each = min(concurrency, -(-len(jobs) // len(servers)))
        self.threads = [
            threading.Thread(target=self._work, args=(number, server), daemon=True)
            for _ in range(each)
            for number, server in enumerate(servers)
        ]

    def start(self) -> None:
        for thread in self.threads:
            thread.start()

    def end(self) -> None:
        """Give up what is still being drawn, and wait for the threads."""
        for number in range(len(self._calls)):
            self._leave(number)
        for thread in self.threads:
            if thread.ident is not None:
                thread.join()

    def _leave(self, number: int) -> None:
        self._stop[number].set()
        self._calls[number].abort()

    def _work(self, number: int, server: VllmApi) -> None:
        try:
            while not self._stop[number].is_set():
                try:
                    job = self._jobs.popleft()
                except IndexError:
                    return
                try:
                    self.events.put((job.place, ServedResponse(self._patiently(job, number, server), number)))
                except ServerError as error:
                    self._jobs.append(job)  # for another server
                    self.events.put(_Lost(number, str(error)))
                    self._leave(number)
                except CallAborted:
                    self._jobs.append(job)
                    return
        except BackendError as error:
            self.events.put(error)
        finally:
            self.events.put(_Ended())

    def _patiently(self, job: ResponseRequest, number: int, server: VllmApi) -> VllmResponse:
        """A response, asked for again where the server did not give a whole one."""
        end, reason = time.monotonic() + self._deadline, ""
        for wait in (*RETRY_SECONDS, None):
            try:
                left = end - time.monotonic()
                if left <= 0:
                    raise ServerTimeout(f"no whole answer within {self._deadline:.0f} s{reason}")
                answer = server.draw(job.prompt, self._sampling, job.seed, left, self._calls[number])
                if self._vocabulary is not None and answer.tokens.max() >= self._vocabulary:
                    raise ServerError(f"token id {answer.tokens.max()} is not in the model's vocabulary")
                return answer
            except ServerTimeout:
                raise
            except ServerError as error:
                if wait is None:
                    raise
                reason = f" ({error})"
                if self._stop[number].wait(min(wait, max(end - time.monotonic(), 0))):
                    raise CallAborted from None
        raise AssertionError  # the last attempt returns or raises
