"""The ratio gates: how each bounds a token's term of the objective, with its analytic derivative.

A gate reads the log-ratio delta = logp − logp_old, clamped to ±20, and the advantage, both [n]. It returns the term l
[n] to maximise, its derivative with respect to logp [n], and where it cut the gradient off [n]. Source: method,
section 4.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from delta_cli.credit.methods import Method

if TYPE_CHECKING:  # the core itself needs nothing but numpy
    from backends.arrays import Bools, Doubles, Ids


MAX_LOG_RATIO = 20.0


@dataclass(frozen=True)
class GateInput:
    """Tokens of whole responses, flat and in order."""

    logp: Doubles  # [n]
    delta: Doubles  # [n] log-ratio, clamped
    advantages: Doubles  # [n]
    lengths: Ids  # [r] tokens of each response


@dataclass(frozen=True)
class GateOutput:
    """The term of each token, its derivative, and whether the gate closed on it."""

    value: Doubles  # [n]
    slope: Doubles  # [n] d value / d logp
    closed: Bools  # [n]


def none(tokens: GateInput, method: Method) -> GateOutput:
    """r·A: importance sampling with no bound."""
    value = np.exp(tokens.delta) * tokens.advantages
    return GateOutput(value, value, np.zeros(len(value), dtype=bool))


def clip(tokens: GateInput, method: Method) -> GateOutput:
    """min(r·A, clip(r)·A), and max(·, c·A) where A < 0 with dual clip c (PPO; DAPO's two bounds)."""
    return _clip(np.exp(tokens.delta), tokens.advantages, method)


def sequence_clip(tokens: GateInput, method: Method) -> GateOutput:
    """GSPO: the clip on s = exp(mean of the response's log-ratios); every token gets s·A, or 0.

    The slope leaves out the 1/length of ds/dlogp: the mean over a response's tokens supplies it.
    With token weights this is the gradient of GSPO-token, in which s is a constant times each
    token's own ratio.
    """
    rows = np.repeat(np.arange(len(tokens.lengths)), tokens.lengths)
    sums = np.bincount(rows, tokens.delta, len(tokens.lengths))
    means = sums / np.maximum(tokens.lengths, 1)
    return _clip(np.exp(means)[rows], tokens.advantages, method)


def _clip(ratio: Doubles, advantages: Doubles, method: Method) -> GateOutput:
    value = ratio * advantages
    clipped = np.clip(ratio, 1 - method.eps_low, 1 + method.eps_high) * advantages
    closed = clipped < value
    slope = np.where(closed, 0.0, value)
    value = np.minimum(value, clipped)
    if method.dual_clip is not None:
        floored = dual_clipped(ratio, advantages, method)
        value = np.where(floored, method.dual_clip * advantages, value)
        slope = np.where(floored, 0.0, slope)
        closed = closed | floored
    return GateOutput(value, slope, closed)


def dual_clipped(ratio: Doubles, advantages: Doubles, method: Method) -> Bools:
    """Where the dual clip takes over: A < 0 and r above dual_clip, [n]."""
    limit = np.inf if method.dual_clip is None else method.dual_clip
    return (advantages < 0) & (ratio > limit)


def soft(tokens: GateInput, method: Method) -> GateOutput:
    """SAPO: f(r)·A with f = (4/tau)·sigmoid(tau·(r − 1))."""
    ratio = np.exp(tokens.delta)
    tau = np.where(tokens.advantages > 0, method.tau_positive, method.tau_negative)
    share = 0.5 + 0.5 * np.tanh(tau * (ratio - 1) / 2)  # sigmoid
    value = 4 / tau * share * tokens.advantages
    slope = 4 * share * (1 - share) * ratio * tokens.advantages
    return GateOutput(value, slope, np.zeros(len(value), dtype=bool))


def stop_gradient(tokens: GateInput, method: Method) -> GateOutput:
    """CISPO: r within its bounds held constant, times A·logp; no token's gradient is lost."""
    slope = np.clip(np.exp(tokens.delta), method.bound_low, method.bound) * tokens.advantages
    return GateOutput(slope * tokens.logp, slope, np.zeros(len(slope), dtype=bool))


GATES: dict[str, Callable[[GateInput, Method], GateOutput]] = {
    "none": none,
    "clip": clip,
    "soft": soft,
    "sequence_clip": sequence_clip,
    "stop_gradient": stop_gradient,
}
