"""What AdamW keeps for every weight: two moments in float32 or 8 bits, and a float32 master of a bfloat16 weight.

The flattened weights lie end to end in buckets. Moments and masters are stored by bucket, on the device or in host
memory, and an update holds one bucket (on CUDA two) in float32 on the device beyond what is stored.
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
from backends.torch.device import out_of_memory
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
    """Rows of float32 numbers: two of moments, or one of masters."""

    def __init__(self, count: int, device: torch.device, offload: bool, rows: int = 2) -> None:
        self._device, self._offload = device, offload
        self.numbers = _room((rows, count), torch.float32, device, offload)

    def fetch(self) -> Tensor:
        return self.numbers.to(self._device, non_blocking=True, copy=True) if self._offload else self.numbers

    def keep(self, moments: Tensor) -> None:
        if self._offload:
            self.numbers.copy_(moments, non_blocking=True)

    def tensors(self) -> dict[str, tuple[Tensor, int]]:
        return {"": (self.numbers, 1)}


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


class Bucket(NamedTuple):
    """Some pieces of weights with their moments, and with their masters if the weights are bfloat16."""

    pieces: list[Piece]
    moments: Store
    masters: Float32 | None

    @property
    def bytes(self) -> int:
        """The size of what is stored."""
        stored = sum(tensor.nbytes for tensor, _ in self.moments.tensors().values())
        return stored + (self.masters.numbers.nbytes if self.masters else 0)


class AdamState:
    """The moments of ``weights``, zero at first, and masters that equal them. Raises BackendError if memory runs out.

    A bfloat16 weight has 8 significant bits, so it would round most updates away; they add up in its master.
    """

    def __init__(self, weights: Mapping[str, Tensor], settings: Optimizer) -> None:
        self._weights = weights
        self._device = next(iter(weights.values())).device
        self._offload = settings.offload
        sizes = {name: weight.numel() for name, weight in weights.items()}
        rounded = {name for name, weight in weights.items() if weight.dtype == torch.bfloat16}
        coded = {name for name, size in sizes.items() if settings.moments == "int8" and size >= SMALL}
        try:
            self._buckets = [
                self._bucket(pieces, store, masters)
                for store, chosen in ((Float32, sizes.keys() - coded), (Int8, coded))
                for masters in (False, True)
                for pieces in layout(
                    {name: size for name, size in sizes.items() if name in chosen and (name in rounded) == masters}
                )
            ]
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
            where, instead = ("host", "") if settings.offload else ("device", "update.offload = true, ")
            raise BackendError(
                f"the optimizer's moments of {sum(sizes.values()):,} weights do not fit in the {where}'s memory; set "
                f'{instead}update.moments = "int8", or train adapters with [model.lora]'
            ) from error

    @torch.no_grad()
    def _bucket(self, pieces: list[Piece], store: type[Float32] | type[Int8], masters: bool) -> Bucket:
        count = _padded(pieces[-1].inside.stop)
        moments = store(count, self._device, self._offload)
        if not masters:
            return Bucket(pieces, moments, None)
        kept = Float32(count, self._device, self._offload, rows=1)
        for piece in pieces:
            kept.numbers[0, piece.inside].copy_(self._weights[piece.name].view(-1)[piece.start : piece.stop])
        return Bucket(pieces, moments, kept)

    @property
    def bytes(self) -> int:
        """The size of the stored moments and masters."""
        return sum(bucket.bytes for bucket in self._buckets)

    def update(self, apply: Callable[[list[Piece], list[Tensor], Tensor], None]) -> None:
        """Call ``apply`` with the pieces, their numbers and their moments [2, n] of each bucket, on the device.

        It updates numbers and moments in place. The numbers are those of the weights, or of their masters, to which the
        weights are then rounded. On CUDA, buckets from host memory alternate between two streams: one is copied back
        while the next is fetched. All copies are done on return.
        """
        overlap = self._offload and self._device.type == "cuda"
        streams = self._two_streams() if overlap else [None]
        for (pieces, store, masters), stream in zip(self._buckets, cycle(streams), strict=False):
            with torch.cuda.stream(stream) if stream else nullcontext():
                moments = store.fetch()
                weights = [self._weights[piece.name].view(-1)[piece.start : piece.stop] for piece in pieces]
                if masters is None:
                    apply(pieces, weights, moments)
                else:
                    exact = masters.fetch()
                    numbers = [exact[0, piece.inside] for piece in pieces]
                    apply(pieces, numbers, moments)
                    for weight, number in zip(weights, numbers, strict=True):
                        weight.copy_(number)
                    masters.keep(exact)
                store.keep(moments)
        if overlap:
            torch.cuda.synchronize(self._device)

    def _two_streams(self) -> list[torch.cuda.Stream | None]:
        """Two streams that wait for the work under way."""
        streams = torch.cuda.Stream(self._device), torch.cuda.Stream(self._device)
        for stream in streams:
            stream.wait_stream(torch.cuda.current_stream(self._device))
        return [*streams]

    def moments(self) -> dict[str, TensorRows]:
        """The moments as stored in a file, by name; shares their memory."""
        found: dict[str, TensorRows] = {}
        for pieces, store, _ in self._buckets:
            for suffix, (tensor, unit) in store.tensors().items():
                for piece in pieces:
                    shape = self._weights[piece.name].shape
                    part = slice(piece.inside.start // unit, -(-piece.inside.stop // unit))
                    for moment, row in zip(MOMENTS, tensor, strict=True):
                        new = TensorRows(tuple(shape) if unit == 1 else (-(-shape.numel() // unit),), [])
                        found.setdefault(f"{moment}.{piece.name}{suffix}", new).parts.append(row[part])
        return found

    def masters(self) -> dict[str, list[Tensor]]:
        """The flat parts of each bfloat16 weight's master, by the weight's name; shares their memory."""
        found: dict[str, list[Tensor]] = {}
        for pieces, _, masters in self._buckets:
            for piece in pieces if masters else ():
                assert masters is not None
                found.setdefault(piece.name, []).append(masters.numbers[0, piece.inside])
        return found

    @torch.no_grad()
    def round_weights(self) -> None:
        """Set each bfloat16 weight to its rounded master."""
        for name, parts in self.masters().items():
            pieces = self._weights[name].view(-1).split([part.numel() for part in parts])
            for piece, part in zip(pieces, parts, strict=True):
                piece.copy_(part)
