"""Figures of several runs: names beside the lines, laid out once, every run to be seen."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from delta_cli.reporting.figures import COLOURS, LINE, WIDER, Drawing, charts
from delta_cli.runs.records import RecordedRun
from tests.reporting import synthetic


def named(path: Path, name: str) -> RecordedRun:
    """A run under another name."""
    run = RecordedRun(path)
    run.name = name
    return run


@pytest.mark.parametrize("count", [1, 7, pytest.param(3, marks=pytest.mark.long)])
def test_names_lie_beside_the_axes(run_path: Path, count: int) -> None:
    """No legend over a line or beyond the figure's edge, however many and long the names; axes keep their height."""
    runs = [named(run_path, f"{place} of a study with a long name") for place in range(count)]
    legends = 0
    for chart in charts(runs):
        figure = Drawing(chart, runs).figure
        (axes,) = figure.axes
        assert axes.get_legend() is None
        for legend in figure.legends:
            legends += 1
            box, drawn = legend.get_window_extent(), axes.get_tightbbox()
            assert drawn is not None
            assert not box.overlaps(drawn), chart.name
            assert figure.bbox.x0 <= box.x0 < box.x1 <= figure.bbox.x1, chart.name
            assert figure.bbox.y0 <= box.y0 < box.y1 <= figure.bbox.y1, chart.name
            assert chart.name == "phases" or axes.get_window_extent().height > 150, chart.name
    assert legends >= (2 if count == 1 else 9)  # one run needs no name over its own lines


def test_runs_that_coincide_stay_visible(run_path: Path, tmp_path: Path) -> None:
    """Six equal runs, one more than there are dashes: the lines show the colours of all."""
    runs = [named(run_path, str(place)) for place in range(6)]
    for chart in charts(runs):
        if chart.name not in ("reward", "accuracy", "length_outcome"):
            continue
        with Image.open(Drawing(chart, runs).write_files(tmp_path)[0]) as image:
            pixels = np.asarray(image.convert("RGB"))[: image.height * 2 // 3]  # without the names below
        for colour in COLOURS[:6]:
            of_run = (pixels == [int(colour[at : at + 2], 16) for at in (1, 3, 5)]).all(axis=2)
            least = 20 if chart.name == "length_outcome" else image.width / 5
            assert of_run.any(axis=0).sum() > least, f"{chart.name}: {colour}"


def test_a_line_is_wider_only_where_others_cover_it(tmp_path: Path) -> None:
    """Two of three runs coincide, to a gap that cannot be seen, in half of their steps."""
    runs = []
    for place, rewards in enumerate(([0.1, 0.2, 0.5, 0.9], [0.1, 0.201, 0.9, 0.1], [0.9, 0.8, 0.7, 0.2])):
        folder, _ = synthetic.start(tmp_path / str(place))
        for step, reward in enumerate(rewards, 1):
            folder.append(folder.metrics, synthetic.metrics(step, reward))
        runs.append(RecordedRun(folder.path))
    (axes,) = Drawing(charts(runs)[0], runs).figure.axes
    assert [line.get_linewidth() for line in axes.get_lines()] == [LINE + WIDER, LINE, LINE]


def test_each_of_several_rewards_has_its_line(tmp_path: Path, run_path: Path) -> None:
    """By name and run, of several runs in the run's colour; a run with a single reward has none of it."""
    shares = {"reward_math": (0.25, 0.5), "reward_style": (-1.0, 2.0)}
    folder, _ = synthetic.start(tmp_path / "several")
    for step in (1, 2):
        own = {name: values[step - 1] for name, values in shares.items()}
        folder.append(folder.metrics, synthetic.metrics(step) | {"reward_failures": 0} | own)
    several, single = RecordedRun(folder.path), RecordedRun(run_path)
    assert "rewards" not in {chart.name for chart in charts([single])}
    cases = (
        ([several], ["math", "style"], COLOURS[:2]),
        ([single, several], ["several, math", "several, style"], [COLOURS[1]] * 2),
    )
    for runs, names, colours in cases:
        (chart,) = (chart for chart in charts(runs) if chart.name == "rewards")
        (axes,) = Drawing(chart, runs).figure.axes
        lines = axes.get_lines()
        assert [line.get_label() for line in lines] == names
        assert [tuple(line.get_ydata()) for line in lines] == list(shares.values())
        assert [line.get_color() for line in lines] == list(colours)
        assert len({line.get_linestyle() for line in lines}) == 2
    (axes,) = Drawing(chart, [several, several]).figure.axes
    assert [line.get_linewidth() for line in axes.get_lines()] == [LINE + WIDER, LINE] * 2  # they coincide
