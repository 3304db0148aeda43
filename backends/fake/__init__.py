"""The fake backend: exact Qwen3 in numpy and float64, for tests and as a reference for the others."""

from __future__ import annotations

from backends.fake.backend import FakeBackend
from backends.interface import Backend, BackendSettings


def create(settings: BackendSettings, name: str) -> Backend:
    """Load a Qwen3 model folder. Raises BackendError for another architecture, LoRA or bfloat16."""
    return FakeBackend(settings, name)
