"""A tiny model for the tests of the torch backend."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from backends.settings import BackendSettings
from backends.torch import backend, cache_size, paged_attention
from backends.torch.backend import TorchEngine
from delta_cli.assets.random_model import write_qwen3
from tests.device import DEVICE


@pytest.fixture(scope="session")
def torch_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder with a vocabulary of 31 and 16 hidden numbers."""
    path = tmp_path_factory.mktemp("torch") / "model"
    write_qwen3(path, vocab_size=31, hidden=16, layers=2, head_dim=4, intermediate=24, scale=0.3)
    return path


@pytest.fixture
def make(torch_folder: Path) -> Callable[..., TorchEngine]:
    """Create a backend on it with some settings."""
    return lambda **settings: TorchEngine(BackendSettings.of(str(torch_folder), **settings), DEVICE)


@pytest.fixture
def pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rollouts keep keys and values in pages; on a CPU, whose attention gathers them, in pages of 4 tokens."""
    monkeypatch.setitem(backend.PAGED, DEVICE, True)
    monkeypatch.setattr(backend, "kernel_fault", lambda policy: None)
    if DEVICE == "cpu":
        monkeypatch.setattr(cache_size, "PAGE", 4)
        monkeypatch.setattr(paged_attention, "PAGE", 4)
