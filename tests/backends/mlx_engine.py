"""An mlx engine on a small model, and a batch for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from backends import mlx as package
from backends.interface import Sequences
from backends.mlx.backend import MlxEngine
from backends.settings import BackendSettings
from delta_cli.assets.random_model import write_qwen3

VOCAB = 40


def create(folder: Path, **settings: Any) -> MlxEngine:
    """An engine of the mlx backend."""
    backend = package.create(BackendSettings.of(str(folder), **settings), "mlx")
    assert isinstance(backend, MlxEngine)
    return backend


def write_small(folder: Path) -> Path:
    """Write a small Qwen3 with random weights. Returns its folder."""
    write_qwen3(folder, vocab_size=VOCAB, hidden=32, head_dim=8, intermediate=64, scale=0.2)
    (folder / "tokenizer.json").write_text("{}")
    return folder


def batch(responses: int = 4, length: int = 10) -> Sequences:
    """Responses of one length to prompts of several."""
    rng = np.random.default_rng(0)
    prompts = tuple(rng.integers(1, VOCAB, 1 + row) for row in range(responses))
    return Sequences(prompts, rng.integers(1, VOCAB, responses * length), np.arange(responses + 1) * length)
