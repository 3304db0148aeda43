"""The fake backend: exact Qwen3 in numpy and float64, for tests and as a reference for the others."""

from __future__ import annotations

from backends.fake.backend import FakeBackend
from backends.interface import Backend, BackendSettings


def create(settings: BackendSettings, name: str) -> Backend:
    """Load a Qwen3 model folder. Raises BackendError for another architecture, LoRA, bfloat16 or 8-bit moments."""
    return FakeBackend(settings, name)
