"""The progress of an evaluation on standard error: a bar in a terminal, elsewhere a line every half minute."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

if TYPE_CHECKING:
    from delta_cli.evaluation.evaluate import EvaluationProgress

SILENCE = 30.0  # seconds between two lines


@contextmanager
def evaluation_progress(quiet: bool = False) -> Iterator[EvaluationProgress | None]:
    """The callback that an evaluation reports its progress to; None if ``quiet`` is set."""
    console = Console(stderr=True)
    if quiet:
        yield None
    elif not console.is_terminal:
        yield _lines(console)
    else:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=console) as progress:
            tasks = {}

            def report(benchmark: str, done: int, total: int) -> None:
                if benchmark not in tasks:
                    tasks[benchmark] = progress.add_task(benchmark, total=total)
                progress.update(tasks[benchmark], completed=done)

            yield report


def _lines(console: Console) -> EvaluationProgress:
    """A callback that prints a line if none was printed for a while."""
    printed = time.monotonic()

    def report(benchmark: str, done: int, total: int) -> None:
        nonlocal printed
        if time.monotonic() - printed > SILENCE:
            printed = time.monotonic()
            console.print(f"  … {benchmark}: {done} of {total} responses", highlight=False, markup=False)

    return report
