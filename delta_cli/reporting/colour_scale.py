"""Colours and marks of coefficients: orange above 1, blue below 1, none at 1.

Orange and blue can be told apart with every common colour blindness, and marks repeat what the colours say. The
strength of a colour shows the distance of the coefficient from 1 in LEVELS steps, so a page needs only a few CSS
classes and no style for each token.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from backends.arrays import Doubles, Ids

LEVELS = 8
SMALLEST_REACH = 0.01  # so that coefficients which are all 1 get no colour
UP, DOWN, EVEN = "▲", "▼", "·"
MARKED = LEVELS // 2  # the level from which a token gets a mark
ORANGE, BLUE = (230, 115, 0), (70, 140, 255)


@dataclass(frozen=True)
class ColourScale:
    """Maps coefficients from 1 − ``reach`` to 1 + ``reach`` to levels; those beyond get the strongest colour."""

    reach: float

    @classmethod
    def covering(cls, coefficients: Iterable[Doubles]) -> ColourScale:
        """The scale that reaches the 99th percentile of the distances from 1, so an outlier does not fade the rest."""
        values = np.concatenate([np.zeros(1), *(np.abs(each - 1) for each in coefficients)])
        distance = float(np.quantile(values, 0.99))
        return cls(max(distance, SMALLEST_REACH))

    def levels(self, coefficients: Doubles) -> Ids:
        """The level of each coefficient, from −LEVELS to LEVELS, 0 at a coefficient of 1."""
        share = np.clip((coefficients - 1) / self.reach, -1, 1)
        return np.rint(share * LEVELS).astype(np.int64)

    def level(self, coefficient: float) -> int:
        """The level of one coefficient."""
        return int(self.levels(np.array([coefficient]))[0])

    @property
    def ends(self) -> tuple[float, float]:
        """The coefficients with the strongest colours."""
        return max(1 - self.reach, 0.0), 1 + self.reach


def mark(level: int) -> str:
    """▲ if clearly amplified, ▼ if clearly damped, otherwise a space."""
    return UP if level >= MARKED else DOWN if level <= -MARKED else " "


def css_class(level: int) -> str:
    """u1 … u8 if amplified, d1 … d8 if damped, empty at level 0."""
    return f"{'u' if level > 0 else 'd'}{abs(level)}" if level else ""


def terminal_style(level: int) -> str:
    """A background colour for a terminal, with black text, which is legible on it in every theme."""
    if not level:
        return ""
    tint = ORANGE if level > 0 else BLUE
    share = 0.15 + 0.85 * abs(level) / LEVELS
    red, green, blue = (round(255 + (part - 255) * share) for part in tint)
    return f"black on rgb({red},{green},{blue})"
