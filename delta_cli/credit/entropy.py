"""Keeping the policy's entropy up: a bonus, a target that sets the bonus, and tokens chosen by covariance.

The objective of a backend is a function of the log-probabilities of sampled tokens alone, so the bonus is estimated
from them: with the ratio r = π/π_old of a token and the entropy H of the distribution it was drawn from,

    e = r·(1 − H − logp) + H − 1,   de/dlogp = −r·(logp + H).

Its mean over tokens drawn from π_old is, while π = π_old, the entropy, and the mean of its gradient is the gradient of
the entropy. H is a baseline: it reduces the variance and changes no mean.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np

if TYPE_CHECKING:  # the core itself needs nothing but numpy
    from backends.arrays import Bools, Doubles

CovarianceKind = Literal["none", "clip", "kl"]


def entropy_estimate(logp: Doubles, delta: Doubles, entropies: Doubles) -> tuple[Doubles, Doubles]:
    """The estimate of each token's entropy and its derivative, [n]; ``delta`` is the clamped log-ratio."""
    ratio = np.exp(delta)
    return ratio * (1 - entropies - logp) + entropies - 1, -ratio * (logp + entropies)


def next_coefficient(coefficient: float, entropy: float, target: float, step: float, most: float) -> float:
    """The coefficient of an entropy bonus for a target: up by ``step`` at or below it, else down (arXiv 2505.22312)."""
    return min(coefficient + step, most) if entropy <= target else max(coefficient - step, 0.0)


def covariances(logp: Doubles, advantages: Doubles, counted: Bools) -> Doubles:
    """(A − mean A)·(logp − mean logp) of each token, means over the ``counted`` ones, [N] (arXiv 2505.22617)."""
    if not counted.any():
        return np.zeros(len(logp))
    centred: Doubles = (advantages - advantages[counted].mean()) * (logp - logp[counted].mean())
    return centred


def clip_cov_tokens(
    covariance: Doubles, counted: Bools, share: float, low: float, high: float, rng: np.random.Generator
) -> Bools:
    """A random ``share`` of the counted tokens, at least one, among those with low < covariance < high, [N].

    All of these if they are fewer.
    """
    chosen = np.zeros(len(covariance), dtype=bool)
    candidates = np.flatnonzero(counted & (covariance > low) & (covariance < high))
    wanted = max(int(share * counted.sum()), 1)
    chosen[rng.permutation(candidates)[:wanted]] = True
    return chosen


def kl_cov_tokens(covariance: Doubles, counted: Bools, share: float) -> Bools:
    """The ``share`` of the counted tokens, at least one, with the largest covariance, [N]."""
    chosen = np.zeros(len(covariance), dtype=bool)
    tokens = np.flatnonzero(counted)
    wanted = max(int(share * len(tokens)), 1)
    chosen[tokens[np.argsort(-covariance[tokens], kind="stable")[:wanted]]] = True
    return chosen
