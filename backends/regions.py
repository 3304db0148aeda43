"""Response regions of episodes: the tokens that the model wrote, and those of an environment between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from backends.arrays import Bools, Ids
from backends.interface import starts_of, token_index


@dataclass(frozen=True)
class ResponseRegions:
    """The M tokens of R response regions end to end, of which the model wrote N.

    An environment wrote the others. They are context: later tokens attend to them, and nothing else reads them.
    """

    ids: Ids  # [M]
    own: Bools  # [M] True: the model wrote it
    starts: Ids  # [R+1]

    def __post_init__(self) -> None:
        if not len(self.ids) == len(self.own) == self.starts[-1]:
            raise ValueError(
                f"regions of {self.starts[-1]} tokens need as many ids and as many marks of own tokens, not "
                f"{len(self.ids)} and {len(self.own)}"
            )

    @classmethod
    def of(cls, ids: Sequence[Ids], own: Sequence[Bools]) -> ResponseRegions:
        """Regions from the ids and the marks of each."""
        return cls(
            ids=np.concatenate([np.zeros(0, np.int64), *ids]),
            own=np.concatenate([np.zeros(0, bool), *own]),
            starts=starts_of([len(part) for part in ids]),
        )

    @property
    def lengths(self) -> Ids:
        """The number of tokens of each region [R]."""
        return np.diff(self.starts)

    @property
    def own_tokens(self) -> Ids:
        """The tokens that the model wrote [N]."""
        return self.ids[self.own]

    @property
    def own_starts(self) -> Ids:
        """Where the tokens that the model wrote begin in each response, among all N of them [R+1]."""
        return np.concatenate([[0], np.cumsum(self.own)]).astype(np.int64)[self.starts]

    def region(self, row: int) -> tuple[Ids, Bools]:
        """The ids of one region, and which of them the model wrote."""
        part = slice(int(self.starts[row]), int(self.starts[row + 1]))
        return self.ids[part], self.own[part]

    def select(self, rows: Ids) -> ResponseRegions:
        """The regions at ``rows``, in that order."""
        index = token_index(self.starts, rows)
        return ResponseRegions(self.ids[index], self.own[index], starts_of(self.lengths[rows]))


def joined(parts: Sequence[ResponseRegions]) -> ResponseRegions:
    """Regions of several batches end to end."""
    return ResponseRegions(
        ids=np.concatenate([part.ids for part in parts]),
        own=np.concatenate([part.own for part in parts]),
        starts=starts_of(np.concatenate([part.lengths for part in parts])),
    )
