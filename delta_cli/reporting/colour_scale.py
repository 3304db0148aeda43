"""The colours of a coefficient: orange above 1, blue below, nothing at 1; and marks that say the same.

Blue and orange stay apart in every common colour blindness. How strong a colour is says how far the
coefficient lies from 1, in steps, so that a page needs a few classes instead of a style for each token.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from backends.arrays import Doubles, Ids

LEVELS = 8
SMALLEST_REACH = 0.01  # weights that are all 1 have no colour
UP, DOWN, EVEN = "▲", "▼", "·"
MARKED = LEVELS // 2  # the level from which a token gets a mark
ORANGE, BLUE = (230, 115, 0), (70, 140, 255)


@dataclass(frozen=True)
class ColourScale:
    """Coefficients from 1 − ``reach`` to 1 + ``reach`` use all the colours; those beyond, the strongest."""

    reach: float

    @classmethod
    def covering(cls, coefficients: Iterable[Doubles]) -> ColourScale:
        """The scale that reaches the 99th percentile of the distances from 1: one outlier must not fade the rest."""
        values = np.concatenate([np.zeros(1), *(np.abs(each - 1) for each in coefficients)])
        distance = float(np.quantile(values, 0.99))
        return cls(max(distance, SMALLEST_REACH))

    def levels(self, coefficients: Doubles) -> Ids:
        """−LEVELS … LEVELS for each coefficient; 0 at 1."""
        share = np.clip((coefficients - 1) / self.reach, -1, 1)
        return np.rint(share * LEVELS).astype(np.int64)

    def level(self, coefficient: float) -> int:
        """The level of one coefficient."""
        return int(self.levels(np.array([coefficient]))[0])

    @property
    def ends(self) -> tuple[float, float]:
        """The coefficients at the ends of the colours."""
        return max(1 - self.reach, 0.0), 1 + self.reach


def mark(level: int) -> str:
    """▲ where clearly amplified, ▼ where clearly damped."""
    return UP if level >= MARKED else DOWN if level <= -MARKED else " "


def css_class(level: int) -> str:
    """u1 … u8 for amplified, d1 … d8 for damped, empty at 1."""
    return f"{'u' if level > 0 else 'd'}{abs(level)}" if level else ""


def terminal_style(level: int) -> str:
    """A background for a terminal, with a foreground that is legible on it whatever the theme."""
    if not level:
        return ""
    tint = ORANGE if level > 0 else BLUE
    share = 0.15 + 0.85 * abs(level) / LEVELS
    red, green, blue = (round(255 + (part - 255) * share) for part in tint)
    return f"black on rgb({red},{green},{blue})"
