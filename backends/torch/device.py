"""A device: memory that runs out, copies from the host, and sums in a fixed order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from backends.errors import BackendError


def out_of_memory(error: BaseException) -> bool:
    """Whether the allocator failed. CUDA has an error type for it; CPU and pinned memory only have a message."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or any(
        words in str(error) for words in ("can't allocate memory", "not enough memory", "out of memory", "ALLOC_FAILED")
    )


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its type if it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


@contextmanager
def explained(where: str) -> Iterator[None]:
    """Raise BackendError if memory runs out: the line "out of memory" and ``where``, with what to do about it."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        raise BackendError(f"out of memory {where}") from error


def on_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """A copy on the device. To a GPU it goes from pinned memory, so that the host does not wait for the GPU."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


@contextmanager
def repeatable(wanted: bool) -> Iterator[None]:
    """If ``wanted``, use only kernels that give the same bits every time; an operation that has none raises.

    It matters to backward passes, whose fast kernels add in the order in which threads finish.
    """
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(wanted or before)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def add_at(shape: Sequence[int], at: Tensor, rows: Tensor) -> Tensor:
    """Zeros [T, H] with rows [n, H] added at indices [n], which repeat where a prompt's end predicts several tokens.

    Uses the operation that adds in a fixed order on each device: PyTorch's other one uses atomic sums.
    """
    total = rows.new_zeros(shape)
    if rows.device.type == "cuda":
        return total.index_put_((at,), rows, accumulate=True)
    return total.index_add_(0, at, rows)
