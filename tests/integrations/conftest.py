"""These tests need TRL; what it and its libraries warn of themselves is no failure of ours."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from importlib.util import find_spec

import pytest

if find_spec("trl") is None:
    collect_ignore_glob = ["test_trl_*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let TRL's, transformers' and torch's own warnings pass; ours still fail."""
    for item in items:
        if "tests/integrations" in item.path.as_posix():
            for module in ("trl", "transformers", "torch", "accelerate", "peft"):
                item.add_marker(pytest.mark.filterwarnings(f"ignore:::{module}"))


@pytest.fixture(scope="package", autouse=True)
def _quick_collections() -> Iterator[None]:
    """Every training of TRL collects garbage, a third of a second with all that is imported: leave that out."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
