"""Draws many responses at a time from several servers. A turn that a server fails to give is asked for again."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from backends.interface import OnFinished, RolloutRequest, Sampling
from backends.settings import EngineSection
from backends.vllm.api import ServerError, ServerTimeout, VllmApi, VllmResponse
from backends.vllm.drafts import ResponseDraft, TurnRequest
from backends.vllm.open_connections import CallAborted, OpenConnections

TICK_SECONDS = 0.1  # between two looks at whether to stop
ANSWER_SECONDS = 0.01  # between two looks at whether an environment has answered
RETRY_SECONDS = (0.3, 1.0, 3.0)  # waits before a call is made again
WATCH_SECONDS = 5.0  # between two looks at a server's count of tokens, at most
PACE_MARGIN = 4.0  # how many times slower than the slowest token so far a response may be


@dataclass(frozen=True)
class _DrawnTurn:
    """A turn, and the index of the server that drew it."""

    place: int
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
    drafts: Sequence[ResponseDraft],
    request: RolloutRequest,
    engine: EngineSection,
    vocabulary: int | None,
    on_finished: OnFinished,
) -> dict[int, str]:
    """Draw the rest of each draft; returns why servers were lost, by their index.

    Drafts stay unfinished if all servers were lost. ``interrupt`` is called in this thread ten times a second. Whatever
    it, the environments or ``on_finished`` raise ends everything: connections are closed, so the servers stop drawing.
    Raises BackendError for a request that a server refuses.
    """
    if not drafts:
        return {}
    pool = _Pool(servers, drafts, request.sampling, engine, vocabulary)
    try:
        return _Round(pool, drafts, request, on_finished).run()
    finally:
        pool.end()


class _Round:
    """Hands turns from the pool to the environments, and their answers back. All in the caller's thread."""

    def __init__(
        self, pool: _Pool, drafts: Sequence[ResponseDraft], request: RolloutRequest, on_finished: OnFinished
    ) -> None:
        self.pool, self.request, self.on_finished = pool, request, on_finished
        self.unfinished = {draft.place: draft for draft in drafts}
        self.waiting: dict[int, int] = {}  # responses whose environment works, and the servers of their last turns
        self.lost: dict[int, str] = {}
        self.threads = len(pool.threads)  # that have not ended

    def run(self) -> dict[int, str]:
        """Why servers were lost, by their index."""
        self.pool.start()
        while self.threads or self.waiting:
            self.request.interrupt()
            self.pool.leave_stalled_servers()
            if self.waiting:
                self._resume()
            if self.threads and not self._only_waiting:
                self._take_event()
        return self.lost

    @property
    def _only_waiting(self) -> bool:
        """Whether every response that is left waits for its environment."""
        return 0 < len(self.unfinished) == len(self.waiting)

    def _take_event(self) -> None:
        try:
            event = self.pool.events.get(timeout=ANSWER_SECONDS if self.waiting else TICK_SECONDS)
        except queue.Empty:
            return
        if isinstance(event, _ThreadEnded):
            self.threads -= 1
        elif isinstance(event, _LostServer):
            self.lost.setdefault(event.server, event.reason)
        elif isinstance(event, Exception):
            raise event
        else:
            self._add(event)

    def _add(self, drawn: _DrawnTurn) -> None:
        draft, turns = self.unfinished[drawn.place], self.request.turns
        ended = draft.add_turn(drawn.response, drawn.server)
        if ended and turns is not None:
            self.waiting[drawn.place] = drawn.server
            turns.turn_ended(drawn.place, draft.region)
        else:
            self._finish(draft, truncated=not ended)

    def _resume(self) -> None:
        """Ask for the next turns of responses whose environment has answered, at the servers that know them."""
        assert self.request.turns is not None
        for place, ids in self.request.turns.answers(wait=self._only_waiting or not self.threads):
            draft, server = self.unfinished[place], self.waiting.pop(place)
            if ids is None:
                self._finish(draft, truncated=False)
            else:
                draft.append(ids)
                self.pool.requests.put(draft.request, server)

    def _finish(self, draft: ResponseDraft, truncated: bool) -> None:
        draft.finish(truncated)
        del self.unfinished[draft.place]
        if not self.unfinished:
            self.pool.requests.close()
        self.on_finished(draft.place, draft.region)


class _RequestQueue:
    """Requests that no server has yet. Any server may take a shared one; the next turn of an episode belongs to the
    server that drew the turn before it, whose prefix cache holds what precedes.
    """

    def __init__(self, requests: Iterable[TurnRequest], servers: int) -> None:
        lock = threading.Lock()
        self._shared = deque(requests)
        self._of_server: list[deque[TurnRequest]] = [deque() for _ in range(servers)]
        self._ready = [threading.Condition(lock) for _ in range(servers)]
        self._closed = [False] * servers

    def put(self, request: TurnRequest, server: int | None = None) -> None:
        """Add a request, for one server unless that one is asked no more."""
        with self._ready[0]:
            if server is not None and not self._closed[server]:
                self._of_server[server].append(request)
                self._ready[server].notify()
                return
            self._shared.append(request)
            for ready in self._ready:
                ready.notify()

    def take(self, server: int) -> TurnRequest | None:
        """The next request for a server, once there is one; None if it is asked no more."""
        with self._ready[server]:
            while not self._closed[server]:
                for waiting in (self._of_server[server], self._shared):
                    if waiting:
                        return waiting.popleft()
                self._ready[server].wait()
        return None

    def close(self, server: int | None = None) -> None:
        """Ask a server no more, or none; other servers may take its requests."""
        with self._ready[0]:
            for number in range(len(self._closed)) if server is None else (server,):
                self._closed[number] = True
                self._shared.extend(self._of_server[number])
                self._of_server[number].clear()
            for ready in self._ready:
                ready.notify_all()


class _ServerLane:
    """The state of one server in the pool."""

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
        drafts: Sequence[ResponseDraft],
        sampling: Sampling,
        engine: EngineSection,
        vocabulary: int | None,
    ) -> None:
        self.events: queue.SimpleQueue[_DrawnTurn | _LostServer | _ThreadEnded | Exception] = queue.SimpleQueue()
        self.requests = _RequestQueue((draft.request for draft in drafts), len(servers))
        self._sampling, self._engine, self._vocabulary = sampling, engine, vocabulary
        self._lanes = [_ServerLane(api) for api in servers]
        self._seconds_per_token = 0.0  # of the slowest response so far
        each = min(engine.concurrency, -(-len(drafts) // len(servers)))
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
        self.requests.close()
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
            if lane.api.changing:
                lane.alive_at = now
            if lane.stop.is_set() or not begun:
                continue
            limit = self._engine.stall if lane.counts else self._patience()
            if now - max(lane.alive_at, min(begun)) > limit:
                reason = f"{lane.api.url}: no progress for {limit:.3g} s, with {len(begun)} requests open"
                self._leave(number, reason)

    def _leave(self, number: int, reason: str) -> None:
        """Ask a server no more."""
        self.events.put(_LostServer(number, reason))
        self._lanes[number].leave()
        self.requests.close(number)

    def _patience(self) -> float:
        """How long a server that does not count its tokens may take for a response, going by the slowest so far."""
        if not self._seconds_per_token:
            return self._engine.deadline
        longest = PACE_MARGIN * self._seconds_per_token * self._sampling.max_tokens
        return min(self._engine.deadline, max(self._engine.stall, longest))

    def _work(self, number: int, lane: _ServerLane) -> None:
        try:
            while (request := self.requests.take(number)) is not None:
                try:
                    self.events.put(_DrawnTurn(request.place, self._turn(request, lane), number))
                except (ServerError, CallAborted) as error:
                    self.requests.put(request)  # for another server
                    if isinstance(error, ServerError):
                        self._leave(number, str(error))
        except Exception as error:  # raised again in the caller's thread, where it can be seen
            self.events.put(error)
        finally:
            self.events.put(_ThreadEnded())

    def _turn(self, request: TurnRequest, lane: _ServerLane) -> VllmResponse:
        """A turn, asked for again if the server did not give a whole one."""
        sampling = replace(self._sampling, max_tokens=request.max_tokens)
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
                        request.prompt, sampling, request.seed, left, lane.connections, self._vocabulary
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
