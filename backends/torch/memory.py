"""Memory of the device: errors when it runs out, and copies from the host."""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor


def out_of_memory(error: BaseException) -> bool:
    """Whether the allocator failed. CUDA has an error type for it; CPU and pinned memory only have a message."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or any(
        words in str(error) for words in ("can't allocate memory", "not enough memory", "out of memory", "ALLOC_FAILED")
    )


def on_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """A copy on the device. To a GPU it goes from pinned memory, so that the host does not wait for the GPU."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
