"""Credit over several processes: features stay on their own rank, and only sums and scores cross.

Every rank knows the advantages of the whole batch and holds the features of some of its tokens. It compares its own
tokens with the centroids; weighted sums and a few scalars are added up over ranks, and at the end every rank gets the
scores of all tokens. The result does not depend on which rank holds which tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from delta_cli.credit.features import FeatureReductions

if TYPE_CHECKING:  # the core itself needs nothing but numpy
    from backends.arrays import Doubles, Ids


class Ranks(Protocol):
    """The processes of a run; all of them call the same methods in the same order."""

    @property
    def size(self) -> int:
        """The number of ranks."""

    def sum(self, array: Doubles) -> Doubles:
        """The elementwise sum over ranks of arrays of one shape, the same on every rank."""

    def gather(self, item: Any) -> list[Any]:
        """The items of all ranks, in rank order."""


@dataclass(frozen=True)
class HeldFeatures:
    """The features that this rank holds of a batch of N tokens: those at the positions ``index`` [n], ascending.

    No two ranks hold the same token. Tokens without an advantage may be held by no rank.
    """

    features: FeatureReductions  # of n tokens
    index: Ids
    count: int  # N
    ranks: Ranks | None = None  # None: one process

    def sum(self, array: Doubles) -> Doubles:
        """The sum over ranks."""
        return array if self.ranks is None or self.ranks.size == 1 else self.ranks.sum(array)

    def totals(self, masses: Doubles) -> Doubles:
        """The sums [S] over all tokens of masses [S, n] of this rank's."""
        if self.ranks is not None and self.ranks.size > 1:
            return self.ranks.sum(masses.sum(axis=1))
        every = np.zeros((len(masses), self.count))  # with its zeros: which tokens are held must not change a bit
        every[:, self.index] = masses
        totals: Doubles = every.sum(axis=1)
        return totals

    def scatter(self, values: Doubles) -> Doubles:
        """A vector [N] with every rank's values at its positions, and 0 where no rank holds the token."""
        found = np.zeros(self.count)
        found[self.index] = values
        return self.sum(found)

    def collect(self, values: Doubles, places: Ids) -> Doubles:
        """The values at ``places`` [m], ascending, whichever rank holds them; the others do not cross between ranks."""
        held = np.zeros(self.count, bool)
        held[places] = True
        own = held[self.index]
        found = np.zeros(len(places))
        found[np.searchsorted(places, self.index[own])] = values[own]
        return self.sum(found)

    @property
    def alone(self) -> bool:
        """Whether there is only one process."""
        return self.ranks is None or self.ranks.size == 1

    def slice(self, start: int, stop: int) -> HeldFeatures:
        """The tokens start:stop of the batch."""
        first, last = (int(place) for place in np.searchsorted(self.index, [start, stop]))
        part = self.features.slice(first, last)  # type: ignore[attr-defined]
        return HeldFeatures(part, self.index[first:last] - start, stop - start, self.ranks)


@dataclass(frozen=True)
class DistributedBatch:
    """The batch of all ranks, as every rank knows it."""

    advantages: Doubles  # [R]
    starts: Ids  # [R+1]
    groups: Ids | None  # [R]
    index: Ids  # flat positions of this rank's tokens, ascending


def gather_batch(
    advantages: Doubles, starts: Ids, groups: Ids | None, rows: ArrayLike | None, ranks: Ranks
) -> DistributedBatch:
    """The whole batch from each rank's part; ``rows`` are the positions of its responses among those of all ranks.

    Raises ValueError unless rows ascend on each rank and number the responses 0 … R − 1, each once.
    """
    own = np.asarray([] if rows is None else rows, np.int64)
    parts = ranks.gather((own, np.diff(starts), advantages, groups))
    places = np.concatenate([part[0] for part in parts])
    count = len(places)
    numbered = own.shape == advantages.shape and np.array_equal(np.sort(places), np.arange(count))
    if not numbered or np.any(np.diff(own) < 0):
        raise ValueError(f"rows must ascend and number the {count} responses of all ranks from 0, each once")

    def joined(part: int, dtype: type) -> NDArray[Any]:
        array: NDArray[Any] = np.empty(count, dtype)
        array[places] = np.concatenate([each[part] for each in parts])
        return array

    all_starts = np.concatenate([[0], np.cumsum(joined(1, np.int64))]).astype(np.int64)
    index = np.concatenate([np.arange(0), *(np.arange(all_starts[row], all_starts[row + 1]) for row in own)])
    return DistributedBatch(
        advantages=joined(2, np.float64),
        starts=all_starts,
        groups=None if groups is None else joined(3, np.int64),
        index=index.astype(np.int64),
    )
