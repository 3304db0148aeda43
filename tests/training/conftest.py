"""The tiny model that every run here starts from."""

from __future__ import annotations

from pathlib import Path

import pytest

from .harness import write_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with 258 tokens, 16 hidden units and one layer."""
    return write_model(tmp_path_factory.mktemp("model"))
