"""The ranks that ``mlx.launch``, or ``delta train --processes``, has started, over mx.distributed."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from backends.arrays import Summed
from backends.errors import LostPeerError
from backends.interface import BackendError
from backends.mlx.arrays import NamedArrays
from backends.watchdog import Watchdog

BUCKET = 2**26  # numbers of a gradient that are summed at a time: 256 MiB


class MlxCollective:
    """Communication between ranks, all of it on the CPU's stream: Metal has no float64.

    Every sum is evaluated before anything uses it: work that a GPU has begun and that waits for another machine
    would be ended by the watchdog.
    """

    def __init__(self) -> None:
        # JACCL is RDMA over Thunderbolt 5, for which the launcher names the devices; ring is plain TCP.
        over = "jaccl" if "MLX_IBV_DEVICES" in os.environ else "ring"
        try:
            self._group = mx.distributed.init(strict=True, backend=over)
        except (RuntimeError, ValueError) as error:
            reason = str(error).strip().splitlines()[0]
            raise BackendError(
                f"the processes of this run cannot be joined over {over} ({reason}); start them with "
                "delta train --processes N, or with mlx.launch, and see that the addresses in its host file can be "
                "reached from each other"
            ) from error
        self.rank, self.size = self._group.rank(), self._group.size()
        self.watchdog: Watchdog | None = Watchdog(self.rank, self.size)
        self.watchdog.start(self)

    def sum(self, array: Summed) -> Summed:
        """The sum over ranks, the same bits on every rank."""
        with mx.stream(mx.cpu):
            return np.array(self._all_sum(mx.array(array, mx.float32 if array.dtype == np.float32 else mx.float64)))

    def gather(self, item: Any) -> list[Any]:
        """The items of all ranks, in the order of ranks; every rank sends as many bytes as the longest item has."""
        packed = np.frombuffer(pickle.dumps(item), np.uint8)
        lengths = self._all_gather(np.array([len(packed)], np.int64))
        parts = self._all_gather(np.pad(packed, (0, lengths.max() - len(packed)))).reshape(self.size, -1)
        return [pickle.loads(part[:length].tobytes()) for part, length in zip(parts, lengths, strict=True)]

    def barrier(self) -> None:
        """Returns once every rank has called it."""
        self.sum(np.zeros(1))

    def tickets(self) -> None:
        """MLX has nothing that ranks could count in."""

    def separate(self) -> MlxCollective:
        """MLX orders its collective calls on one stream, so another thread cannot make its own."""
        raise BackendError(
            "engine.async_steps needs one training process with MLX; set engine.async_steps = 0, or start one process"
        )

    def close(self) -> None:
        """End the watchdog; MLX leaves the group when the process ends."""
        if self.watchdog is not None:
            self.watchdog.close()

    def sum_gradient(self, gradient: NamedArrays, weights: NamedArrays) -> NamedArrays:
        """The gradient of all ranks by name, float32, the same bits on every rank; without one on any, none.

        A rank without a gradient adds zeros of the shapes of the ``weights``. ``gradient`` is emptied on the way.
        """
        if not any(self.gather(bool(gradient))):
            return {}
        return self._sum_by_name(weights, lambda name: gradient.pop(name, mx.zeros_like(weights[name])))

    def from_first(self, arrays: NamedArrays) -> NamedArrays:
        """The float32 arrays of the first rank, bit for bit; the others hand in any of the same names and shapes."""
        share = (lambda array: array) if self.rank == 0 else mx.zeros_like
        bits = self._sum_by_name(arrays, lambda name: share(arrays[name]).view(mx.int32))  # −0 plus 0 would be 0
        return {name: array.view(mx.float32) for name, array in bits.items()}

    def _sum_by_name(self, like: NamedArrays, part: Callable[[str], mx.array]) -> NamedArrays:
        """The sums over ranks of what ``part`` gives for each name of ``like``, of that one's shape."""
        found: NamedArrays = {}
        for bucket in _buckets(like):
            flat = mx.concatenate([part(name).reshape(-1) for name in bucket])
            mx.eval(flat)
            total, start = self._all_sum(flat), 0
            for name, array in bucket.items():
                found[name] = total[start : start + array.size].reshape(array.shape)
                start += array.size
        return found

    def _all_sum(self, array: mx.array) -> mx.array:
        with self._waiting():
            total = mx.distributed.all_sum(array, group=self._group, stream=mx.cpu)
            mx.eval(total)
        return total

    def _all_gather(self, array: NDArray[Any]) -> NDArray[Any]:
        with self._waiting():
            return np.array(mx.distributed.all_gather(mx.array(array), group=self._group, stream=mx.cpu))

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """While this rank waits for the others; raises LostPeerError if one of them has ended."""
        assert self.watchdog is not None
        try:
            with self.watchdog.waiting():
                yield
        except RuntimeError as error:
            raise LostPeerError(self.rank) from error


def _buckets(arrays: NamedArrays) -> list[NamedArrays]:
    """The arrays in their order, in runs of at most BUCKET numbers; a larger one is alone."""
    buckets: list[NamedArrays] = [{}]
    size = 0
    for name, array in arrays.items():
        if buckets[-1] and size + array.size > BUCKET:
            buckets.append({})
            size = 0
        buckets[-1][name] = array
        size += array.size
    return buckets
