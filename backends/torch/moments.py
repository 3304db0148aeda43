"""AdamW's two moments of every weight: in float32 or 8 bits, on the device or in host memory between updates.

The flattened weights lie end to end in buckets. Moments are stored by bucket, and an update holds one bucket (on CUDA
two) in float32 on the device beyond what is stored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from itertools import cycle
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from backends.interface import BackendError
from backends.settings import Optimizer
from backends.torch.memory import out_of_memory
from backends.torch.quantised import BLOCK, codes_of_first, codes_of_root, dequantise, quantise
from backends.torch.state_file import TensorRows

# Numbers in a bucket; their two float32 moments take 256 MiB. CUDA's allocator of pinned memory rounds sizes up to a
# power of two, so buffers as large as the weights could waste half of their memory.
BUCKET = 2**25
MOMENTS = ("exp_avg", "exp_avg_sq")  # their names in a file, as torch.optim calls them
SMALL = 4096  # a smaller weight keeps float32 moments, as in the paper


class Piece(NamedTuple):
    """The numbers ``start`` to ``stop`` of a flattened weight, which begin at ``at`` in their bucket."""

    name: str
    start: int
    stop: int
    at: int

    @property
    def inside(self) -> slice:
        """The piece's slice of its bucket."""
        return slice(self.at, self.at + self.stop - self.start)


def layout(sizes: Mapping[str, int]) -> list[list[Piece]]:
    """Distribute weights of these sizes over buckets; pieces begin at multiples of BLOCK in weight and bucket."""
    buckets: list[list[Piece]] = []
    room = 0
    for name, size in sizes.items():
        start = 0
        while start < size:
            if room == 0:
                buckets.append([])
                room = BUCKET
            stop = min(size, start + room)
            buckets[-1].append(Piece(name, start, stop, BUCKET - room))
            room -= _padded(stop - start)
            start = stop
    return buckets


def _padded(count: int) -> int:
    return -(-count // BLOCK) * BLOCK


class Store(Protocol):
    """Both moments of a bucket of n numbers."""

    def fetch(self) -> Tensor:
        """The moments, float32 [2, n] on the device."""

    def keep(self, moments: Tensor) -> None:
        """Store the result of ``fetch`` after an update has changed it."""

    def tensors(self) -> dict[str, tuple[Tensor, int]]:
        """The stored tensors [2, n / unit] with their unit, by the suffix of their name in a file."""


class Float32:
    """Moments in float32."""

    def __init__(self, count: int, device: torch.device, offload: bool) -> None:
        self._device, self._offload = device, offload
        self._moments = _room((2, count), torch.float32, device, offload)

    def fetch(self) -> Tensor:
        return self._moments.to(self._device, non_blocking=True, copy=True) if self._offload else self._moments

    def keep(self, moments: Tensor) -> None:
        if self._offload:
            self._moments.copy_(moments, non_blocking=True)

    def tensors(self) -> dict[str, tuple[Tensor, int]]:
        return {"": (self._moments, 1)}


class Int8:
    """Codes and scales; the second moment is stored as its square root."""

    def __init__(self, count: int, device: torch.device, offload: bool) -> None:
        self._device = device
        self._meanings = codes_of_first(device), codes_of_root(device)
        self._codes = _room((2, count), torch.uint8, device, offload)
        # Padding is neither updated nor saved; it must be 0, or it would determine a block's scale.
        self._codes[0].fill_(int((self._meanings[0] == 0).nonzero()))
        self._scales = _room((2, count // BLOCK), torch.float32, device, offload)

    def fetch(self) -> Tensor:
        codes, scales = (part.to(self._device, non_blocking=True) for part in (self._codes, self._scales))
        moments = torch.stack([dequantise(*of) for of in zip(codes, scales, self._meanings, strict=True)])
        moments[1].square_()
        return moments

    def keep(self, moments: Tensor) -> None:
        moments[1].sqrt_()
        for row, meanings in enumerate(self._meanings):
            codes, scales = quantise(moments[row], meanings)
            self._codes[row].copy_(codes, non_blocking=True)
            self._scales[row].copy_(scales, non_blocking=True)

    def tensors(self) -> dict[str, tuple[Tensor, int]]:
        return {".codes": (self._codes, 1), ".scales": (self._scales, BLOCK)}


def _room(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, offload: bool) -> Tensor:
    """Zeros on the device, or with ``offload`` in host memory, pinned if the device is a GPU."""
    if not offload:
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.zeros(shape, dtype=dtype, pin_memory=device.type == "cuda")


class Moments:
    """The moments of ``weights``, zero at first. Raises BackendError if memory runs out."""

    def __init__(self, weights: Mapping[str, Tensor], settings: Optimizer) -> None:
        self._weights = weights
        self._device = next(iter(weights.values())).device
        self._offload = settings.offload
        large = settings.moments == "int8"
        sizes = {name: weight.numel() for name, weight in weights.items()}
        coded = {name: size for name, size in sizes.items() if large and size >= SMALL}
        plain = {name: size for name, size in sizes.items() if name not in coded}
        try:
            self._buckets: list[tuple[list[Piece], Store]] = [
                (pieces, store(_padded(pieces[-1].inside.stop), self._device, settings.offload))
                for store, some in ((Float32, plain), (Int8, coded))
                for pieces in layout(some)
            ]
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
            where, instead = ("host", "") if settings.offload else ("device", "update.offload = true, ")
            raise BackendError(
                f"the optimizer's moments of {sum(sizes.values()):,} weights do not fit in the {where}'s memory; set "
                f'{instead}update.moments = "int8", or train adapters with [model.lora]'
            ) from error

    @property
    def bytes(self) -> int:
        """The size of the stored moments."""
        return sum(tensor.nbytes for _, store in self._buckets for tensor, _ in store.tensors().values())

    def update(self, apply: Callable[[list[Piece], Tensor], None]) -> None:
        """Call ``apply`` with each bucket's pieces and its moments [2, n] on the device, which it updates in place.

        On CUDA, buckets from host memory alternate between two streams: one is copied back while the next is fetched.
        All copies are done on return.
        """
        overlap = self._offload and self._device.type == "cuda"
        streams = self._two_streams() if overlap else [None]
        for (pieces, store), stream in zip(self._buckets, cycle(streams), strict=False):
            with torch.cuda.stream(stream) if stream else nullcontext():
                moments = store.fetch()
                apply(pieces, moments)
                store.keep(moments)
        if overlap:
            torch.cuda.synchronize(self._device)

    def _two_streams(self) -> list[torch.cuda.Stream | None]:
        """Two streams that wait for the work under way."""
        streams = torch.cuda.Stream(self._device), torch.cuda.Stream(self._device)
        for stream in streams:
            stream.wait_stream(torch.cuda.current_stream(self._device))
        return [*streams]

    def entries(self) -> dict[str, TensorRows]:
        """The moments as stored in a file, by name; shares their memory."""
        found: dict[str, TensorRows] = {}
        for pieces, store in self._buckets:
            for suffix, (tensor, unit) in store.tensors().items():
                for piece in pieces:
                    shape = self._weights[piece.name].shape
                    part = slice(piece.inside.start // unit, -(-piece.inside.stop // unit))
                    for moment, row in zip(MOMENTS, tensor, strict=True):
                        new = TensorRows(tuple(shape) if unit == 1 else (-(-shape.numel() // unit),), [])
                        found.setdefault(f"{moment}.{piece.name}{suffix}", new).parts.append(row[part])
        return found
