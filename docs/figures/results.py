"""Files in benchmarks/results, and how their numbers are written on a page."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from delta_cli.study.summary import over_seeds

ROOT = Path(__file__).parents[2]
Named = Iterator[tuple[str, str]]  # figures: a name and its text


@cache
def result(name: str) -> dict[str, Any]:
    """The JSON file of that name in benchmarks/results."""
    loaded: dict[str, Any] = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text(encoding="utf-8"))
    return loaded


def span(values: Iterable[float], digits: int = 0) -> str:
    """The smallest and the largest value, or the one value that both round to."""
    ordered = sorted(values)
    low, high = (f"{value:.{digits}f}" for value in (ordered[0], ordered[-1]))
    return low if low == high else f"{low} to {high}"


def percent(row: dict[str, Any]) -> str:
    """A mean and its interval in per cent: 83.7 [82.4, 84.9]."""
    return "{} [{}, {}]".format(*(f"{100 * row[name]:.1f}" for name in ("mean", "low", "high")))


def points(row: dict[str, Any]) -> str:
    """A difference and its interval in percentage points, with signs."""
    return "{} [{}, {}]".format(*(f"{100 * row[name]:+.1f}".replace("-", "−") for name in ("mean", "low", "high")))


def table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table with the blank lines that keep it apart from the comments."""
    header = list(header)
    lines = [header, ["---"] * len(header), *rows]
    return "\n\n" + "\n".join("| " + " | ".join(cells) + " |" for cells in lines) + "\n\n"


def mean_of(values: Iterable[float], digits: int) -> str:
    """Mean over seeds and its 95 % interval (Student's t): 1.100 [1.079, 1.121]."""
    interval = over_seeds(list(values))
    return "{} [{}, {}]".format(*(f"{value:.{digits}f}" for value in (interval.mean, interval.low, interval.high)))


def listed(values: Iterable[float]) -> str:
    """Shares in per cent, in order: 46.0, 48.0 and 48.4."""
    *first, last = (f"{100 * value:.1f}" for value in sorted(values))
    return f"{', '.join(first)} and {last}"
