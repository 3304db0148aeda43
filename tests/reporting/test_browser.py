"""The pages in a real browser, where there is one: elements found, colours seen, nothing overlapping or cut off."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from delta_cli.reporting import report
from delta_cli.reporting.figures import charts
from delta_cli.reporting.html_pages import inspection_page
from delta_cli.reporting.inspection import inspect_run
from delta_cli.reporting.report import write_report
from delta_cli.runs.records import RecordedRun
from tests.reporting import synthetic
from tests.reporting.browser import CHROMIUM, measure, screenshot

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium")


def colours(picture: Path) -> set[tuple[int, ...]]:
    """The colours of a screenshot."""
    from PIL import Image

    with Image.open(picture) as image:
        pixels = np.asarray(image.convert("RGB")).reshape(-1, 3)
    return {tuple(map(int, colour)) for colour in np.unique(pixels, axis=0)}


@pytest.fixture(scope="module")
def inspected(run_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of an inspection."""
    page = tmp_path_factory.mktemp("inspected") / "inspect.html"
    page.write_text(inspection_page(inspect_run(run_path)), encoding="utf-8")
    return page


@pytest.fixture(scope="module")
def reported(run_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a report."""
    page = tmp_path_factory.mktemp("reported") / "report.html"
    write_report([run_path], page)
    return page


@pytest.mark.parametrize("width", [360, pytest.param(1280, marks=pytest.mark.long)])
def test_inspection(inspected: Path, tmp_path: Path, width: int) -> None:
    """Three different responses beside each other or below, every token with a value to hover."""
    found = measure(inspected, tmp_path, width)
    assert found["cards"] == 3
    assert found["titles"] == found["tokens"] > 30
    assert found["overflow"] <= 0
    assert not found["overlapping"]
    assert found["amplified"] != found["damped"]
    assert found["beside"]
    assert found["tables"] == 6
    assert not found["wide"]


@pytest.mark.long
def test_the_heatmap_is_orange_and_blue(inspected: Path, tmp_path: Path) -> None:
    """Strong colours of both kinds are on the screen."""
    screenshot(inspected, tmp_path / "inspect.png")
    seen = colours(tmp_path / "inspect.png")
    assert any(red > 230 and blue < 120 for red, _, blue in seen)
    assert any(blue > 230 and red < 130 for red, _, blue in seen)


@pytest.mark.long
def test_tables_fit_a_telephone(run_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three runs, long names and values: nothing has to be moved sideways; amplified and damped are side by side."""
    runs = [synthetic.run(tmp_path / f"run-{place}-with-a-rather-long-name", steps=2) for place in range(2)]
    text = runs[0].recipe.read_text(encoding="utf-8").replace('"tiny-base"', f'"{"organisation/" * 6}model"')
    runs[0].recipe.write_text(text, encoding="utf-8")
    assert "organisation/" in text
    page = tmp_path / "report.html"
    monkeypatch.setattr(report, "charts", lambda runs: charts(runs)[:1])  # the tables are looked at here
    write_report([run_path, *(run.path for run in runs)], page)
    found = measure(page, tmp_path, 360)
    assert found["tables"] > 40
    assert not found["wide"]
    assert found["overflow"] <= 0
    assert found["beside"]


@pytest.mark.long
@pytest.mark.parametrize("dark", [False, True])
def test_figures_follow_the_theme(reported: Path, tmp_path: Path, dark: bool) -> None:
    """A dark page has light letters and axes, a light one dark ones, and its figures as well."""
    page, picture = tmp_path / "report.html", tmp_path / "report.png"
    alone = reported.read_text(encoding="utf-8").replace(
        "</style>", "main > :not(.cards), figcaption { display: none }</style>"
    )
    page.write_text(alone, encoding="utf-8")
    screenshot(page, picture, dark=dark)
    brightness = {sum(colour) / 3 for colour in colours(picture)}
    assert (min(brightness) > 15) if dark else (max(brightness) == 255)
    assert (max(brightness) > 225) if dark else (min(brightness) < 30)


def test_report(reported: Path, run_path: Path, tmp_path: Path) -> None:
    """Every figure has a size, the heatmaps are there, the page does not scroll sideways."""
    found = measure(reported, tmp_path)
    drawn = [chart.name for chart in charts([RecordedRun(run_path)])]
    assert {"reward", "coefficients_1", "words_1", "phases"} <= set(drawn)
    assert found["figures"] == len(drawn)
    assert found["cards"] == 9
    assert found["overflow"] <= 0
    assert not found["overlapping"]
