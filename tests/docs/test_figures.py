"""Figures in the README are those of benchmarks/results: each sentence that cites a result is read with it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
README = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
Record = dict[str, Any]


def result(name: str) -> Record:
    loaded: Record = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return loaded


def cited(pattern: str) -> tuple[str, ...]:
    """The figures of the one sentence in the README that the pattern describes."""
    found = re.findall(pattern, README)
    assert len(found) == 1, f"the README has {len(found)} sentences like {pattern}"
    return (found[0],) if isinstance(found[0], str) else found[0]


def speedup(name: str) -> float:
    """How much faster a step is than TRL's, as it is by default where that was measured."""
    results = result(name)["results"]
    return float(results["TRL"]["step"] / results.get("delta, as drawn", results["delta"])["step"])


@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        ("step", r"\[([\d.]+) times as fast\]\(benchmarks/results/step\.json\)"),
        ("step_equal", r"\[([\d.]+) times\]\(benchmarks/results/step_equal\.json\)"),
        ("step_vocabulary", r"\[([\d.]+) times, in half the memory\]\(benchmarks/results/step_vocabulary\.json\)"),
    ],
)
def test_speeds_are_those_measured(name: str, pattern: str) -> None:
    (said,) = cited(pattern)
    assert f"{speedup(name):.1f}" == said


def test_half_the_memory_is_at_most_half() -> None:
    results = result("step_vocabulary")["results"]
    own, trl = (results[side]["memory"] for side in ("delta", "TRL"))
    assert own["peak"] - own["imports"] <= 0.5 * (trl["peak"] - trl["imports"])


def test_what_a_real_language_model_learns_is_as_measured() -> None:
    before = cited(r"three seeds from (\d+) to (\d+) % of held-out")
    after = cited(r"\[(\d+) to (\d+) %, after (\d+) to (\d+) minutes\]\(benchmarks/results/real_seeds\.json\)")
    (memory,) = cited(r"of training, in ([\d.]+) GB")
    rows = result("real_seeds")["rows"]
    for said, place in ((before, 0), (after[:2], -1)):
        found = [100 * row["accuracy"][place]["accuracy"] for row in rows]
        assert (f"{min(found):.0f}", f"{max(found):.0f}") == said
    minutes = [row["seconds"] / 60 for row in rows]
    assert (f"{min(minutes):.0f}", f"{max(minutes):.0f}") == after[2:]
    assert f"{max(row['peak_bytes'] for row in rows) / 1e9:.1f}" == memory


def test_the_study_of_a_real_language_model_is_as_measured() -> None:
    cell = r"([\d.]+) % \(([\d.]+) to ([\d.]+)\)"
    said = cited(rf"DelTA, exact proxy, centroids by group \| [|-]+ \| {cell} \| {cell} \| {cell} \|")
    rows = {row["arm"]: row["accuracy"] for row in result("study_words/study")["rows"]}
    found = [rows[arm][name] for arm in ("delta", "dapo", "exact_group") for name in ("mean", "low", "high")]
    assert tuple(f"{100 * value:.1f}" for value in found) == said


def test_a_step_on_a_gpu_is_as_measured() -> None:
    said = cited(
        r"\[([\d.]+) to ([\d.]+) of TRL's time and ([\d.]+) of its memory\]\(benchmarks/results/h100/real\.json\)"
    )
    ways, trl = result("h100/real")["results"]["ours"]["ways"], result("h100/real")["results"]["trl"]
    times = [ways[way]["step"] / trl["step"] for way in ("as drawn", "fresh")]
    memory = result("h100/real")["results"]["ours"]["peak_bytes"] / trl["peak_bytes"]
    assert tuple(f"{value:.2f}" for value in (*times, memory)) == said


def test_the_share_of_the_credit_is_at_most_what_is_said() -> None:
    (said,) = cited(r"\[at most ([\d.]+) %\]\(benchmarks/results/delta_step_two_threads\.json\)")
    assert 100 * result("delta_step_two_threads")["results"]["credit_share"] <= float(said)


def test_the_quickstart_is_as_it_is_told() -> None:
    rows = result("quickstart")["rows"]
    said = cited(
        r"(\w+) of \w+ seeds: from (\d+)–(\d+) % to (\d+)–(\d+) % of 250 held-out problems, 80 % after (\d+)–(\d+) s "
        r"of training, all (\d+) steps in (\d+)–(\d+) s, peak memory ([\d.]+) GB"
    )
    ends: list[tuple[str, Callable[[float], float]]] = [
        ("before", lambda value: 100 * value),
        ("after", lambda value: 100 * value),
        ("seconds to 80 %", float),
        ("seconds", float),
    ]
    measured = [[change(row[name]) for row in rows] for name, change in ends]
    ranges = [f"{bound:.0f}" for values in measured for bound in (min(values), max(values))]
    assert [*said[1:7], *said[8:10]] == ranges
    assert said[0] == {5: "five"}[len(rows)]
    assert {row["steps"] for row in rows} == {int(said[7])}
    assert f"{max(row['peak MB'] for row in rows) / 1000:.1f}" == said[10]


def test_the_table_of_methods_is_that_of_the_study() -> None:
    """Every row, every number, in the order of the study's own table."""
    rows = result("study_quickstart/study")["rows"]
    table = re.findall(r"^\| (\w+)(?: \([^|]*\))? \| (\d[^|]*)\|([^|]*)\| (\d[^|]*)\|([^|]*)\|", _raw(), re.MULTILINE)
    assert [name for name, *_ in table] == [row["arm"] for row in rows]
    for row, (_, accuracy, p, area, area_p) in zip(rows, table, strict=True):
        for field, text, test, p_text in (
            ("accuracy", accuracy, "accuracy_test", p),
            ("area", area, "area_test", area_p),
        ):
            value = row[field]
            numbers = [f"{100 * value[bound]:.1f}" for bound in ("mean", "low", "high")]
            assert re.findall(r"[\d.]+", text) == numbers, (row["arm"], field)
            expected = "" if row[test] is None else f"{row[test]['p_value']:.3f}"
            assert p_text.strip() == expected, (row["arm"], test)


def test_the_table_of_mistakes_is_that_of_the_benchmark() -> None:
    committed = (RESULTS / "mistakes.txt").read_text(encoding="utf-8")
    said = re.findall(r"\| (\d\.\d{3} ± \d\.\d{3}) \| (\d\.\d{3} ± \d\.\d{3}) \|", _raw())
    assert len(said) == 8
    for pair in said:
        for number in pair:
            assert number.replace("± ", "±") in committed, number


@pytest.mark.parametrize(
    ("study", "pattern", "arms"),
    [
        ("study_format", r"DAPO ends at ([\d.]+) %, DelTA at ([\d.]+) %\.", None),
        ("study_noise", r"flipped DelTA ends at ([\d.]+) %, DAPO at ([\d.]+) %", None),
    ],
)
def test_the_small_studies_are_as_they_are_told(study: str, pattern: str, arms: None) -> None:
    said = cited(pattern)
    shown = {f"{100 * row['accuracy']['mean']:.1f}" for row in result(f"{study}/study")["rows"]}
    assert set(said) <= shown


def test_figures_are_seen_to_differ() -> None:
    """A reader that finds nothing, or the wrong sentence, fails."""
    with pytest.raises(AssertionError, match="0 sentences"):
        cited(r"\[([\d.]+) times as slow\]")
    assert np.isclose(speedup("step"), 1.0) == np.False_


def _raw() -> str:
    return (ROOT / "README.md").read_text(encoding="utf-8")
