"""The collective of a single process, and helpers that work with any collective."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from backends.arrays import Ids, Summed
from backends.interface import Collective

if TYPE_CHECKING:
    from backends.watchdog import Watchdog


class Solo:
    """The collective of a single process, which gets back whatever it hands in."""

    rank, size = 0, 1
    watchdog: Watchdog | None = None

    def sum(self, array: Summed) -> Summed:
        return array

    def gather(self, item: Any) -> list[Any]:
        return [item]

    def barrier(self) -> None:
        pass

    def tickets(self) -> Callable[[], int]:
        return itertools.count().__next__

    def separate(self) -> Solo:
        return self

    def close(self) -> None:
        pass


SOLO = Solo()


def any_of(collective: Collective, condition: bool) -> bool:
    """Whether the condition holds on any rank; every rank gets the same answer."""
    return condition if collective.size == 1 else any(collective.gather(condition))


def most(collective: Collective, value: int) -> int:
    """The largest value of any rank."""
    return value if collective.size == 1 else max(collective.gather(value))


def from_first(collective: Collective, item: Any) -> Any:
    """The first rank's item."""
    return item if collective.size == 1 else collective.gather(item if collective.rank == 0 else None)[0]


def deal(costs: Sequence[float] | NDArray[np.number], ranks: int) -> list[Ids]:
    """Deal items of known costs to ranks so that their sums are nearly equal; the items of each rank, ascending.

    The most expensive items are dealt first, each to the rank with the smallest sum so far. The result depends on the
    arguments alone, so every rank computes the same.
    """
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = np.zeros(ranks)
    costs = np.asarray(costs, np.float64)
    for item in np.argsort(-costs, kind="stable"):
        rank = int(loads.argmin())
        shares[rank].append(int(item))
        loads[rank] += costs[item]
    return [np.array(sorted(share), dtype=np.int64) for share in shares]


class SharedPrompts:
    """A batch's prompts, of which each rank takes the next one when it has room. All ranks make it together."""

    def __init__(self, tickets: Callable[[], int], ranks: Collective, prompts: int) -> None:
        self.share = -(-prompts // ranks.size)
        self.taken: list[int] = []  # by this rank
        self._tickets = tickets
        # Adjacent prompts are often similar. A rank that takes its whole share at once should not get a run of them.
        self._order = [prompt for rank in range(ranks.size) for prompt in range(rank, prompts, ranks.size)]

    def take(self) -> int | None:
        """The next prompt that no rank has taken; None if there is none."""
        ticket = self._tickets()
        if ticket >= len(self._order):
            return None
        self.taken.append(self._order[ticket])
        return self.taken[-1]

    def close(self) -> None:
        """Leave nothing for the other ranks to take."""
        while self._tickets() < len(self._order):
            pass
