"""The records of a run as a table: rows are steps, columns are metrics."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any, overload

import numpy as np

from backends.arrays import Doubles
from delta_cli.text import number

FIRST = (
    "step",
    "accuracy",
    "low",
    "high",
    "reward_mean",
    "response_length_mean",
    "entropy_mean",
    "grad_norm",
    "seconds",
)
SHOWN = 8  # rows at each end of a printed table


class MetricsTable(Sequence[Mapping[str, Any]]):
    """Records with a value for each column. ``pandas.DataFrame(table)`` makes a data frame of it."""

    def __init__(self, records: Sequence[Mapping[str, Any]]) -> None:
        self._records = tuple(records)

    @property
    def columns(self) -> list[str]:
        """The names of all columns, the most telling ones first."""
        names = dict.fromkeys(name for record in self._records for name in record)
        first = [name for name in FIRST if name in names]
        return first + [name for name in names if name not in first]

    def column(self, name: str) -> Doubles:
        """One column as an array [rows]; NaN where a record has no number. Raises KeyError for an unknown name."""
        if name not in self.columns:
            raise KeyError(f"{name}: the columns are {', '.join(self.columns)}")
        values = [record.get(name) for record in self._records]
        return np.array([value if isinstance(value, int | float) else math.nan for value in values], np.float64)

    def __len__(self) -> int:
        return len(self._records)

    @overload
    def __getitem__(self, place: int) -> Mapping[str, Any]: ...
    @overload
    def __getitem__(self, place: slice) -> MetricsTable: ...
    def __getitem__(self, place: int | slice) -> Mapping[str, Any] | MetricsTable:
        found = self._records[place]
        return MetricsTable(found) if isinstance(found, tuple) else found

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        return iter(self._records)

    def __repr__(self) -> str:
        head, *rows = self._cells()
        widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)] if head else []
        lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in (head, *rows)]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        head, *rows = self._cells()
        cells = ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows]
        names = "".join(f"<th>{escape(name)}</th>" for name in head)
        return f"<table><tr>{names}</tr>{''.join(f'<tr>{row}</tr>' for row in cells)}</table>"

    def _cells(self) -> list[list[str]]:
        """The header and the rows of the columns in ``FIRST``; a long table is cut in the middle."""
        names = [name for name in self.columns if name in FIRST]
        rows = [[number(record.get(name)) for name in names] for record in self._records]
        if len(rows) > 2 * SHOWN:
            rows = [*rows[:SHOWN], ["…"] * len(names), *rows[-SHOWN:]]
        return [names, *rows]
