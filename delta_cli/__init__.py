"""delta: reinforcement learning with verifiable rewards and DelTA token credit."""

from __future__ import annotations

import importlib

__version__ = "0.1.0"
__all__ = ["Run", "__version__", "train"]  # their types are in __init__.pyi
_PLACES = {"Run": "delta_cli.api.run", "train": "delta_cli.api.train"}


def __getattr__(name: str) -> object:
    """Import ``train`` and ``Run`` when they are first used, so that the command line starts at once."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_PLACES[name]), name)
