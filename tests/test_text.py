"""What a person reads: text that cannot steer the terminal, and numbers of a known form."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from delta_cli.text import duration, evaluation_line, memory, number, sparkline, tail, visible


@given(st.text(st.characters(codec=None)))
def test_no_character_that_steers_a_terminal_is_left(text: str) -> None:
    """Control, format and surrogate characters are all written out, so the result can be encoded and printed."""
    shown = visible(text)
    assert not {unicodedata.category(char) for char in shown} & {"Cc", "Cf", "Cs", "Zl", "Zp"}
    shown.encode("utf-8")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\x1b[31mb", r"a\x1b[31mb"),
        ("a\nb", "a↵b"),
        ("a\rb", r"a\rb"),
        ("\u202eabc", r"\u202eabc"),
        ("½ 漢字", "½ 漢字"),
    ],
)
def test_visible_by_example(text: str, shown: str) -> None:
    """Escapes are Python's own; letters and spaces of any script stay."""
    assert visible(text) == shown


@given(st.text(max_size=60), st.integers(2, 30))
def test_tail_fits(text: str, cells: int) -> None:
    """Never wider than asked, and the end of the text is kept."""
    kept = tail(text, cells)
    assert cell_len(kept) <= cells
    assert text.endswith(kept.removeprefix("…"))


def test_sparkline_scale() -> None:
    """The least value is the lowest block, the greatest the highest, and a long history is averaged."""
    assert sparkline([0, 1], 10) == "▁█"
    assert sparkline([0.5], 10, 0, 1) == "▅"
    assert sparkline([0, 0, 1, 1], 2) == "▁█"
    assert sparkline([float("nan")], 4) == ""
    assert sparkline([-5.0, 9.0], 4, 0, 1) == "▁█"


@pytest.mark.parametrize(
    ("value", "shown"),
    [(None, "–"), (0.41234, "0.412"), (31.24, "31.2"), (6213.4, "6,213"), (0.0, "0.00"), (1e-5, "1e-05"), (12, "12")],
)
def test_numbers(value: float | None, shown: str) -> None:
    """Three significant digits."""
    assert number(value) == shown


def test_units() -> None:
    """Bytes and seconds in the unit a person would choose."""
    assert memory(812_345_678) == "812 MB"
    assert memory(1_500_000_000) == "1.5 GB"
    assert duration(59.6) == "1:00"
    assert duration(3725) == "1:02:05"


def test_an_evaluation_in_words() -> None:
    record = {"step": 4, "accuracy": 0.5, "low": 0.25, "high": 0.75, "problems": 8}
    line = "held-out accuracy after step 4: 50.0% (25.0% to 75.0%) on 8 problems"
    assert evaluation_line(record) == line
    assert evaluation_line(record | {"kinds": {"gain": 0.875, "loss": 0.0}}) == f"{line}: gain 88%, loss 0%"
