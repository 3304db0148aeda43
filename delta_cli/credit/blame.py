"""Put the blame for a wrong response on some of its tokens instead of all."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike

from delta_cli.credit.coefficients import TokenCoefficients

if TYPE_CHECKING:  # the core itself needs nothing but numpy
    from backends.arrays import Doubles


def blame_weights(blamed: ArrayLike, starts: ArrayLike) -> Doubles:
    """Weights [N] that move all of a response's weight to its ``blamed`` tokens.

    ``blamed`` [N] is True for these tokens, ``starts`` int64 [R+1] says where each response begins. The weights of a
    response have mean 1: T/b on its b blamed tokens of T, and 0 on the others; 1 on all if none is blamed.
    """
    marks, bounds = np.asarray(blamed, bool), np.asarray(starts, np.int64)
    lengths = np.diff(bounds)
    counts = np.bincount(np.repeat(np.arange(len(lengths)), lengths), weights=marks, minlength=len(lengths))
    share = np.divide(lengths, counts, out=np.ones(len(lengths)), where=counts > 0)
    return np.where(marks | np.repeat(counts == 0, lengths), np.repeat(share, lengths), 0.0)


def with_blame(coefficients: TokenCoefficients, blamed: ArrayLike, starts: ArrayLike) -> TokenCoefficients:
    """The coefficients times :func:`blame_weights`, rescaled to mean 1; all 0 if they are."""
    weights = coefficients.weights * blame_weights(blamed, starts)
    return replace(coefficients, weights=weights / weights.mean() if weights.any() else weights)
