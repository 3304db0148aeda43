"""Ranks as threads of one process: everyone waits for everyone, then reads the same."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np


class Meeting:
    """Where the threads exchange what they hand in."""

    def __init__(self, size: int) -> None:
        self.items: list[Any] = [None] * size
        self.barrier = threading.Barrier(size, timeout=10)


@dataclass(frozen=True)
class ThreadRanks:
    """The collective of one of the threads; see ``backends.interface.Collective``."""

    rank: int
    size: int
    meeting: Meeting

    def gather(self, item: Any) -> list[Any]:
        self.meeting.items[self.rank] = item
        self.meeting.barrier.wait()
        found = list(self.meeting.items)
        self.meeting.barrier.wait()
        return found

    def sum(self, array: np.ndarray) -> np.ndarray:
        assert array.dtype == np.float64
        return np.sum(self.gather(array), axis=0)

    def barrier(self) -> None:
        self.gather(None)

    def close(self) -> None:
        pass


def on_ranks(size: int, work: Callable[[ThreadRanks], Any]) -> list[Any]:
    """What ``work`` returns on each rank; its first error is raised here."""
    meeting, results, errors = Meeting(size), [None] * size, []

    def run(rank: int) -> None:
        try:
            results[rank] = work(ThreadRanks(rank, size, meeting))
        except BaseException as error:  # raised again below, in the test's own thread
            errors.append(error)
            meeting.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    real = [error for error in errors if not isinstance(error, threading.BrokenBarrierError)] or errors
    if real:
        raise real[0]
    return results
