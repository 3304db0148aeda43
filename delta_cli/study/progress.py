"""What a person sees of a study: lines as runs begin and end and, in a terminal, a table of those under way."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from delta_cli.study.grid import Grid
from delta_cli.text import duration

REFRESH_PER_SECOND = 1  # each reads the metrics of the runs under way


class StudyProgress:
    """Prints lines; in a terminal that can move its cursor they scroll above a table that is redrawn in place."""

    def __init__(self, console: Console) -> None:
        self.grid: Grid | None = None  # to be set before lines come
        self._console = console
        self._live: Live | None = None

    def __enter__(self) -> StudyProgress:
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            self._live = Live(
                console=self._console,
                get_renderable=self.picture,
                refresh_per_second=REFRESH_PER_SECOND,
                transient=True,
            )
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def line(self, text: str) -> None:
        """A run began or ended."""
        self._console.print(Text(text), soft_wrap=True)
        self._console.file.flush()

    def picture(self) -> RenderableType:
        """The runs under way, how far each is, and the time left."""
        grid = self.grid
        if grid is None:
            return Text()
        table = Table(box=None, pad_edge=False, padding=(0, 1))
        table.add_column("run", overflow="fold")
        table.add_column("step", justify="right", no_wrap=True)
        table.add_column("time", justify="right", no_wrap=True)
        now = time.monotonic()
        for name, run in sorted(grid.going.items()):
            table.add_row(Text(name), f"{run.step()}/{run.steps}", duration(now - run.started))
        left = grid.left()
        rest = "" if left is None else f", {duration(left)} left"
        return Group(Text(), table, Text(f"{grid.ahead} of the study's runs to finish{rest}", style="dim"))
