"""Response lengths by outcome, against lengths that the test wrote itself."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from delta_cli.reporting import length_by_outcome
from delta_cli.reporting.figures import Drawing, charts
from delta_cli.reporting.length_by_outcome import lengths_by_outcome
from delta_cli.runs.records import RecordedRun
from tests.reporting import synthetic


def write(path: Path, steps: dict[int, list[tuple[str, bool]]]) -> RecordedRun:
    """A run with these responses; each letter is a token, and the end is one more."""
    folder, tokenizer = synthetic.start(path)
    for step, responses in steps.items():
        folder.write_rollouts(step, [synthetic.record(tokenizer, text, correct=right) for text, right in responses])
        tokens = sum(len(text) + 1 for text, _ in responses)
        folder.append(folder.metrics, synthetic.metrics(step) | {"tokens": tokens})
    return RecordedRun(folder.path)


def test_means_of_each_outcome(tmp_path: Path) -> None:
    """A step without a right response is a gap; the figure's lines show these numbers."""
    run = write(tmp_path, {2: [("a" * 3, True), ("b" * 6, True), ("c" * 9, False)], 5: [("d" * 7, False)]})
    found = lengths_by_outcome(run)
    assert found.steps == [2, 5]
    assert found.right[0] == 5.5
    assert math.isnan(found.right[1])
    assert found.wrong == [10, 8]
    chart = next(chart for chart in charts([run]) if chart.name == "length_outcome")
    figure = Drawing(chart, [run]).figure
    right, wrong = figure.axes[0].get_lines()
    np.testing.assert_array_equal(np.asarray(right.get_ydata()), [5.5, math.nan])
    np.testing.assert_array_equal(np.asarray(wrong.get_ydata()), [10, 8])
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["right", "wrong"]


def test_long_runs_are_sampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three of seven steps, and of each no more responses than its part of the tokens."""
    read = []
    original = length_by_outcome.RecordedRun.responses

    def counted(self: RecordedRun, step: int):  # type: ignore[no-untyped-def]
        for response in original(self, step):
            read.append(len(response))
            yield response

    monkeypatch.setattr(length_by_outcome.RecordedRun, "responses", counted)
    monkeypatch.setattr(length_by_outcome, "READ_TOKENS", 300)
    run = write(tmp_path, {step: [("x" * 24, True), ("y" * 49, False)] * 50 for step in range(1, 8)})
    found = lengths_by_outcome(run)
    assert found.steps == [1, 4, 7]
    assert (found.right, found.wrong) == ([25] * 3, [50] * 3)
    assert sum(read) == 3 * 100


def test_without_recorded_responses_there_is_no_figure(tmp_path: Path) -> None:
    folder, _ = synthetic.start(tmp_path)
    folder.append(folder.metrics, synthetic.metrics(1))
    assert "length_outcome" not in [chart.name for chart in charts([RecordedRun(folder.path)])]
