"""The bench's page, as text and as HTML, and its data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.table import Table

from delta_cli.bench.summary import BenchRow, PairedComparison, TaskSummary
from delta_cli.bench.tasks import TASKS
from delta_cli.reporting.html_pages import environment
from delta_cli.study.summary import SeedInterval

NOTES = (
    "Every arm is DAPO with another credit, on the same seeds, problems and order. Credits are scaled to mean 1 on "
    "each side (A > 0, A < 0), except delta, which is the paper's; the solver's two keep each side's sum of weight · "
    "|A| · (1 − p).",
    "Intervals are 95 %, Student's t over seeds; differences are paired by seed. The comparison that counts is the "
    "area under the learning curve against DAPO; p is two-sided, and Holm's correction is over the task's credits.",
    "AUC: the chance that the first wrong token of a wrong response outweighs another token of it; 0.5 is chance. "
    "Groups without a right response are left out, because they have no weights to compare.",
    "Noise: trace of the covariance of mini-batch gradients over the squared norm of their mean, relative to DAPO's. "
    "Cosine: of a mini-batch's gradient with DAPO's gradient of 32 other prompts, less DAPO's own.",
)
HEADINGS = {
    "learning": ("arm", "area, %", "− dapo", "p", "− lighter", "final, %", "− dapo", "verdict"),
    "other": (
        "arm",
        "AUC",
        "AUC, 8 updates",
        "noise / dapo's",
        "cosine − dapo's",
        "forwards",
        "s credit",
        "s step",
        "GiB",
    ),
}


@dataclass(frozen=True)
class BenchTable:
    """A table of the page as strings."""

    title: str
    headings: tuple[str, ...]
    rows: list[tuple[str, ...]]


def tables(task: TaskSummary) -> list[BenchTable]:
    """The tables of a task: how fast the arms learn, what else was measured, and adapters."""
    title = TASKS[task.task].title if task.task in TASKS else task.task
    learned = [row for row in task.rows if row.area is not None]
    found = [
        BenchTable(f"{task.task}: {title}", HEADINGS["learning"], [_learning(row) for row in learned]),
        BenchTable(
            f"{task.task}: mistakes, gradient, cost",
            HEADINGS["other"],
            [cells for row in task.rows if any((cells := _other(row))[1:])],
        ),
    ]
    if task.adapters:
        names = tuple(next(iter(task.adapters.values())))
        for title, number in (("AUC", "auc"), ("rank correlation with full weights", "rank")):
            rows = [(arm, *(_span(getattr(of[name], number)) for name in names)) for arm, of in task.adapters.items()]
            found.append(BenchTable(f"{task.task}: {title} after 8 updates by adapter", ("arm", *names), rows))
    return [table for table in found if table.rows]


def checks(task: TaskSummary) -> list[str]:
    """Whether the task can judge credits, in sentences."""
    lines = []
    if task.fit is not None:
        good = task.fit.p < 0.05 and task.fit.difference.mean > 0
        word = "is fit to judge credits" if good else "is NOT shown to be fit to judge credits"
        lines.append(
            f"{task.task} {word}: the solver's credit is {_points(task.fit)} points above DAPO, p = {task.fit.p:.2g}."
        )
    for arm, found in task.told_apart.items():
        told = "is told from" if found.p_greater < 0.01 else "is NOT told from"
        lines.append(
            f"{task.task}: the solver's credit {told} {arm}: {_points(found)} points above it, one-sided p = "
            f"{found.p_greater:.2g}."
        )
    return lines


def as_text(found: Sequence[TaskSummary], about: str) -> RenderableType:
    """The page for a terminal."""
    parts: list[RenderableType] = [about, ""]
    for task in found:
        for table in tables(task):
            shown = Table(title=table.title, title_justify="left", box=None, padding=(0, 2, 0, 0))
            for heading in table.headings:
                shown.add_column(heading, justify="left" if heading in ("arm", "verdict") else "right")
            for row in table.rows:
                shown.add_row(*row)
            parts += [shown, ""]
        parts += [*checks(task), ""]
    return Group(*parts, *NOTES)


def as_html(found: Sequence[TaskSummary], about: str) -> str:
    """The page as HTML that loads nothing."""
    sections = [{"name": task.task, "tables": tables(task), "checks": checks(task)} for task in found]
    return environment().get_template("bench.html.jinja").render(about=about, sections=sections, notes=NOTES)


def _learning(row: BenchRow) -> tuple[str, ...]:
    area, final = row.area_over_dapo, row.final_over_dapo
    return (
        row.arm,
        _percent(row.area),
        _points(area),
        "" if area is None else f"{area.p:.3f}",
        _points(row.area_over_lighter),
        _percent(row.final),
        _points(final),
        row.verdict,
    )


def _other(row: BenchRow) -> tuple[str, ...]:
    return (
        row.arm,
        _span(row.auc),
        _span(row.auc_trained),
        _span(row.noise),
        _span(row.cosine, "+.3f"),
        "" if row.forwards is None else f"{row.forwards:.0f}",
        "" if row.seconds is None else f"{row.seconds:.2f}",
        "" if row.step_seconds is None else f"{row.step_seconds:.2f}",
        "" if row.peak_memory is None else f"{row.peak_memory / 2**30:.2f}",
    )


def _span(interval: SeedInterval | None, form: str = ".3f") -> str:
    return "" if interval is None else interval.text(form)


def _percent(interval: SeedInterval | None) -> str:
    return "" if interval is None else f"{100 * interval.mean:.1f}"


def _points(found: PairedComparison | None) -> str:
    if found is None:
        return ""
    each = found.difference
    low, high = (None if end is None else 100 * end for end in (each.low, each.high))
    return SeedInterval(100 * each.mean, low, high, each.seeds).text("+.1f")
