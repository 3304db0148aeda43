"""A study's table as text and its learning curves as a figure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from delta_cli.study.plan import Study
from delta_cli.study.summary import ArmSummary, RunOutcome, SeedInterval
from delta_cli.study.wrapped_table import Column, WrappedTable
from delta_cli.text import count


def table(study: Study, rows: Sequence[ArmSummary]) -> WrappedTable:
    """A row for each arm: means over seeds with 95 % intervals, p-values of the rank tests."""

    def column(heading: str, cell: Callable[[ArmSummary], str]) -> Column:
        return heading, *map(cell, rows)

    return WrappedTable(
        title=study.question or study.name,
        first=column("arm", lambda row: row.arm),
        groups=(
            (
                column("final accuracy", lambda row: _percent(row.accuracy)),
                column("p", lambda row: _p(row.accuracy_test)),
            ),
            (
                column("area under curve", lambda row: _percent(row.area)),
                column("p", lambda row: _p(row.area_test)),
            ),
            (column(f"steps to {study.target:.0%}", _steps),),
            (column("entropy", lambda row: f"{row.entropy.mean:.3f}"),),
            (column("length", lambda row: f"{row.length.mean:.1f}"),),
        ),
        caption=_caption(study, rows),
    )


def figure(study: Study, found: Sequence[RunOutcome], rows: Sequence[ArmSummary], files: Sequence[Path]) -> None:
    """Learning curves, mean over seeds with the range of the middle half; written to every file."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    drawing = Figure(figsize=(7, 4.2), layout="constrained")
    axes = drawing.add_subplot(xlabel="step", ylabel="training accuracy")
    axes.set_title(study.question or study.name, fontsize="small")
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
    test = f"p: one-sided Mann-Whitney U that {study.reference} is higher"
    pairs = [f"{arm.name} against {arm.against}" for arm in study.arms if arm.against not in (None, arm.name)]
    others = f"; but {', '.join(pairs)}" if pairs else ""
    return f"{count(seeds, 'seed')}; mean [95 % interval, Student's t]; {test}{others}"


def _percent(value: SeedInterval) -> str:
    return f"{value.mean:.1%} [{value.low:.1%}, {value.high:.1%}]"


def _p(test: object) -> str:
    value = getattr(test, "p_value", None)
    return "" if value is None else f"{value:.3f}"


def _steps(row: ArmSummary) -> str:
    if row.steps_to_target is None:
        return "never"
    partly = "" if row.reached == row.accuracy.seeds else f" ({row.reached} of {row.accuracy.seeds})"
    return f"{row.steps_to_target.mean:.0f}{partly}"
