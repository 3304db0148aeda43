"""How stable the coefficients of a batch are when some of its rewards are wrong."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy import stats

from backends.arrays import Doubles
from backends.interface import Ids
from delta_cli.credit import group_advantages, token_coefficients
from delta_cli.credit.features import FeatureReductions


@dataclass(frozen=True)
class Stability:
    """Coefficients under flipped rewards against those of the same tokens under the true ones, means over draws.

    "Kept" are the tokens whose response kept its reward and had an advantage under the true ones:
    of them the noise changes only what they are compared with.
    """

    share: float  # of rewards flipped
    rank_correlation: float  # Spearman's, over all tokens
    change: float  # mean |coefficient − coefficient|, over all tokens
    rank_correlation_kept: float
    change_kept: float


def stability(
    features: FeatureReductions,
    rewards: Doubles,
    groups: Ids,
    starts: Ids,
    share: float,
    rng: np.random.Generator,
    draws: int = 20,
    by_group: bool = False,
) -> Stability:
    """Flip ``share`` of the 0/1 ``rewards`` [R], so many ``draws`` of it, and compare the coefficients."""

    def coefficients(rewards: Doubles) -> Doubles:
        advantages = group_advantages(rewards, groups)
        return token_coefficients(features, advantages, starts, groups=groups if by_group else None).weights

    clean, lengths = coefficients(rewards), np.diff(starts)
    moving = group_advantages(rewards, groups) != 0
    found = []
    for _ in range(draws):
        flipped = rng.random(len(rewards)) < share
        noisy = coefficients(np.where(flipped, 1 - rewards, rewards))
        kept = np.repeat(moving & ~flipped, lengths)
        found.append([*_agreement(clean, noisy), *_agreement(clean[kept], noisy[kept])])
    return Stability(share, *np.mean(found, axis=0).tolist())


def _agreement(first: Doubles, second: Doubles) -> tuple[float, float]:
    """Rank correlation and mean absolute difference; NaN where nothing can be ranked."""
    if not len(first) or np.ptp(first) == 0 or np.ptp(second) == 0:
        return np.nan, float(np.abs(first - second).mean()) if len(first) else np.nan
    return float(stats.spearmanr(first, second).statistic), float(np.abs(first - second).mean())
