"""Credit over several processes: the tokens of all of them as one batch, whose features stay where they are.

Every number that is not a feature is a vector of N, small enough for every rank to hold whole. So the
coefficients are computed from the whole batch everywhere, and only two things cross between ranks: the sum
of the weighted sums, and the projections of each rank's own tokens. Nothing can then depend on who holds what.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from backends.arrays import Doubles, Ids
from delta_cli.credit.features import Features


class Ranks(Protocol):
    """The processes of a run; each calls the same methods in the same order."""

    @property
    def size(self) -> int:
        """How many there are."""

    def sum(self, array: Doubles) -> Doubles:
        """The sum over ranks of arrays of one shape, the same on every rank."""

    def gather(self, item: Any) -> list[Any]:
        """What every rank handed in, in the order of ranks."""


class SharedFeatures:
    """The features of a batch of N tokens, of which this rank holds those at ``index``, ascending.

    Every rank calls every method, those that hold no token too. A token that no rank holds has the feature 0,
    which is all that is asked of one without advantage.
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
        return whole(self._own.project(direction), self._index, self._count, self._ranks)

    def squared_norms(self) -> Doubles:
        """‖v_t‖² for every token of every rank, [N]."""
        return whole(self._own.squared_norms(), self._index, self._count, self._ranks)

    def slice(self, start: int, stop: int) -> SharedFeatures:
        """The features of tokens start:stop of the batch."""
        first, last = np.searchsorted(self._index, [start, stop])
        own = self._own.slice(int(first), int(last))
        return SharedFeatures(own, self._index[first:last] - start, stop - start, self._ranks)

    def close(self) -> None:
        """Free what this rank holds."""
        self._own.close()


def whole(values: ArrayLike, index: Ids, count: int, ranks: Ranks) -> Doubles:
    """A vector [count] of which every rank has the ``values`` at its ``index``, float64; exact, as the rest adds 0."""
    found = np.zeros(count)
    found[index] = values
    return ranks.sum(found)


@dataclass(frozen=True)
class SharedBatch:
    """A batch of all ranks, as each of them knows it."""

    features: SharedFeatures  # of N tokens
    advantages: Doubles  # [R]
    starts: Ids  # [R+1]
    groups: Ids | None  # [R]
    index: Ids  # flat positions of this rank's tokens, ascending


def share(
    features: Features, advantages: Doubles, starts: Ids, groups: Ids | None, rows: ArrayLike | None, ranks: Ranks
) -> SharedBatch:
    """The whole batch from each rank's part; ``rows`` are the places of its responses among those of all ranks.

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

    everywhere = np.concatenate([[0], np.cumsum(joined(1, np.int64))]).astype(np.int64)
    index = np.concatenate([np.arange(0), *(np.arange(everywhere[row], everywhere[row + 1]) for row in own)])
    return SharedBatch(
        features=SharedFeatures(features, index, int(everywhere[-1]), ranks),
        advantages=joined(2, np.float64),
        starts=everywhere,
        groups=None if groups is None else joined(3, np.int64),
        index=index,
    )
