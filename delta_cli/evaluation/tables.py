"""Evaluations and comparisons as tables in the paper's layout: a column for each benchmark, the average last."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.table import Table
from rich.text import Text

from delta_cli.evaluation.compare import Comparison, ComparisonRow
from delta_cli.evaluation.results import EvaluationResult, KindResult, Summary
from delta_cli.evaluation.saved_results import SavedEvaluation
from delta_cli.evaluation.statistics import Estimate
from delta_cli.text import count, fits, number

CellParts = tuple[str, ...]  # written on one line if there is room, otherwise below each other
LABELS = (24, 14)  # maximal widths of row labels if there is little room


def render(evaluation: EvaluationResult) -> RenderableType:
    """Percentages with their standard errors; 95 % intervals of avg@k; lengths in tokens."""
    settings = evaluation.settings
    k = settings.samples
    columns: list[Summary] = [*evaluation.benchmarks]
    names = [each.name for each in evaluation.benchmarks]
    if len(columns) > 1:
        columns.append(evaluation.average)
        names.append("Avg")
    rows: list[tuple[str, list[CellParts]]] = [
        ("questions", [(str(each.questions),) for each in columns]),
        (f"avg@{k}", [_share(each.avg) for each in columns]),
        ("95 % interval", [_interval(each.avg) for each in columns]),
    ]
    above = [n for n in evaluation.average.passed if n > 1]  # pass@1 is avg@k
    rows += [(f"pass@{n}", [_share(each.passed[n]) for each in columns]) for n in above]
    if k > 1 and evaluation.average.maj is not None:
        rows.append((f"maj@{k}", [_share(each.maj) for each in columns if each.maj is not None]))
    rows.append(("truncated %", [(f"{100 * each.truncated:.1f}",) for each in columns]))
    for name in ("turns", "calls"):
        means = [getattr(each, name) for each in columns]
        if any(mean is not None for mean in means):
            rows.append((f"{name} of an episode", [(number(mean),) for mean in means]))
    rows.append(("mean length", [(f"{each.mean_length:,.0f}",) for each in columns]))
    how = (
        f"Percent ± standard error over problems{_weighted(columns)}. {count(k, 'sample')} a problem at temperature "
        f"{settings.temperature:g}, {settings.truncation}, at most {settings.max_tokens:,} tokens."
    )
    if evaluation.limit is not None:
        how += f" At most {count(evaluation.limit, 'problem')} of each benchmark."
    title = Text(f"{evaluation.label} on {evaluation.suite}", style="italic")
    kinds = [_kinds(each.kinds) for each in evaluation.benchmarks if each.kinds]
    return Group(title, SideBySide(names, rows), *kinds, Text(how, style="dim"), *_failures(evaluation.average))


def _kinds(kinds: Mapping[str, KindResult]) -> Table:
    """Accuracy and length by kind of problem."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("kind of problem", "questions", "right, %", "mean length"):
        table.add_column(column, justify="left" if column == "kind of problem" else "right")
    for kind, each in kinds.items():
        table.add_row(kind, str(each.questions), f"{100 * each.accuracy:.1f}", f"{each.mean_length:,.0f}")
    return table


def render_comparison(comparison: Comparison) -> RenderableType:
    """avg@k of both, the gain of the second in points with its 95 % interval, and the test in words."""
    columns: list[ComparisonRow] = [*comparison.benchmarks]
    if len(columns) > 1:
        columns.append(comparison.average)
    rows: list[tuple[str, list[CellParts]]] = [
        ("questions", [(str(row.questions),) for row in columns]),
        (comparison.before, [_share(row.before) for row in columns]),
        (comparison.after, [_share(row.after) for row in columns]),
        ("after − before", [(_points(row.difference.mean, 2),) for row in columns]),
        ("95 % interval", [_interval(row.difference, signed=True) for row in columns]),
    ]
    how = (
        f"avg@{comparison.settings.samples} in percent ± standard error; the difference in points with a paired "
        f"bootstrap interval over problems{_weighted(columns)}."
    )
    if comparison.unshared:
        how += f" Left out: {count(comparison.unshared, 'problem')} in only one of the evaluations."
    title = Text(f"{comparison.after} against {comparison.before}, on {comparison.suite}", style="italic")
    table = SideBySide([row.name for row in columns], rows)
    return Group(title, table, Text(how, style="dim"), Text(comparison.statement))


def render_evaluations(found: Sequence[SavedEvaluation]) -> RenderableType:
    """A line for each evaluation of a run or a model."""
    table = Table(box=None, pad_edge=False, padding=(0, 1))
    for name in ("step", "avg@k %", "k"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("evaluation", overflow="fold")
    for each in found:
        made = each.evaluation
        step = "" if made.step is None else str(made.step)
        mean = f"{100 * made.average.avg.mean:.2f} ±{100 * made.average.avg.standard_error:.2f}"
        table.add_row(step, mean, str(made.settings.samples), Text(str(each.path)))
    return table


@dataclass(frozen=True)
class SideBySide:
    """A column for each benchmark: cells on one line if there is room, otherwise on two, otherwise several tables."""

    names: Sequence[str]
    rows: Sequence[tuple[str, Sequence[CellParts]]]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        """The widest layout that fits."""
        wide = self._table(0, len(self.names), " ", None)
        if fits(wide, console, options):
            yield wide
            return
        for size in range(len(self.names), 0, -1):
            for label in LABELS:
                if size == 1 or fits(self._table(0, size, "\n", label), console, options):
                    starts = range(0, len(self.names), size)
                    yield from (self._table(start, start + size, "\n", label) for start in starts)
                    return

    def _table(self, start: int, end: int, joint: str, label: int | None) -> Table:
        table = Table(box=None, pad_edge=False, padding=(0, 1))
        table.add_column("", min_width=13, max_width=label, overflow="fold")
        for name in self.names[start:end]:
            table.add_column(Text(name.replace(" ", joint)), justify="right", no_wrap=joint == " ")
        for name, cells in self.rows:
            table.add_row(Text(name), *(joint.join(cell) for cell in cells[start:end]))
        return table


def _weighted(columns: Sequence[object]) -> str:
    return "; Avg is weighted by questions" if len(columns) > 1 else ""


def _share(estimate: Estimate) -> CellParts:
    return f"{100 * estimate.mean:.2f}", f"±{100 * estimate.standard_error:.2f}"


def _points(share: float, digits: int) -> str:
    return f"{100 * share:+.{digits}f}".replace("-", "−")


def _interval(estimate: Estimate, signed: bool = False) -> CellParts:
    if signed:
        return f"{_points(estimate.low, 1)} …", _points(estimate.high, 1)
    return f"{100 * estimate.low:.1f} …", f"{100 * estimate.high:.1f}"


def _failures(summary: Summary) -> list[Text]:
    """A line about responses whose grading failed, if there are any."""
    if not summary.failures:
        return []
    counts = ", ".join(f"{reason}: {number}" for reason, number in summary.failures.items())
    return [Text(f"Grading failed for some responses, which count as wrong ({counts}).", style="yellow")]
