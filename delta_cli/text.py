"""Numbers and model text formatted for people. Text from a model never reaches a terminal or a page unescaped."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.measure import Measurement

BLOCKS = "▁▂▃▄▅▆▇█"
NONE = "–"


def visible(text: str, newline: str = "↵") -> str:
    """The text with everything escaped that would control a terminal or a page.

    Control codes, direction marks and lone surrogates become escapes like ``\\x1b``; a line break
    becomes ``newline``.
    """
    if text.isprintable():
        return text
    return "".join(newline if char == "\n" else _shown(char) for char in text)


def _shown(char: str) -> str:
    if char.isprintable() or unicodedata.category(char) == "Zs":
        return char
    return char.encode("unicode_escape").decode("ascii")


def quoted(token: str) -> str:
    """A token's text in quotation marks, with visible spaces."""
    return "“" + visible(token).replace(" ", "␣") + "”"


def tail(text: str, cells: int) -> str:
    """The end of a text, at most ``cells`` wide in a terminal."""
    if cell_len(text) <= cells:
        return text
    kept = text[-cells:]
    while cell_len(kept) >= cells:
        kept = kept[1 + (cell_len(kept) - cells) // 2 :]
    return "…" + kept


def sparkline(values: Sequence[float], width: int, low: float | None = None, high: float | None = None) -> str:
    """The values as blocks; more than ``width`` values are averaged in equal parts."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite or width < 1:
        return ""
    if len(finite) > width:
        edges = [len(finite) * i // width for i in range(width + 1)]
        finite = [sum(finite[a:b]) / (b - a) for a, b in pairwise(edges)]
    low = min(finite) if low is None else low
    high = max(finite) if high is None else high
    if high <= low:
        return BLOCKS[len(BLOCKS) // 2] * len(finite)
    levels = [(min(max(value, low), high) - low) / (high - low) for value in finite]
    return "".join(BLOCKS[min(int(level * len(BLOCKS)), len(BLOCKS) - 1)] for level in levels)


def number(value: Any) -> str:
    """A number with three significant digits and thousands separators; a dash for anything else."""
    if not isinstance(value, int | float):
        return NONE
    if not math.isfinite(value):
        return str(value)
    if value == int(value) and (isinstance(value, int) or abs(value) >= 1000):
        return f"{int(value):,}"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) < 1e-3 and value else f"{value:#.3g}"


def percent(value: Any) -> str:
    """A share as a percentage."""
    return f"{value:.1%}" if isinstance(value, int | float) and math.isfinite(value) else NONE


def count(number: int, what: str) -> str:
    """A number and a noun, which gets an s unless the number is 1."""
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"


def signed(value: float) -> str:
    """A number with its sign and two decimals."""
    return f"{value:+.2f}".replace("-", "−")


def memory(count: Any) -> str:
    """Bytes in GB, MB or kB."""
    if not isinstance(count, int | float):
        return NONE
    for unit, size in (("GB", 1e9), ("MB", 1e6)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count / 1e3:.3g} kB"


def duration(seconds: float) -> str:
    """m:ss, or h:mm:ss."""
    whole = round(seconds)
    hours, minutes = whole // 3600, whole // 60 % 60
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"


def fits(drawn: RenderableType, console: Console, options: ConsoleOptions) -> bool:
    """Whether the widest line fits into the width that the options allow."""
    return Measurement.get(console, options.update(max_width=10_000), drawn).maximum <= options.max_width


def evaluation_line(record: Mapping[str, Any]) -> str:
    """A line of evaluations.jsonl in words."""
    kinds = ", ".join(f"{visible(kind)} {share:.0%}" for kind, share in record.get("kinds", {}).items())
    return (
        f"held-out accuracy after step {record['step']}: {percent(record['accuracy'])} "
        f"({percent(record.get('low'))} to {percent(record.get('high'))}) on {record.get('problems', NONE)} problems"
        + (f": {kinds}" if kinds else "")
    )
