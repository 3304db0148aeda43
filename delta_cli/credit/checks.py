"""Checks of arguments; every failure is a ValueError that names the value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

_HOST = 1  # kDLCPU of DLPack


def as_numpy(array: Any, name: str) -> NDArray[Any]:
    """An array of any library as a numpy array, through DLPack and without a copy if it is in host memory.

    Raises ValueError, with a way out, if it is on a device or of a type that numpy does not have.
    """
    if isinstance(array, np.ndarray) or not hasattr(array, "__dlpack_device__"):
        return np.asarray(array)
    if array.__dlpack_device__()[0] != _HOST:
        raise ValueError(
            f"{name} are on a device; give features of your own that reduce them there (docs/trainer.md), or a copy "
            "in host memory"
        )
    array = array.detach() if hasattr(array, "detach") else array
    try:
        return np.from_dlpack(array)
    except (BufferError, RuntimeError, TypeError) as error:
        raise ValueError(f"{name} are {array.dtype}, which numpy does not have; convert them to float32") from error


def check_choices(record: object, choices: Mapping[str, Sequence[str]]) -> None:
    """Raise ValueError if a field of ``record`` is not one of its allowed words."""
    for name, allowed in choices.items():
        if (value := getattr(record, name)) not in allowed:
            raise ValueError(f"{name} '{value}' does not exist; choose one of {', '.join(allowed)}")


def check_positive(record: object, *names: str) -> None:
    """Raise ValueError if a field of ``record`` is not a finite number above 0."""
    for name in names:
        if not 0 < (value := getattr(record, name)) < np.inf:
            raise ValueError(f"{name} must be a finite number above 0, not {value}")
