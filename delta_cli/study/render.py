"""A study's table and its learning curves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from delta_cli.evaluation.statistics import RankTest
from delta_cli.study.plan import Study
from delta_cli.study.summary import ArmSummary, RunOutcome
from delta_cli.study.wrapped_table import Column, WrappedTable
from delta_cli.text import count


def table(study: Study, rows: Sequence[ArmSummary]) -> WrappedTable:
    """A row for each arm: means over seeds with 95 % intervals, p-values of the rank tests."""

    def column(heading: str, cell: Callable[[ArmSummary], str]) -> Column:
        return heading, *map(cell, rows)

    return WrappedTable(
        title=study.heading,
        first=column("arm", lambda row: row.arm),
        groups=(
            (
                column("final accuracy", lambda row: row.accuracy.text(".1%")),
                column("p", lambda row: p_value(row.accuracy_test)),
            ),
            (
                column("area under curve", lambda row: row.area.text(".1%")),
                column("p", lambda row: p_value(row.area_test)),
            ),
            (column(f"steps to {study.target:.0%}", _steps),),
            (column("entropy", lambda row: f"{row.entropy.mean:.3f}"),),
            (column("length", lambda row: f"{row.length.mean:.1f}"),),
        ),
        caption=_caption(study, rows),
    )


def figure(study: Study, found: Sequence[RunOutcome], rows: Sequence[ArmSummary], files: Sequence[Path]) -> None:
    """Draw the learning curves, mean over seeds with the middle half as a band, and write them to every file."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    drawing = Figure(figsize=(7, 4.2), layout="constrained")
    axes = drawing.add_subplot(xlabel="step", ylabel="training accuracy")
    axes.set_title(study.heading, fontsize="small")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    styles = ("-", "--", "-.", ":")
    for index, row in enumerate(rows):
        curves = np.array([run.curve for run in found if run.arm == row.arm])
        steps = np.arange(1, curves.shape[1] + 1)
        low, high = np.quantile(curves, [0.25, 0.75], axis=0)
        label = f"{row.arm} ({row.area.mean:.1%})"
        (line,) = axes.plot(steps, curves.mean(axis=0), styles[index // 10 % 4], label=label, linewidth=1.5)
        axes.fill_between(steps, low, high, color=line.get_color(), alpha=0.12, linewidth=0)
    axes.legend(title="arm (area under curve)", fontsize="small", frameon=False)
    axes.grid(alpha=0.3)
    for file in files:
        drawing.savefig(file, dpi=150)


def _caption(study: Study, rows: Sequence[ArmSummary]) -> str:
    seeds = min((row.accuracy.seeds for row in rows), default=0)
    interval = "mean [95 % interval, Student's t]" if seeds > 1 else "one seed has no interval and no test"
    note = study.test_note("one-sided Mann-Whitney U") if seeds > 1 else "; ".join(study.remarks)
    return "; ".join(filter(None, (count(seeds, "seed"), interval, note)))


def p_value(test: RankTest | None) -> str:
    """The p-value of a test; empty without a test."""
    return "" if test is None else f"{test.p_value:.3f}"


def _steps(row: ArmSummary) -> str:
    if row.steps_to_target is None:
        return "never"
    partly = "" if row.reached == row.accuracy.seeds else f" ({row.reached} of {row.accuracy.seeds})"
    return f"{row.steps_to_target.mean:.0f}{partly}"
