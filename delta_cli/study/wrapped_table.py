"""A table for any width: columns that do not fit beside the others follow below them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.box import HEAVY_HEAD, Box
from rich.console import Console, ConsoleOptions, RenderableType
from rich.table import Table
from rich.text import Text

from delta_cli.text import fits

Column = tuple[str, ...]  # its heading and one cell for each row


@dataclass(frozen=True)
class WrappedTable:
    """Groups of columns that stay together; every further table repeats the first column."""

    title: str
    first: Column
    groups: Sequence[Sequence[Column]]
    caption: str
    box: Box | None = HEAVY_HEAD

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        """As few tables as the width allows."""
        tables: list[list[Sequence[Column]]] = [[]]
        for group in self.groups:
            if tables[-1] and not fits(self._table([*tables[-1], group]), console, options):
                tables.append([])
            tables[-1].append(group)
        if self.title:
            yield Text(self.title, style="italic")
        yield from map(self._table, tables)
        if self.caption:
            yield Text(self.caption, style="dim")

    def _table(self, groups: Sequence[Sequence[Column]]) -> Table:
        table = Table(box=self.box, pad_edge=self.box is not None, padding=(0, 1))
        columns = [self.first, *(column for group in groups for column in group)]
        for place, column in enumerate(columns):
            table.add_column(Text(column[0]), justify="right" if place else "left", overflow="fold")
        for cells in zip(*(column[1:] for column in columns), strict=True):
            table.add_row(*map(Text, cells))
        return table
