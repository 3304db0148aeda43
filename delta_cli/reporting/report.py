"""``delta report``: one or several runs on one HTML page that loads nothing from a network."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup

from delta_cli import __version__
from delta_cli.evaluation.results import FILE, EvaluationResult
from delta_cli.recipe.keys import flattened
from delta_cli.reporting.coefficient_statistics import CoefficientStatistics
from delta_cli.reporting.figures import Chart, Drawing, charts, phase_means
from delta_cli.reporting.html_pages import environment
from delta_cli.reporting.inspection import Inspection, Variant, build, most_mixed
from delta_cli.runs.folder import writing
from delta_cli.runs.metrics import METRICS
from delta_cli.runs.records import RecordedResponse, RecordedRun

PAGE_TOKENS = 24_000  # in all heatmaps of the page
RESPONSE_TOKENS = 4_000  # of one response
READ_TOKENS = 400_000  # read of a step before a prompt is chosen for its heatmap
REMEDY = "choose another place"  # for a file that cannot be written
RESPONSES = 4  # different ones in a heatmap, half of them right if possible


@dataclass(frozen=True)
class Heatmap:
    """The responses to one prompt that the report shows."""

    inspection: Inspection
    shown: list[Variant]


@dataclass(frozen=True)
class RunView:
    """What the report shows of a run."""

    run: RecordedRun
    heatmaps: list[Heatmap]
    evaluations: list[EvaluationResult]  # of delta eval
    phases: dict[str, float]

    @property
    def last(self) -> Mapping[str, Any]:
        """The metrics of its last step; empty before the first one."""
        return self.run.metrics[-1] if self.run.metrics else {}

    @property
    def seconds(self) -> float:
        """Total time of its steps."""
        return float(sum(record.get("seconds", 0.0) for record in self.run.metrics))

    @property
    def tokens(self) -> int:
        """Response tokens over all its steps."""
        return sum(record.get("tokens", 0) for record in self.run.metrics)

    @property
    def steps(self) -> int:
        """How many steps its recipe sets."""
        return int(self.run.recipe.get("run", {}).get("steps", 0))


def write_report(
    runs: Sequence[Path], output: Path, figures: Path | None = None, reload: int | None = None
) -> list[Path]:
    """Write the report to ``output`` and, with ``figures``, every chart as PNG and SVG into that folder.

    A browser loads the page again every ``reload`` seconds.
    Returns the files written. Raises UserError if a run does not exist or a file cannot be written.
    """
    opened = [RecordedRun(path) for path in runs]
    _make_names_unique(opened)
    for folder in filter(None, (output.parent, figures)):
        with writing(folder, remedy=REMEDY):
            folder.mkdir(parents=True, exist_ok=True)  # fails before anything is drawn
    drawn = [(chart, Drawing(chart, opened)) for chart in charts(opened)]
    page = _page(opened, drawn, reload)
    with writing(output, remedy=REMEDY):
        output.write_text(page, encoding="utf-8")
        files = [drawing.write_files(figures) for _, drawing in drawn] if figures is not None else []
    return [output, *(file for both in files for file in both)]


def _page(runs: Sequence[RecordedRun], drawn: Sequence[tuple[Chart, Drawing]], reload: int | None = None) -> str:
    return (
        environment()
        .get_template("report.html.jinja")
        .render(
            views=[_view(run, PAGE_TOKENS // len(runs)) for run in runs],
            charts=[(chart, Markup(drawing.svg())) for chart, drawing in drawn],
            steps=sorted({record["step"] for run in runs for record in run.evaluations}),
            differing=differing(runs),
            metrics=METRICS,
            reload=reload,
            made=f"{datetime.now():%Y-%m-%d %H:%M}, delta {__version__}",
        )
    )


def differing(runs: Sequence[RecordedRun]) -> dict[str, list[Any]]:
    """The recipe keys in which the runs differ, with the value in each run."""
    flat = [dict(flattened(run.recipe)) for run in runs]
    names = dict.fromkeys(name for recipe in flat for name in recipe)
    values = {name: [recipe.get(name) for recipe in flat] for name in names}
    return {name: each for name, each in values.items() if any(value != each[0] for value in each)}


def _make_names_unique(runs: Sequence[RecordedRun]) -> None:
    """Rename runs whose folders have the same name to their paths below the common parent folder."""
    names = [run.name for run in runs]
    common = os.path.commonpath([run.path.resolve().parent for run in runs])
    for run in runs:
        if names.count(run.name) > 1:
            run.name = str(run.path.resolve().relative_to(common))


def _view(run: RecordedRun, budget: int) -> RunView:
    steps = run.steps
    chosen = sorted({steps[0], steps[len(steps) // 2], steps[-1]}) if steps else []
    heatmaps = [heatmap for step in chosen if (heatmap := _heatmap(run, step, budget // len(chosen)))]
    found = sorted((run.path / "evaluations").glob(f"*/{FILE}"))
    return RunView(run, heatmaps, [EvaluationResult.read(file) for file in found], phase_means(run))


def _heatmap(run: RecordedRun, step: int, budget: int) -> Heatmap | None:
    """A prompt of the step with right and wrong responses, as many as fit into ``budget`` tokens."""
    statistics = CoefficientStatistics()
    groups = []
    tokens = 0
    for _, responses in groupby(run.responses(step), key=lambda response: response.group):
        groups.append(list(responses))
        for response in groups[-1]:
            statistics.add(response)
            tokens += len(response)
        if tokens > READ_TOKENS:
            break
    if not groups:
        return None
    group = [_cut(response) for response in most_mixed(groups)]
    others = tuple(each[0].problem for each in groups)
    inspection = build(run, step, group, others, statistics.table(run.tokenizer), f"step {step}")
    return Heatmap(inspection, _chosen(inspection, budget))


def _cut(response: RecordedResponse) -> RecordedResponse:
    """The response, or the beginning of one that is too long for a page."""
    stop = RESPONSE_TOKENS
    if len(response) <= stop:
        return response
    region, own = response.region, response.own
    if region is not None and own is not None:
        end = int(np.flatnonzero(own)[stop])
        region, own = region[:end], own[:end]
    return dataclasses.replace(
        response,
        region=region,
        own=own,
        tokens=response.tokens[:stop],
        coefficients=response.coefficients[:stop],
        logprobs=response.logprobs[:stop],
        entropies=response.entropies[:stop],
    )


def _chosen(inspection: Inspection, budget: int) -> list[Variant]:
    """Right and wrong variants in turn, until there are RESPONSES of them or ``budget`` tokens."""
    right = [variant for variant in inspection.variants if variant[0].response.correct]
    wrong = [variant for variant in inspection.variants if not variant[0].response.correct]
    kept: list[Variant] = []
    while (right or wrong) and len(kept) < RESPONSES and budget > 0:
        side = right if right and (len(kept) % 2 == 0 or not wrong) else wrong
        kept.append(side.pop(0))
        budget -= len(kept[-1][0].response)
    return kept
