"""Running out of memory, told from other errors."""

from __future__ import annotations

import torch


def out_of_memory(error: BaseException) -> bool:
    """Whether the allocator failed: CUDA has a type for it, those of the CPU and of pinned memory only a message."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or any(
        words in str(error) for words in ("can't allocate memory", "not enough memory", "out of memory", "ALLOC_FAILED")
    )
