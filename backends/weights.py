"""What every backend refuses of weights it has read, in the same words."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from backends.interface import BackendError


def refuse_nonfinite(where: str | Path, broken: Iterable[str]) -> None:
    """Raise BackendError where any weight, of those named, holds NaN or infinity."""
    names = sorted(broken)
    if names:
        raise BackendError(
            f"{where}: {len(names)} weights hold NaN or infinity, {names[0]} among them, so nothing the model computes "
            "is a number; get its files again, or resume from an earlier checkpoint"
        )


def refuse_unexpected(where: str | Path, unexpected: Iterable[str]) -> None:
    """Raise BackendError where a folder holds weights that its configuration has no place for."""
    names = sorted(unexpected)
    if names:
        raise BackendError(
            f"{where}: {len(names)} weights are of no layer that config.json describes, {names[0]} among them, and "
            "would be left out without a word; put model_type and the sizes right, or get the model's files again"
        )
