"""What ``delta study`` prints: a line when a run starts or ends and, in a terminal, a table of the active runs."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from delta_cli.study.runner import StudyRunner
from delta_cli.text import count, duration

REFRESH_PER_SECOND = 1  # each refresh reads the metrics of the active runs


class StudyProgress:
    """Prints lines; in a terminal that can move its cursor they scroll above a table that is redrawn in place."""

    def __init__(self, console: Console) -> None:
        self.runner: StudyRunner | None = None  # set before the first line
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
        """Print that a run starts or ends."""
        self._console.print(Text(text), soft_wrap=True)
        self._console.file.flush()

    def picture(self) -> RenderableType:
        """The active runs with their steps and times, and the time left."""
        if self.runner is None:
            return Text()
        table = Table(box=None, pad_edge=False, padding=(0, 1))
        table.add_column("run", overflow="fold")
        table.add_column("step", justify="right", no_wrap=True)
        table.add_column("time", justify="right", no_wrap=True)
        now = time.monotonic()
        for name, active in sorted(self.runner.active.items()):
            table.add_row(Text(name), f"{active.run.steps_done()}/{active.steps}", duration(now - active.started))
        left = self.runner.seconds_left()
        rest = "" if left is None else f", {duration(left)} left"
        return Group(Text(), table, Text(f"{count(self.runner.remaining, 'run')} to finish{rest}", style="dim"))
