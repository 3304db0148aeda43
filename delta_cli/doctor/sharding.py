"""How a run is spread over processes of one GPU each, and what each then holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from backends.settings import Parallel
from delta_cli.errors import UserError

SPLIT_ABOVE = 2 * 10**9  # trained parameters: the learner's own number, which only its framework's module has


@dataclass(frozen=True)
class ShardingLayout:
    """``sharding``: what is held in parts.

    "full": weights, gradients and moments; a layer is gathered for its forward and again for its backward.
    "optimizer": the same at rest, but weights gathered for the forward stay for the backward.
    "none": every process holds everything, and gradients are summed.

    ``shard_size`` processes hold one copy of what is split together, as under "hybrid"; absent: all of them.
    """

    processes: int = 1
    sharding: Literal["none", "optimizer", "full"] = "none"
    shard_size: int | None = None

    @property
    def parts(self) -> int:
        """Into how many parts weights, gradients and moments are cut."""
        return 1 if self.sharding == "none" else self.shard_size or self.processes

    @property
    def copies(self) -> int:
        """How many copies there are."""
        return self.processes // self.parts

    def share(self, count: int) -> int:
        """Of ``count`` numbers, those of one process."""
        return -(-count // self.parts)

    def most(self, groups: int) -> int:
        """Of so many groups, dealt whole, those of the process that has the most."""
        return -(-groups // self.processes)


ONE = ShardingLayout()


def choose_sharding(processes: int, parallel: Parallel, trained: int, node: int) -> ShardingLayout:
    """The layout that ``parallel`` names, for so many trained parameters and at most ``node`` processes a machine.

    Raises UserError if the processes cannot form sets of ``parallel.shard_size``.
    """
    if processes == 1:
        return ONE
    sharding = parallel.sharding
    if sharding == "auto":
        sharding = "full" if trained > SPLIT_ABOVE else "none"
    if sharding != "hybrid":
        return ShardingLayout(processes, sharding)
    together = parallel.shard_size or (node if node > 1 and processes % node == 0 else processes)
    if processes % together:
        raise UserError(f"parallel.shard_size = {together}: it does not divide {processes} processes")
    return ShardingLayout(processes, "full", None if together == processes else together)
