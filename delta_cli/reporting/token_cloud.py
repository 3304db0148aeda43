"""A figure of the most amplified and the most damped tokens of a run: the larger a token, the further from 1."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from delta_cli.reporting.coefficient_statistics import CoefficientStatistics, TokenCredit
from delta_cli.runs.records import RecordedRun
from delta_cli.text import visible

WORDS = 24  # in each half
READ_TOKENS = 200_000  # of the last recorded steps
SMALLEST, LARGEST = 7.0, 14.0  # font sizes in points
COLUMN, GAP, HEIGHT = 2.4, 0.15, 2.4  # inches: width of a half, gap between them, height
LETTER = 0.62  # width of a letter, as a share of its font size
LONGEST = 18  # characters of a token


@dataclass(frozen=True)
class TokenCloud:
    """Tokens with their mean coefficients, those furthest from 1 first."""

    step: int  # the last one counted
    amplified: tuple[TokenCredit, ...]
    damped: tuple[TokenCredit, ...]


def cloud(run: RecordedRun) -> TokenCloud | None:
    """The tokens of the last recorded responses of a run; None if no token is amplified or none is damped."""
    statistics, tokens = CoefficientStatistics(), 0
    for step in reversed(run.steps):
        for response in run.responses(step):
            statistics.add(response)
            tokens += len(response)
        if tokens >= READ_TOKENS:
            break
    if not tokens:
        return None
    table = statistics.table(run.tokenizer, rows=WORDS)
    amplified = sorted((each for kind in table.amplified.values() for each in kind), key=lambda each: -each.mean)
    damped = sorted((each for kind in table.damped.values() for each in kind), key=lambda each: each.mean)
    if not amplified or not damped:
        return None
    return TokenCloud(run.steps[-1], tuple(amplified[:WORDS]), tuple(damped[:WORDS]))


def draw(axes: Any, runs: Sequence[RecordedRun], found: TokenCloud, colours: tuple[str, str]) -> None:
    """Draw both halves side by side on matplotlib ``axes``, whose unit is an inch; words without room are left out."""
    axes.axis("off")
    halves = (("amplified", found.amplified, colours[0]), ("damped", found.damped, colours[1]))
    furthest = max(abs(each.mean - 1) for _, half, _ in halves for each in half)
    for place, (name, half, colour) in enumerate(halves):
        first = place * (COLUMN + GAP)
        axes.text(first, -0.2, f"{name}: {half[0].mean:.2f} … {half[-1].mean:.2f}", fontsize=SMALLEST + 1)
        left, top, line = 0.0, -0.3, 0.0
        for each in half:
            size = SMALLEST + (LARGEST - SMALLEST) * abs(each.mean - 1) / furthest
            word, height = shown(each), 1.3 * size / 72
            width = (len(word) * LETTER + 1.2) * size / 72
            if left and left + width > COLUMN:
                left, top, line = 0.0, top - line, 0.0
            if top - height < -HEIGHT:
                break
            line = max(line, height)
            axes.text(first + left, top - line, word, fontsize=size, color=colour, family="monospace")
            left += width
    axes.set_xlim(0, 2 * COLUMN + GAP)
    axes.set_ylim(-HEIGHT, 0)


def drawing(found: TokenCloud, colours: tuple[str, str]) -> Any:
    """A drawing function for a chart."""
    return partial(draw, found=found, colours=colours)


def shown(credit: TokenCredit) -> str:
    """A token as it is written in the figure, with a sign for its side."""
    word = visible(credit.text.strip(" ") or "␣")
    short = word if len(word) <= LONGEST else f"{word[: LONGEST - 1]}…"
    return short + ("⁺" if credit.side == "+" else "⁻")
