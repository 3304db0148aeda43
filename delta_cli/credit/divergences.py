"""Estimates of the KL divergence from the policy to a reference, of one sampled token each, with their derivatives.

With x = logp − logp_reference, all [n] in nats. k1, k2 and k3 are Schulman's (http://joschu.net/blog/kl-approx.html);
the other names are those of verl and TRL. The estimates k1 and k3 have the right mean but not the right mean gradient;
k2 has the right mean gradient, and so do the names that end in ``+``, which keep a value and take k2's derivative.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np

from delta_cli.credit.gates import MAX_LOG_RATIO

if TYPE_CHECKING:  # the core itself needs nothing but numpy
    from backends.arrays import Doubles

    Estimate = Callable[[Doubles, Doubles], tuple[Doubles, Doubles]]  # of x and of the log-ratio to the old policy

KlEstimator = Literal["k1", "k2", "k3", "abs", "low_var_kl", "k3_bias_corrected", "k1+", "k3+"]
ROUNDING = 1e-5  # nats: how far float32 log-probabilities of one policy may lie apart
LOW_VAR_LIMIT = 10.0  # nats; verl clips the estimate of a token to it


def direction(x: Doubles) -> Doubles:
    """The derivative of |x|: its sign, and 0 for differences that are no more than rounding."""
    return np.sign(x) * (np.abs(x) > ROUNDING)


def k1(x: Doubles, delta: Doubles) -> tuple[Doubles, Doubles]:
    """x. Its derivative is 1, which is 0 on average over the policy: it teaches nothing."""
    return x, np.ones(len(x))


def k2(x: Doubles, delta: Doubles) -> tuple[Doubles, Doubles]:
    """x²/2."""
    return x**2 / 2, x


def k3(x: Doubles, delta: Doubles) -> tuple[Doubles, Doubles]:
    """exp(−x) + x − 1."""
    gap = np.clip(-x, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    return np.exp(gap) - gap - 1, (1 - np.exp(gap)) * (np.abs(x) <= MAX_LOG_RATIO)


def absolute(x: Doubles, delta: Doubles) -> tuple[Doubles, Doubles]:
    """The absolute value of x."""
    return np.abs(x), direction(x)


def low_var_kl(x: Doubles, delta: Doubles) -> tuple[Doubles, Doubles]:
    """k3, at most 10 nats; beyond that its derivative is 0."""
    value, slope = k3(x, delta)
    return np.minimum(value, LOW_VAR_LIMIT), np.where(value <= LOW_VAR_LIMIT, slope, 0.0)


def k3_bias_corrected(x: Doubles, delta: Doubles) -> tuple[Doubles, Doubles]:
    """r·k3 with a derivative through r = exp(delta) too, as in TRL: the mean gradient is that of the KL divergence."""
    value, slope = k3(x, delta)
    ratio = np.exp(np.clip(delta, -MAX_LOG_RATIO, MAX_LOG_RATIO))
    return ratio * value, ratio * (slope + value * (np.abs(delta) <= MAX_LOG_RATIO))


def _with_slope_of_k2(estimate: Estimate) -> Estimate:
    return lambda x, delta: (estimate(x, delta)[0], x)


KL_ESTIMATORS: dict[str, Estimate] = {
    "k1": k1,
    "k2": k2,
    "k3": k3,
    "abs": absolute,
    "low_var_kl": low_var_kl,
    "k3_bias_corrected": k3_bias_corrected,
    "k1+": _with_slope_of_k2(k1),
    "k3+": _with_slope_of_k2(k3),
}
assert set(get_args(KlEstimator)) == set(KL_ESTIMATORS)
