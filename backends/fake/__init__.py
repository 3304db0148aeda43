"""The fake backend: an exact Qwen3 in numpy and float64, for tests and as a reference for the other backends."""

from __future__ import annotations

from backends.collective import SOLO
from backends.fake.backend import FakeEngine
from backends.interface import BackendError, Collective, Engine
from backends.settings import BackendSettings


def create(settings: BackendSettings, name: str, collective: Collective = SOLO) -> Engine:
    """Load a Qwen3 model folder.

    Raises BackendError for another architecture, LoRA, bfloat16, 8-bit moments or several processes.
    """
    if collective.size > 1:
        join(name)
    return FakeEngine(settings, name)


def join(name: str) -> Collective:
    """Raise BackendError: this backend has one process."""
    raise BackendError("the fake backend trains in one process; choose --backend cpu, cuda or mlx for several")
