"""How a run is spread over processes of one GPU each, and what each then holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from backends.settings import Sharding

SPLIT_ABOVE = 2 * 10**9  # trained parameters: the learner's own number, which only its framework's module has


@dataclass(frozen=True)
class ShardingLayout:
    """``sharding``: what is held in parts.

    "full": weights, gradients and moments; a layer is gathered for its forward and again for its backward.
    "optimizer": the same at rest, but weights gathered for the forward stay for the backward.
    "none": every process holds everything, and gradients are summed.
    """

    processes: int = 1
    sharding: Literal["none", "optimizer", "full"] = "none"

    @property
    def parts(self) -> int:
        """Into how many parts weights, gradients and moments are cut."""
        return 1 if self.sharding == "none" else self.processes

    def share(self, count: int) -> int:
        """Of ``count`` numbers, those of one process."""
        return -(-count // self.parts)

    def most(self, groups: int) -> int:
        """Of so many groups, dealt whole, those of the process that has the most."""
        return -(-groups // self.processes)


ONE = ShardingLayout()


def choose_sharding(processes: int, sharding: Sharding, trained: int) -> ShardingLayout:
    """The layout that ``parallel.sharding`` names, for so many trained parameters."""
    if processes == 1:
        return ONE
    if sharding == "auto":
        sharding = "full" if trained > SPLIT_ABOVE else "none"
    return ShardingLayout(processes, sharding)
