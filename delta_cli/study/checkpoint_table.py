"""The checkpoints that a study chose and measured: a table like the paper's, with its numbers beside ours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Group, RenderableType

from backends.arrays import Doubles
from delta_cli.evaluation.results import EvaluationResult
from delta_cli.evaluation.statistics import RankTest, mann_whitney
from delta_cli.study.plan import Study
from delta_cli.study.render import p_value
from delta_cli.study.runner import study_runs
from delta_cli.study.summary import SeedInterval, over_seeds
from delta_cli.study.wrapped_table import WrappedTable
from delta_cli.text import count

AVERAGE = "Avg"


@dataclass(frozen=True)
class MeasuredRun:
    """One run at the step that was chosen."""

    arm: str
    seed: int
    step: int
    evaluation: EvaluationResult

    def scores(self) -> dict[str, float]:
        """Percent by column: the benchmarks and, if there are several, their average weighted by questions."""
        found = {each.name: 100 * each.avg.mean for each in self.evaluation.benchmarks}
        if len(found) > 1:
            found[AVERAGE] = 100 * self.evaluation.average.avg.mean
        return found


@dataclass(frozen=True)
class MeasuredArm:
    """One row of the table."""

    arm: str
    steps: tuple[int, ...]  # that were chosen, by seed
    scores: dict[str, SeedInterval]  # percent, by column
    test: RankTest | None  # that the arm it is tested against scores higher on the whole suite


def measured(study: Study, out: Path) -> list[MeasuredRun]:
    """Every run that was measured."""
    found = []
    for run in study_runs(study, out):
        evaluation = run.evaluation(study)
        if evaluation is not None:
            assert evaluation.step is not None
            found.append(MeasuredRun(run.arm.name, run.seed, evaluation.step, evaluation))
    return found


def measured_arms(study: Study, found: Sequence[MeasuredRun]) -> list[MeasuredArm]:
    """A row for each arm with a measured run, in the order of the study."""
    rows = []
    for arm in study.arms:
        own = [each for each in found if each.arm == arm.name]
        other = [each for each in found if each.arm == study.against(arm)]
        if own:
            columns = list(own[0].scores())
            rows.append(
                MeasuredArm(
                    arm=arm.name,
                    steps=tuple(each.step for each in own),
                    scores={column: over_seeds([each.scores()[column] for each in own]) for column in columns},
                    test=mann_whitney(_scores(other), _scores(own)) if other else None,
                )
            )
    return rows


def _scores(runs: Sequence[MeasuredRun]) -> Doubles:
    """What is ranked: of one run the suite's repeated scores, as in the paper; of several runs their averages."""
    if len(runs) == 1:
        return np.array(runs[0].evaluation.suite_scores)
    return np.array([each.evaluation.average.avg.mean for each in runs])


def measured_table(study: Study, rows: Sequence[MeasuredArm]) -> RenderableType:
    """Our numbers with the paper's below each if they measure the same, otherwise the paper's table after ours."""
    columns = list(rows[0].scores) if rows else []
    beside = study.paper is not None and not study.scale
    lines = []
    for row in rows:
        steps = ", ".join(map(str, row.steps))
        lines.append([row.arm, steps, *(_cell(row.scores[column]) for column in columns), p_value(row.test)])
        if beside and study.paper is not None and row.arm in study.paper.rows:
            published = dict(zip(study.paper.columns, study.paper.rows[row.arm], strict=True))
            lines.append(["  paper", "", *(_number(published.get(column)) for column in columns), ""])
    ours = _table(study.heading, ["step", *columns, "p"], lines, _caption(study, rows))
    if beside or study.paper is None:
        return ours
    lines = [[name, *map(_number, numbers)] for name, numbers in study.paper.rows.items()]
    title = "\nThe paper's own numbers, for other models and benchmarks:"
    return Group(ours, _table(title, study.paper.columns, lines))


def _table(title: str, columns: Sequence[str], lines: Sequence[Sequence[str]], caption: str = "") -> WrappedTable:
    """A table of lines that each begin with an arm."""
    headings = ["arm", *(column.replace(" ", "\n") for column in columns)]
    first, *others = ((heading, *cells) for heading, cells in zip(headings, zip(*lines, strict=True), strict=True))
    return WrappedTable(title, first, [(column,) for column in others], caption, box=None)


def _caption(study: Study, rows: Sequence[MeasuredArm]) -> str:
    assert study.measure is not None
    seeds = max((len(row.steps) for row in rows), default=0)
    interval = "mean over seeds [95 % interval, Student's t]" if seeds > 1 else ""
    ranked = "the runs' averages" if seeds > 1 else "the suite's repeated scores"
    parts = ("percent", f"{study.measure.checkpoint} checkpoint", count(seeds, "seed"))
    test = study.test_note(f"one-sided Mann-Whitney U over {ranked}")
    return "; ".join(filter(None, (", ".join(parts), interval, test)))


def _cell(value: SeedInterval) -> str:
    return value.text(".2f") if value.low is None else f"{value.mean:.2f} [{value.low:.1f}, {value.high:.1f}]"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
