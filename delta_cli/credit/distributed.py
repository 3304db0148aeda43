"""Credit over several processes: every rank computes with the whole batch, but features stay on their own rank.

Every number except the features is a vector of N, small enough to hold whole on every rank. So each rank computes
the coefficients of the whole batch, and only two things cross between ranks: the weighted sums, which are added up,
and the projections of each rank's own tokens. The result cannot depend on which rank holds which tokens.
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


class DistributedFeatures:
    """The features of a batch of N tokens, of which this rank holds those at ``index``, ascending.

    Every rank calls every method, even a rank that holds no token. A token that no rank holds has the feature 0;
    only tokens without an advantage may be missing, and their features are never needed.
    """

    def __init__(self, own: Any, index: Ids, count: int, ranks: Ranks) -> None:
        self._own = own  # features of len(index) tokens
        self._index = index
        self._count = count
        self._ranks = ranks

    def weighted_sum(self, weights: ArrayLike) -> Doubles:
        """Σ_t weights[s, t]·v_t over all ranks, for weights [S, N]."""
        return self._ranks.sum(np.asarray(self._own.weighted_sum(np.asarray(weights)[:, self._index]), np.float64))

    def project(self, direction: ArrayLike) -> Doubles:
        """⟨v_t, direction⟩ for every token of every rank, [N]."""
        return scatter_sum(self._own.project(direction), self._index, self._count, self._ranks)

    def squared_norms(self) -> Doubles:
        """‖v_t‖² for every token of every rank, [N]."""
        return scatter_sum(self._own.squared_norms(), self._index, self._count, self._ranks)

    def slice(self, start: int, stop: int) -> DistributedFeatures:
        """The features of tokens start:stop of the batch."""
        first, last = np.searchsorted(self._index, [start, stop])
        own = self._own.slice(int(first), int(last))
        return DistributedFeatures(own, self._index[first:last] - start, stop - start, self._ranks)

    def close(self) -> None:
        """Free this rank's features."""
        self._own.close()


def scatter_sum(values: ArrayLike, index: Ids, count: int, ranks: Ranks) -> Doubles:
    """A float64 vector [count] with every rank's ``values`` at its ``index``.

    Exact if no two ranks share an index: all other ranks add 0 there.
    """
    found = np.zeros(count)
    found[index] = values
    return ranks.sum(found)


@dataclass(frozen=True)
class DistributedBatch:
    """The batch of all ranks, as every rank knows it."""

    features: DistributedFeatures  # of N tokens
    advantages: Doubles  # [R]
    starts: Ids  # [R+1]
    groups: Ids | None  # [R]
    index: Ids  # flat positions of this rank's tokens, ascending


def gather_batch(
    features: FeatureReductions,
    advantages: Doubles,
    starts: Ids,
    groups: Ids | None,
    rows: ArrayLike | None,
    ranks: Ranks,
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
        features=DistributedFeatures(features, index, int(all_starts[-1]), ranks),
        advantages=joined(2, np.float64),
        starts=all_starts,
        groups=None if groups is None else joined(3, np.int64),
        index=index,
    )
