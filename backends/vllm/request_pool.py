"""Draws many responses at a time from several servers. A response that a server fails to give is asked for again."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from backends.interface import Ids, Sampling
from backends.settings import EngineSection
from backends.vllm.api import ServerError, ServerTimeout, VllmApi, VllmResponse
from backends.vllm.open_connections import CallAborted, OpenConnections

TICK_SECONDS = 0.1  # between two looks at whether to stop
RETRY_SECONDS = (0.3, 1.0, 3.0)  # waits before a call is made again
WATCH_SECONDS = 5.0  # between two looks at a server's count of tokens, at most
PACE_MARGIN = 4.0  # how many times slower than the slowest token so far a response may be


@dataclass(frozen=True)
class ResponseRequest:
    """A response to draw."""

    place: int  # its index in the result
    prompt: Ids
    seed: int


@dataclass(frozen=True)
class ServedResponse:
    """A response, and the index of the server that drew it."""

    response: VllmResponse
    server: int


@dataclass(frozen=True)
class _LostServer:
    """A server that is asked no more in this rollout."""

    server: int
    reason: str


class _ThreadEnded:
    """A thread has nothing left to do."""


def draw(
    servers: Sequence[VllmApi],
    requests: Sequence[ResponseRequest],
    sampling: Sampling,
    engine: EngineSection,
    vocabulary: int | None,
    on_response: Callable[[int, Ids], None],
    interrupt: Callable[[], None],
) -> tuple[dict[int, ServedResponse], dict[int, str]]:
    """Responses by place, and why servers were lost, by their index.

    Responses are missing if their server was lost when the others had nothing left to draw. ``interrupt`` is called
    in this thread ten times a second. Whatever it or ``on_response`` raises ends everything: connections are closed,
    so the servers stop drawing. Raises BackendError for a request that a server refuses.
    """
    if not requests:
        return {}, {}
    pool = _Pool(servers, requests, sampling, engine, vocabulary)
    found: dict[int, ServedResponse] = {}
    lost: dict[int, str] = {}
    try:
        pool.start()
        running = len(pool.threads)
        while running:
            interrupt()
            pool.leave_stalled_servers()
            try:
                event = pool.events.get(timeout=TICK_SECONDS)
            except queue.Empty:
                continue
            if isinstance(event, _ThreadEnded):
                running -= 1
            elif isinstance(event, _LostServer):
                lost.setdefault(event.server, event.reason)
            elif isinstance(event, Exception):
                raise event
            else:
                place, served = event
                found[place] = served
                on_response(place, served.response.tokens)
    finally:
        pool.end()
    return found, lost


class _ServerLane:
    """What the pool knows of one server."""

    def __init__(self, api: VllmApi) -> None:
        self.api = api
        self.connections = OpenConnections()
        self.stop = threading.Event()
        self.open: dict[int, float] = {}  # requests that the server has, by place: when each was made
        self.alive_at = time.monotonic()  # when it last showed progress
        self.made: float | None = None  # its count of tokens
        self.counts = True  # whether it has such a count

    def leave(self) -> None:
        """Ask this server no more, and end its calls."""
        self.stop.set()
        self.connections.abort()

    def watch(self, interval: float) -> None:
        """Notice progress from the server's count of tokens."""
        while not self.stop.wait(interval):
            try:
                made = self.api.tokens_made(4 * interval, self.connections)
            except (ServerError, CallAborted):
                continue  # no sign of progress
            self.counts = made is not None
            if made != self.made:
                self.made, self.alive_at = made, time.monotonic()


class _Pool:
    """Threads that take requests from one queue. Each has one request at one server at a time."""

    def __init__(
        self,
        servers: Sequence[VllmApi],
        requests: Sequence[ResponseRequest],
        sampling: Sampling,
        engine: EngineSection,
        vocabulary: int | None,
    ) -> None:
        self.events: queue.SimpleQueue[tuple[int, ServedResponse] | _LostServer | _ThreadEnded | Exception] = (
            queue.SimpleQueue()
        )
        self._requests = deque(requests)  # append and popleft are atomic
        self._sampling, self._engine, self._vocabulary = sampling, engine, vocabulary
        self._lanes = [_ServerLane(api) for api in servers]
        self._seconds_per_token = 0.0  # of the slowest response so far
        each = min(engine.concurrency, -(-len(requests) // len(servers)))
        self.threads = [
            threading.Thread(target=self._work, args=(number, lane), daemon=True)
            for _ in range(each)
            for number, lane in enumerate(self._lanes)
        ]
        interval = min(engine.stall / 4, WATCH_SECONDS)
        self._watchers = [threading.Thread(target=lane.watch, args=(interval,), daemon=True) for lane in self._lanes]

    def start(self) -> None:
        for thread in (*self.threads, *self._watchers):
            thread.start()

    def end(self) -> None:
        """Give up what is still being drawn, and wait for the threads."""
        for lane in self._lanes:
            lane.leave()
        for thread in (*self.threads, *self._watchers):
            if thread.ident is not None:
                thread.join()

    def leave_stalled_servers(self) -> None:
        """Leave servers that have requests but have shown no progress for too long."""
        now = time.monotonic()
        for number, lane in enumerate(self._lanes):
            begun = list(lane.open.values())
            if lane.stop.is_set() or not begun:
                continue
            limit = self._engine.stall if lane.counts else self._patience()
            if now - max(lane.alive_at, min(begun)) > limit:
                reason = f"{lane.api.url}: no progress for {limit:.3g} s, with {len(begun)} requests open"
                self.events.put(_LostServer(number, reason))
                lane.leave()

    def _patience(self) -> float:
        """How long a server that does not count its tokens may take for a response, going by the slowest so far."""
        if not self._seconds_per_token:
            return self._engine.deadline
        longest = PACE_MARGIN * self._seconds_per_token * self._sampling.max_tokens
        return min(self._engine.deadline, max(self._engine.stall, longest))

    def _work(self, number: int, lane: _ServerLane) -> None:
        try:
            while not lane.stop.is_set():
                try:
                    request = self._requests.popleft()
                except IndexError:
                    return
                try:
                    self.events.put((request.place, ServedResponse(self._response(request, lane), number)))
                except (ServerError, CallAborted) as error:
                    self._requests.append(request)  # for another server
                    if isinstance(error, ServerError):
                        self.events.put(_LostServer(number, str(error)))
                        lane.leave()
        except Exception as error:  # raised again in the caller's thread, where it can be seen
            self.events.put(error)
        finally:
            self.events.put(_ThreadEnded())

    def _response(self, request: ResponseRequest, lane: _ServerLane) -> VllmResponse:
        """A response, asked for again if the server did not give a whole one."""
        begun = time.monotonic()
        end, reason = begun + self._engine.deadline, ""
        lane.open[request.place] = begun
        try:
            for wait in (*RETRY_SECONDS, None):
                try:
                    left = end - time.monotonic()
                    if left <= 0:
                        raise ServerTimeout(
                            f"{lane.api.url}: no whole answer within {self._engine.deadline:.3g} s{reason}"
                        )
                    found = lane.api.draw(
                        request.prompt, self._sampling, request.seed, left, lane.connections, self._vocabulary
                    )
                    self._note_progress(lane, (time.monotonic() - begun) / len(found.tokens))
                    return found
                except ServerTimeout:
                    raise
                except ServerError as error:
                    if wait is None:
                        raise
                    reason = f" ({error})"
                    if lane.stop.wait(min(wait, max(end - time.monotonic(), 0))):
                        raise CallAborted from None
        finally:
            del lane.open[request.place]
        raise AssertionError  # the last attempt returns or raises

    def _note_progress(self, lane: _ServerLane, seconds_per_token: float) -> None:
        lane.alive_at = time.monotonic()
        self._seconds_per_token = max(self._seconds_per_token, seconds_per_token)
