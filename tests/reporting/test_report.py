"""``delta report``: one file that opens offline, for one run or several, finished or not."""

from __future__ import annotations

import os
import re
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from matplotlib.layout_engine import ConstrainedLayoutEngine

from delta_cli.errors import UserError
from delta_cli.recipe import parse_recipe, to_toml
from delta_cli.reporting import report
from delta_cli.reporting.coefficient_statistics import TokenCredit
from delta_cli.reporting.figures import COLOURS, LONGEST_NAME, Chart, Drawing, charts
from delta_cli.reporting.report import differing, write_report
from delta_cli.reporting.token_cloud import TokenCloud, cloud, drawing
from delta_cli.runs.records import RecordedRun
from tests.reporting import synthetic
from tests.reporting.test_inspection import Seen, hostile_path  # noqa: F401 (a fixture)


def test_one_run(run_path: Path, tmp_path: Path) -> None:
    """Everything the page promises is on it, and it fetches nothing."""
    output = tmp_path / "deep" / "report.html"
    assert write_report([run_path], output) == [output]
    page = output.read_text(encoding="utf-8")
    seen = Seen(page)
    lines = ("reward", "accuracy", "length", "length_outcome", "entropy", "clip_fraction")
    for name in (*lines, "coefficients_1", "words_1", "phases"):
        assert f'id="figure-{name}"' in page
    for text in (
        "40.0% → 40.0%",
        "Where the responses branch",
        "does not hold: ",
        "mean reward of the batch's responses",
    ):
        assert text in seen.text
    assert "script" not in seen.tags
    assert seen.fetched == [ref for ref in seen.fetched if ref.startswith("#")]
    assert seen.tags.count("svg") == 12


def test_several_runs_are_overlaid(run_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each run in the legend, the differing recipe keys in a table, figures as PNG and SVG; equal names told apart."""
    layouts = []
    execute = ConstrainedLayoutEngine.execute
    monkeypatch.setattr(ConstrainedLayoutEngine, "execute", lambda self, fig: (layouts.append(fig), execute(self, fig)))
    other = synthetic.run(tmp_path / "small", steps=2)
    text = other.recipe.read_text(encoding="utf-8").replace("seed = 0", "seed = 7")
    other.recipe.write_text(text, encoding="utf-8")
    figures = tmp_path / "figures"
    written = write_report([run_path, other.path], tmp_path / "report.html", figures)
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    own = str(other.path.relative_to(os.path.commonpath([run_path, other.path])))
    shown = own if len(own) <= LONGEST_NAME else f"…{own[1 - LONGEST_NAME :]}"
    assert page.count(f">{shown}</text>") >= 8
    assert {file.suffix for file in written} == {".html", ".png", ".svg"}
    assert all(file.stat().st_size > 1000 for file in written)
    assert (figures / "reward.png").read_bytes().startswith(b"\x89PNG")
    # One layout for the page and both files together: it takes longer than the drawing.
    assert len(layouts) == (len(written) - 1) / 2 == len(set(layouts))
    runs = [RecordedRun(run_path), RecordedRun(other.path)]
    assert differing(runs) == {"run.seed": [0, 7]}


def test_recipes_with_several_rewards_differ_by_their_names(tmp_path: Path) -> None:
    runs = []
    for weight in (0.25, 0.5):
        folder, _ = synthetic.start(tmp_path / str(weight))
        recipe = {"reward": [{"kind": "math"}, {"kind": "custom", "name": "style", "custom_file": "s.py"}]}
        recipe["reward"][1]["weight"] = weight  # type: ignore[assignment]
        folder.recipe.write_text(to_toml(parse_recipe(recipe, "it")), encoding="utf-8")
        runs.append(RecordedRun(folder.path))
    assert differing(runs) == {"reward.style.weight": [0.25, 0.5]}


def test_hostile_names_and_text(hostile_path: Path, tmp_path: Path) -> None:  # noqa: F811
    """A run's name is neither formula nor markup, in the page as in the drawings."""
    write_report([hostile_path, hostile_path], tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    seen = Seen(page)
    assert "script" not in seen.tags
    assert "hostile $x^2$ <b>" in seen.text
    drawings = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    assert len(drawings) > 8
    for each in drawings:
        ElementTree.fromstring(each)


def test_a_run_before_its_first_step(tmp_path: Path) -> None:
    """Nothing to show is no reason to fail."""
    synthetic.start(tmp_path / "run")
    write_report([tmp_path / "run"], tmp_path / "report.html")
    assert "recorded no responses" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_values_that_are_missing_or_not_finite(tmp_path: Path) -> None:
    """A method without coefficients, a loss that is no number: gaps in a line, not an error."""
    folder = synthetic.run(tmp_path / "run", steps=2)
    record = synthetic.metrics(3) | {"reward_mean": float("nan"), "coefficient_p50": None, "grad_norm": float("inf")}
    folder.append(folder.metrics, record)
    write_report([folder.path], tmp_path / "report.html")


def test_where_nothing_can_be_written(run_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line that names the place, before anything is drawn."""
    monkeypatch.setattr(report, "charts", None)
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(UserError, match=r"cannot be written .* choose another place"):
        write_report([run_path], tmp_path / "file" / "report.html")


def test_a_long_run_is_quick_and_small(tmp_path: Path) -> None:
    """Sixty steps of 64 responses."""
    folder = synthetic.run(tmp_path / "run", steps=60, groups=8, samples=8)
    start = time.process_time()
    write_report([folder.path], tmp_path / "report.html")
    assert time.process_time() - start < 12
    assert (tmp_path / "report.html").stat().st_size < 2_000_000


def test_the_cloud_has_the_tokens_furthest_from_1_the_furthest_largest(tmp_path: Path) -> None:
    folder, tokenizer = synthetic.start(tmp_path / "run")
    lines = []
    for _ in range(6):  # often enough for a mean: x at 1.5, y at 1.2, z at 0.9, w at 0.5, the end at 1
        weights = {"x": 1.5, "y": 1.2, "z": 0.9, "w": 0.5}
        coefficients = [*weights.values(), 1.0]
        lines.append(synthetic.record(tokenizer, "xyzw", correct=True, coefficients=coefficients))
    folder.write_rollouts(1, lines)
    folder.append(folder.metrics, synthetic.metrics(1))
    found = cloud(RecordedRun(folder.path))
    assert found is not None
    assert [(each.text, each.mean) for each in found.amplified] == [("x", 1.5), ("y", 1.2)]
    assert [(each.text, each.mean) for each in found.damped] == [("w", 0.5), ("z", 0.9)]
    run = RecordedRun(folder.path)
    drawn = {each.name: each for each in charts([run])}["words_1"]
    page = ElementTree.fromstring(Drawing(drawn, [run]).svg())
    texts = {node.text: node.get("style", "") for node in page.iter() if node.text}
    sizes = {name[0]: float(re.search(r"([\d.]+)px", style)[1]) for name, style in texts.items() if name[1:] == "⁺"}  # type: ignore[index]
    assert sizes["x"] == sizes["w"] > sizes["y"] > sizes["z"]


def test_the_clouds_halves_stand_side_by_side_whatever_their_words(tmp_path: Path) -> None:
    """Long words and short ones: no word in the other half, over another, or beyond the figure."""
    run = RecordedRun(synthetic.start(tmp_path / "run")[0].path)
    for length in (1, 17, 40):
        halves = (
            tuple(
                TokenCredit(place, f"{place:a<{length}}", "words", "+", 9, 1 + sign * (0.9 - place / 30))
                for place in range(24)
            )
            for sign in (1, -1)
        )
        draw = drawing(TokenCloud(1, *halves), (COLOURS[1], COLOURS[0]))
        figure = Drawing(Chart("words_1", "Tokens", "", draw, 2.9), [run]).figure
        (axes,) = figure.axes
        texts = axes.texts
        boxes = {text.get_text(): text.get_window_extent() for text in texts if text.get_color() in COLOURS}
        middle = figure.bbox.width / 2
        for text in texts:
            box = text.get_window_extent()
            other = text.get_color() == COLOURS[0] or text.get_text().startswith("damped")
            assert box.x0 >= middle if other else box.x1 <= middle, text.get_text()
            assert figure.bbox.y0 <= box.y0 < box.y1 <= figure.bbox.y1
            assert box.x1 <= figure.bbox.x1
        inner = [text.get_window_extent().shrunk(0.98, 0.6) for text in texts]
        assert not any(one.overlaps(other) for i, one in enumerate(inner) for other in inner[:i])
        assert len(boxes) > 5


def test_without_coefficients_there_is_no_cloud(tmp_path: Path) -> None:
    folder, tokenizer = synthetic.start(tmp_path / "run")
    folder.write_rollouts(1, [synthetic.record(tokenizer, "xyzw", correct=True, coefficients=[1.0] * 5)])
    assert cloud(RecordedRun(folder.path)) is None
