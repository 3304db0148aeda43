"""Tell out-of-memory errors from others."""

from __future__ import annotations

import torch


def out_of_memory(error: BaseException) -> bool:
    """Whether the allocator failed. CUDA has an error type for it; CPU and pinned memory only have a message."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or any(
        words in str(error) for words in ("can't allocate memory", "not enough memory", "out of memory", "ALLOC_FAILED")
    )
