"""A short synthetic run, made once a module."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.reporting import synthetic


@pytest.fixture(scope="module")
def run_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three steps, two prompts with four responses each."""
    return synthetic.run(tmp_path_factory.mktemp("runs") / "small").path
