"""These tests need TRL; warnings of TRL and its libraries are not failures."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

if find_spec("trl") is None:
    collect_ignore_glob = ["test_trl_*.py"]
else:
    from tests.integrations.credited import rescored as rescored
    from tests.integrations.credited import seen as seen


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let TRL's, transformers' and torch's own warnings pass; ours still fail."""
    for item in items:
        if "tests/integrations" in item.path.as_posix():
            for module in ("trl", "transformers", "torch", "accelerate", "peft"):
                item.add_marker(pytest.mark.filterwarnings(f"ignore:::{module}"))
