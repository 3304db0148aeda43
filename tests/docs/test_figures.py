"""Measured numbers in the pages are those of benchmarks/results."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from .documents import ROOT

PROGRAM = runpy.run_path(str(ROOT / "docs" / "figures"))
FIGURES: dict[str, str] = PROGRAM["FIGURES"]


@pytest.mark.parametrize("page", PROGRAM["PAGES"], ids=lambda page: page.name)
def test_a_pages_figures_are_those_of_the_results(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert PROGRAM["filled"](text) == text, f"run: python docs/figures, then look at {page.name}"


def test_every_figure_is_on_a_page() -> None:
    shown = {mark["name"] for page in PROGRAM["PAGES"] for mark in PROGRAM["MARK"].finditer(page.read_text("utf-8"))}
    assert set(FIGURES) == shown


def test_figures_computed_by_hand() -> None:
    assert FIGURES["step.speedup"] == "2.9"  # 10.1227 s of TRL's over 3.6188 s of ours: the median of five rounds
    assert FIGURES["real.memory"] == "0.28"  # 4,805,877,760 of 17,355,538,432 bytes
    assert FIGURES["quickstart.before"] == "36 to 39"  # 0.36 to 0.392 in five rows
    assert "| delta | 83.7 [82.4, 84.9] |  | 66.1 [65.6, 66.6] |  | 26 (7 of 8" in FIGURES["study_quickstart.table"]
    assert "| DelTA | 0.992 ± 0.004 | 0.908 ± 0.154 |" in FIGURES["mistakes.table"]  # as in mistakes.txt


@pytest.mark.parametrize("text", ["2.9", "", "a\nb"])
def test_another_number_is_replaced(text: str) -> None:
    page = "x <!--step.speedup-->{}<!--/--> times, <!--real.memory-->0.28<!--/-->\n"
    assert PROGRAM["filled"](page.format(text)) == page.format(FIGURES["step.speedup"])


def test_marks_that_show_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match=r"docs/figures has no step\.speedups"):
        PROGRAM["filled"]("x <!--step.speedups-->2.9<!--/-->")
    with pytest.raises(ValueError, match="must not begin with a figure"):
        PROGRAM["filled"]("it is\n<!--step.speedup-->2.9<!--/--> times as fast")
