"""Checks of loaded weights that every backend makes, with the same messages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from backends.interface import BackendError

_LAYERS = ("num_hidden_layers", "num_layers", "n_layers", "n_layer")  # names of the number of layers in config.json


def refuse_too_many_layers(folder: Path, config: Mapping[str, Any]) -> None:
    """Raise BackendError if a configuration has more layers than its folder has weights.

    If the number is wrong, a library would build layers until memory runs out before it looks for their weights.
    """
    parts = [part for part in (config, config.get("text_config")) if isinstance(part, Mapping)]
    asked = [part[key] for part in parts for key in _LAYERS if isinstance(part.get(key), int | float)]
    if not asked:
        return
    weights = 0
    try:
        for file in folder.glob("*.safetensors"):
            with safe_open(file, "np") as stored:
                weights += len(stored.keys())
    except (OSError, SafetensorError):
        return  # the loader reports what is wrong with them
    if 0 < weights < max(asked):
        raise BackendError(
            f"{folder}: config.json asks for {max(asked):,} layers, but there are only {weights:,} weights; get the "
            "model's files again"
        )


def refuse_nonfinite(where: str | Path, broken: Iterable[str]) -> None:
    """Raise BackendError if any of the named weights holds NaN or infinity."""
    names = sorted(broken)
    if names:
        raise BackendError(
            f"{where}: {len(names)} weights hold NaN or infinity, {names[0]} among them, so the model's results are no "
            "numbers; get its files again, or resume from an earlier checkpoint"
        )


def refuse_unexpected(where: str | Path, unexpected: Iterable[str]) -> None:
    """Raise BackendError if a folder holds weights that its configuration does not have."""
    names = sorted(unexpected)
    if names:
        raise BackendError(
            f"{where}: {len(names)} weights belong to no layer that config.json describes, {names[0]} among them, and "
            "would be ignored; correct model_type and the sizes in config.json, or get the model's files again"
        )
