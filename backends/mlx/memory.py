"""How much memory MLX may hold on to."""

from __future__ import annotations

import mlx.core as mx

from backends.local_engine import peak_resident

# What MLX says where memory, buffers or the watchdog's patience do not suffice: it has no errors of their own.
EXHAUSTED = (
    "allocate",  # [metal::malloc], [malloc_or_wait], [malloc]: Unable, or Attempting, to allocate …
    "Insufficient Memory",  # kIOGPUCommandBufferCallbackErrorOutOfMemory
    "OutOfMemory",
    "Resource limit",  # [metal::malloc] Resource limit (499000) exceeded: too many buffers at a time
    "Impacting Interactivity",  # the watchdog: smaller pieces of work may pass, the same ones do not
    "GPU Timeout",
)

CACHE = 4  # freed buffers kept for reuse: at most 1/CACHE of the recommended working set


def exhausted(error: BaseException) -> bool:
    """Whether an error says that a smaller piece of work might have passed."""
    return isinstance(error, MemoryError) or any(sign in str(error) for sign in EXHAUSTED)


class MlxMemoryLimits:
    """The machine's own recommendation as MLX's limits, from now until ``restore``.

    Wired memory keeps weights from being paged out between steps; the bound on the cache keeps
    freed buffers of odd sizes from growing to all of memory. Without Metal there is nothing to set.
    """

    def __init__(self) -> None:
        self.before: tuple[int, int] | None = None
        if mx.metal.is_available():
            recommended = int(mx.device_info()["max_recommended_working_set_size"])
            self.before = mx.set_wired_limit(recommended), mx.set_cache_limit(recommended // CACHE)

    def restore(self) -> None:
        """Set the limits to what they were. Doing so twice is harmless."""
        if self.before:
            mx.set_wired_limit(self.before[0])
            mx.set_cache_limit(self.before[1])
            self.before = None


def peak() -> int:
    """Bytes: MLX's own peak on a GPU, otherwise the peak resident size of the process."""
    return int(mx.get_peak_memory()) if mx.default_device() == mx.gpu else peak_resident()
