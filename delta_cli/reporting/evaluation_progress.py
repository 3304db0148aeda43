"""A progress bar for evaluations, shown only in a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

if TYPE_CHECKING:
    from delta_cli.evaluation.evaluate import EvaluationProgress


@contextmanager
def evaluation_progress(quiet: bool = False) -> Iterator[EvaluationProgress | None]:
    """The callback that an evaluation reports its progress to; None if stderr is no terminal or ``quiet`` is set."""
    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        tasks = {}

        def report(benchmark: str, done: int, total: int) -> None:
            if benchmark not in tasks:
                tasks[benchmark] = progress.add_task(benchmark, total=total)
            progress.update(tasks[benchmark], completed=done)

        yield report
