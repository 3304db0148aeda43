"""A thread on every rank that notices when another rank hangs, says which one and where it stands, and ends the run.

A rank that is stopped, or stuck in a read from a broken disk, leaves the others blocked inside a collective call. No
Python code of their main threads runs there, neither a signal handler nor a timeout. So each rank has a thread that
sends the others a datagram twice a second: that it is alive, what its main thread does, and whether it got anywhere
since the last one. It reads signals too, from the file descriptor that C-level signal handlers write to.
"""

from __future__ import annotations

import json
import os
import secrets
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType

from backends.interface import Collective
from backends.process import claim_failure, reachable_address
from backends.settings import Parallel

INTERVAL = 0.5  # seconds between two datagrams; of more than 64 ranks longer, so that their number stays bounded
REPORT_AFTER = 60.0  # seconds without progress after which a line says who the others wait for
SILENT_AFTER = 4.0  # seconds without a datagram after which a rank counts as stopped once a person asks the run to end
DRAWING = ("rollout", "reward", "evaluate")  # phases that parallel.rollout_timeout is about
_PACKAGES = ("delta_cli", "backends")
_PLUMBING = ("collective.py", "watchdog.py", "sharding.py")  # not where a rank stands, but how it waits


@dataclass(frozen=True)
class RankStatus:
    """A rank's report on itself."""

    rank: int
    phase: str = "start"
    waiting: bool = False  # inside a collective call
    calls: int = 0  # collective calls it has entered
    progress: int = 0  # differs from the last one if its main thread got anywhere
    place: str = ""  # where its main thread stands


@dataclass(frozen=True)
class Sighting:
    """The last report of another rank, and when it came and last changed, in seconds of this rank's clock."""

    status: RankStatus
    heard: float  # when it last said anything
    moved: float  # when it last made progress


@dataclass(frozen=True)
class Suspect:
    """The rank that the others wait for."""

    status: RankStatus
    silent: bool  # it does not answer at all; otherwise it answers and stands still
    seconds: float

    def __str__(self) -> str:
        what = "has not answered" if self.silent else "has not moved"
        place = f", at {self.status.place}" if self.status.place else ""
        return f"rank {self.status.rank} {what} for {self.seconds:.0f} s in phase {self.status.phase}{place}"


def find_suspect(sightings: list[Sighting], now: float) -> Suspect | None:
    """The rank that has kept the others waiting longest; None if no rank is waiting.

    A rank that answers is suspected only while another one waits for it, or while no rank at all makes progress. If
    all of them wait, those that entered the fewest collective calls keep the others.
    """
    quiet = [Suspect(each.status, True, now - each.heard) for each in sightings if now - each.heard > SILENT_AFTER]
    if quiet:
        return max(quiet, key=lambda suspect: suspect.seconds)
    busy = [each for each in sightings if not each.status.waiting]
    if not busy:
        fewest = min(each.status.calls for each in sightings)
        busy = [each for each in sightings if each.status.calls == fewest]
    suspect = max((Suspect(each.status, False, now - each.moved) for each in busy), key=lambda each: each.seconds)
    others_wait = any(each.status.waiting for each in sightings if each.status.rank != suspect.status.rank)
    if others_wait:
        return suspect
    since = max(each.moved for each in sightings)  # the last progress of any rank
    return replace(suspect, seconds=now - since)


class Watchdog:
    """The thread of one rank. ``limits`` may be set anew once the recipe is known, ``phase`` as the run goes on.

    ``on_failure`` is called with the reason, on the one rank that reports it, before the process ends.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.limits = Parallel()
        self.on_failure: Callable[[str], None] = lambda reason: None
        self._own = RankStatus(rank)
        self._peers: dict[int, tuple[str, int]] = {}
        self._sightings: dict[int, Sighting] = {}
        self._token = ""
        self._interval = INTERVAL * max(1.0, size / 64)
        self._trace: object = None  # of the main thread, at the last look
        self._main = threading.main_thread().ident or 0
        self._followed = 0  # another thread, whose progress counts too
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(("", 0))
        self._socket.setblocking(False)
        self._signals, self._wakeup = os.pipe()
        self._asked: list[float] = []  # when a person asked the run to end
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def start(self, collective: Collective) -> None:
        """Tell the other ranks where to send to, and begin. Every rank calls it, in its main thread."""
        mine = reachable_address(), self._socket.getsockname()[1], secrets.token_hex(8)
        everyone = collective.gather(mine)
        self._token = everyone[0][2]
        self._peers = {rank: (host, port) for rank, (host, port, _) in enumerate(everyone) if rank != self._own.rank}
        os.set_blocking(self._wakeup, False)
        os.set_blocking(self._signals, False)
        signal.set_wakeup_fd(self._wakeup, warn_on_full_buffer=False)
        self._thread.start()

    @property
    def phase(self) -> str:
        """The phase that the run is in, in one word."""
        return self._own.phase

    @phase.setter
    def phase(self, name: str) -> None:
        self._own = replace(self._own, phase=name)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """To be held while this rank is inside a collective call."""
        self._own = replace(self._own, waiting=True, calls=self._own.calls + 1)
        try:
            yield
        finally:
            self._own = replace(self._own, waiting=False)

    def follow_this_thread(self) -> None:
        """Count what the calling thread does as progress of this rank: its main thread may wait for it."""
        self._followed = threading.get_ident()

    def close(self) -> None:
        """End the thread."""
        if self._thread.is_alive():
            self._ended.set()
            self._thread.join()
            with suppress(ValueError):  # closed from another thread than the main one
                signal.set_wakeup_fd(-1)
        self._socket.close()

    # ---------------------------------------------------------------------------- the thread

    def _run(self) -> None:
        looked = time.monotonic()
        reported: set[int] = set()
        while not self._ended.is_set():
            self._look_at_own()
            self._send()
            self._listen(looked + self._interval)
            now = time.monotonic()
            if now - looked > SILENT_AFTER + self._interval:  # this process was stopped itself: nothing was heard
                self._sightings = {rank: replace(each, heard=now, moved=now) for rank, each in self._sightings.items()}
            looked = now
            suspect = find_suspect(list(self._sightings.values()), now) if self._sightings else None
            if suspect is not None:
                self._judge(suspect, reported)

    def _judge(self, suspect: Suspect, reported: set[int]) -> None:
        """Report the suspect, or end the run because of it."""
        drawing = suspect.status.phase in DRAWING and not suspect.silent
        key = "parallel.rollout_timeout" if drawing else "parallel.timeout"
        limit = self.limits.rollout_timeout if drawing else self.limits.timeout
        if suspect.seconds > limit:
            self._fail(f"{suspect}, longer than {key} = {limit:g} s; the run goes on from its last checkpoint")
        if self._asked and suspect.silent:
            self._fail(f"{suspect} and would not have stopped; the run goes on from its last checkpoint")
        if suspect.seconds < min(REPORT_AFTER, limit):
            reported.discard(suspect.status.rank)
        elif suspect.status.rank not in reported:
            reported.add(suspect.status.rank)
            if self._speaks_for(suspect):
                _say(f"{suspect}; the others wait for it. The run ends after {key} = {limit:g} s, or by Ctrl-C")

    def _speaks_for(self, suspect: Suspect) -> bool:
        """Whether this is the first rank that answers and is not the suspect, so that one alone reports."""
        able = [rank for rank in self._sightings if rank != suspect.status.rank] or [suspect.status.rank]
        return min(able) == self._own.rank

    def _fail(self, reason: str) -> None:
        """End the process, whose main thread is blocked; one rank says why."""
        if claim_failure(reason):
            _say(reason + " with --resume")
            with suppress(OSError):
                self.on_failure(reason)
        os._exit(2)

    def _look_at_own(self) -> None:
        """Note where the main thread stands, and whether that is another place than last time."""
        frames = sys._current_frames()
        frame = frames.get(self._main)
        traces = (*_frames(frame), *_frames(frames.get(self._followed)))
        trace = (self._own.calls, self._own.waiting, self._own.phase, *traces)
        moved = trace != self._trace
        self._trace = trace
        self._own = replace(self._own, place=_place(frame), progress=self._own.progress + moved)
        self._see(self._own)

    def _see(self, status: RankStatus) -> None:
        """Remember what a rank says of itself."""
        now, before = time.monotonic(), self._sightings.get(status.rank)
        moved = before is None or before.status.progress != status.progress
        self._sightings[status.rank] = Sighting(status, now, now if moved or before is None else before.moved)

    def _send(self) -> None:
        own = self._own
        fields = [self._token, own.rank, own.phase, own.waiting, own.calls, own.progress, own.place]
        packet = json.dumps(fields).encode()
        for address in self._peers.values():
            with suppress(OSError):  # a rank that has ended, or a full buffer: the next one may get through
                self._socket.sendto(packet, address)

    def _listen(self, until: float) -> None:
        """Take in what the other ranks and signals say until a point in time."""
        while (left := until - time.monotonic()) > 0:
            ready, _, _ = select.select([self._socket.fileno(), self._signals], [], [], left)
            if self._signals in ready:
                self._hear_signals()
            if self._socket.fileno() in ready:
                self._receive()

    def _receive(self) -> None:
        with suppress(OSError, ValueError, TypeError):  # refused by a rank that has ended, or nobody's of this run
            packet, address = self._socket.recvfrom(4096)
            token, rank, *fields = json.loads(packet)
            if token == self._token and rank in self._peers:
                self._peers[rank] = address  # by which this machine is reached from there, whatever it calls itself
                self._see(RankStatus(rank, *fields))

    def _hear_signals(self) -> None:
        """The first signal stops the run at a safe point, if the main thread gets there; the second one ends it."""
        stops = [number for number in os.read(self._signals, 64) if number in (signal.SIGINT, signal.SIGTERM)]
        self._asked += [time.monotonic()] * len(stops)
        if len(self._asked) > 1:  # the main thread has not come to its handler, which would let the second one kill
            os._exit(128 + stops[-1])


def _frames(frame: FrameType | None) -> Iterator[tuple[int, int]]:
    while frame is not None:
        yield id(frame.f_code), frame.f_lineno
        frame = frame.f_back


def _place(frame: FrameType | None) -> str:
    """The innermost line of this program that a thread is in, but for the machinery of waiting."""
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        package = next((name for name in _PACKAGES if name in path.parts), None)
        if package is not None and path.name not in _PLUMBING:
            inside = path.parts[len(path.parts) - path.parts[::-1].index(package) - 1 :]
            return f"{'/'.join(inside)}:{frame.f_lineno} ({frame.f_code.co_name})"
        frame = frame.f_back
    return ""


def _say(line: str) -> None:
    """Not print: the main thread may hold the lock of standard error."""
    with suppress(OSError):
        os.write(2, f"delta: {line}\n".encode())
