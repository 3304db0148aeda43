"""Evaluations and comparisons as tables in the paper's layout: benchmarks side by side, the average last."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from delta_cli.evaluation.compare import Comparison, Row
from delta_cli.evaluation.results import Evaluation, Summary
from delta_cli.evaluation.statistics import Estimate


def render(evaluation: Evaluation) -> RenderableType:
    """Percentages with their standard errors; 95 % intervals of avg@k; lengths in tokens."""
    k = evaluation.settings.samples
    columns: list[Summary] = [*evaluation.benchmarks]
    names = [each.name for each in evaluation.benchmarks]
    if len(columns) > 1:
        columns.append(evaluation.average)
        names.append("Avg")
    table = _table(f"{evaluation.label} on {evaluation.suite}", names)
    table.add_row("questions", *(str(each.questions) for each in columns))
    table.add_row(f"avg@{k}", *(_share(each.avg) for each in columns))
    table.add_row("95 % interval", *(_interval(each.avg) for each in columns))
    for n in evaluation.average.passed:
        if n > 1:  # pass@1 is avg@k
            table.add_row(f"pass@{n}", *(_share(each.passed[n]) for each in columns))
    if k > 1 and evaluation.average.maj is not None:
        table.add_row(f"maj@{k}", *(_share(each.maj) for each in columns if each.maj is not None))
    table.add_row("truncated %", *(f"{100 * each.truncated:.1f}" for each in columns))
    table.add_row("mean length", *(f"{each.mean_length:,.0f}" for each in columns))
    settings = evaluation.settings
    how = (
        f"Percent ± standard error over problems; Avg is weighted by questions. {k} samples a problem at temperature "
        f"{settings.temperature:g}, top-p {settings.top_p:g}, at most {settings.max_tokens:,} tokens."
    )
    if evaluation.limit is not None:
        how += f" At most {evaluation.limit} problems of each benchmark."
    return Group(table, Text(how, style="dim"), *_failures(evaluation.average))


def render_comparison(comparison: Comparison) -> RenderableType:
    """avg@k of both, their difference in points with its 95 % interval, and the test in words."""
    rows: list[Row] = [*comparison.benchmarks]
    if len(rows) > 1:
        rows.append(comparison.average)
    table = _table(f"{comparison.first} against {comparison.second} on {comparison.suite}", [row.name for row in rows])
    table.add_row("questions", *(str(row.questions) for row in rows))
    table.add_row(Text(comparison.first), *(_share(row.first) for row in rows))
    table.add_row(Text(comparison.second), *(_share(row.second) for row in rows))
    table.add_row("difference", *(f"{100 * row.difference.mean:+.2f}" for row in rows))
    table.add_row("95 % interval", *(_interval(row.difference, "+") for row in rows))
    how = (
        f"avg@{comparison.settings.samples} in percent ± standard error; difference in points with a paired bootstrap "
        "interval over problems; Avg is weighted by questions."
    )
    if comparison.unshared:
        how += f" {comparison.unshared} problems that only one evaluation has are left out."
    return Group(table, Text(how, style="dim"), Text(comparison.statement))


def _table(title: str, columns: list[str]) -> Table:
    table = Table(title=Text(title), box=None, pad_edge=False, padding=(0, 1), title_justify="left")
    table.add_column("", min_width=13, max_width=24, overflow="fold")  # names of models may be long paths
    for name in columns:
        table.add_column(Text(name.replace(" ", "\n")), justify="right")
    return table


def _share(estimate: Estimate) -> str:
    return f"{100 * estimate.mean:.2f}\n±{100 * estimate.standard_error:.2f}"  # two lines: seven columns fit a terminal


def _interval(estimate: Estimate, sign: str = "") -> str:
    return f"{100 * estimate.low:{sign}.1f} …\n{100 * estimate.high:{sign}.1f}"


def _failures(summary: Summary) -> list[Text]:
    """A line on responses whose grading failed, if any."""
    if not summary.failures:
        return []
    counts = ", ".join(f"{reason}: {count}" for reason, count in summary.failures.items())
    return [Text(f"Grading failed for some responses, which count as wrong ({counts}).", style="yellow")]
