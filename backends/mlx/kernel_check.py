"""Compares a fused kernel of MLX, value and gradient, with plain operations on the device at hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np


def value_and_gradient(compute: Callable[..., Any], inputs: list[mx.array], slopes: mx.array) -> list[mx.array]:
    """The value of ``compute(*inputs)``, and the gradient of Σ slopes · value by each input."""
    values, gradients = mx.vjp(compute, inputs, [slopes])
    return [*values, *gradients]


def why_not(fused: Callable[[], list[mx.array]], plain: Callable[[], list[mx.array]], tolerance: float) -> str | None:
    """Why the fused kernel cannot be used, as a clause; None if it can.

    Both functions return value and gradient. ``tolerance`` bounds the largest difference of an array, relative to its
    largest entry.
    """
    try:
        found = fused()
        mx.eval(found)
    except (RuntimeError, ValueError) as error:
        return f"the fused kernel has no gradient here ({str(error).splitlines()[0]})"
    for one, other in zip(found, plain(), strict=True):
        gap = float(np.array(mx.abs(one.astype(mx.float32) - other).max() / mx.abs(other).max()))
        if not gap <= tolerance:
            return f"the fused kernel's gradient differs by {gap:.2g} from that of plain operations"
    return None
