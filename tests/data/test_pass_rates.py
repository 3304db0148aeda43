"""Problems that are left out by a measured pass rate, and ``delta data rate``, which measures it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from delta_cli.data.loading import load_problems
from delta_cli.errors import UserError
from delta_cli.recipe import load_recipe
from delta_cli.recipe.data import DataSection
from delta_cli.rewards import grader
from delta_cli.runs.fingerprint import changes, fingerprint
from tests.command import delta

RATES = {"a?": 0.0, "b?": 0.25, "c?": 0.75, "d?": 1.0}  # e? and f? are not rated


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write("data.jsonl", [{"question": f"{letter}?", "answer": "1"} for letter in "abcdef"])
    write("rates.jsonl", [{"question": question, "pass_rate": rate} for question, rate in RATES.items()])
    return tmp_path


def write(name: str, rows: list[dict[str, Any]]) -> None:
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def section(**changes: Any) -> DataSection:
    return DataSection(**({"source": "data.jsonl", "held_out": 0.0, "pass_rate_file": "rates.jsonl"} | changes))


def test_problems_outside_the_range_are_left_out_and_counted(here: Path) -> None:
    loaded = load_problems(section(pass_rate_min=0.25, pass_rate_max=0.75))
    assert {each.question: each.pass_rate for each in loaded.problems} == {"b?": 0.25, "c?": 0.75}, "ends included"
    report = loaded.report
    assert (report.read, report.kept, report.too_hard, report.too_easy, report.unrated) == (6, 2, 1, 1, 2)
    assert str(report) == (
        "2 problems of 6 rows; left out: 1 with a pass rate below data.pass_rate_min, 1 with a pass rate above "
        "data.pass_rate_max, 2 without a pass rate in data.pass_rate_file"
    )
    assert {(row.where, row.reason) for row in report.left_out} == {
        ("problem 1", "too_hard"), ("problem 4", "too_easy"), ("problem 5", "unrated"), ("problem 6", "unrated")
    }  # fmt: skip


def test_a_file_without_a_range_only_starts_the_curriculum(here: Path) -> None:
    loaded = load_problems(section())
    assert {each.question: each.pass_rate for each in loaded.problems} == RATES | {"e?": None, "f?": None}


def test_held_out_problems_stay(here: Path) -> None:
    loaded = load_problems(section(held_out=0.5, pass_rate_min=0.5), seed=1)
    assert loaded.held_out == load_problems(DataSection(source="data.jsonl", held_out=0.5), seed=1).held_out
    assert all(each.pass_rate is not None and each.pass_rate >= 0.5 for each in loaded.problems)


def test_problems_of_several_sources_are_left_out_too(here: Path) -> None:
    data = {"held_out": 0.0, "pass_rate_file": "rates.jsonl", "pass_rate_min": 0.5, "template": "plain"}
    sources = {"sources": {"mine": {"source": "data.jsonl"}, "sums": {"limit": 5}}}
    loaded = load_problems(DataSection.model_validate(data | sources))
    assert [each.question for each in loaded.problems] == ["c?", "d?"]
    assert (loaded.report.too_hard, loaded.report.unrated) == (2, 7)


def test_ranks_and_resumed_runs_compare_the_file(here: Path) -> None:
    """It starts the curriculum, so another file is another run even if it leaves out the same problems."""
    recipe = load_recipe(None, ["data.pass_rate_file=rates.jsonl", "data.curriculum=pass_rate"])
    before = fingerprint(recipe, (), ())
    write("rates.jsonl", [{"question": "a?", "pass_rate": 0.5}])
    assert changes(before, fingerprint(recipe, (), ())) == ["pass rate file rates.jsonl"]


def test_responses_of_an_evaluation_are_rates(here: Path) -> None:
    marks = {"a?": "110", "b?": "000"}
    write("r.jsonl", [{"question": q, "correct": mark == "1"} for q, each in marks.items() for mark in each])
    loaded = load_problems(section(pass_rate_file="r.jsonl", pass_rate_min=0.5))
    assert [(each.question, each.pass_rate) for each in loaded.problems] == [("a?", 2 / 3)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "no such file; write one with `delta data rate RECIPE`"),
        ('{"question": "a?", "pass_rate": 1.5}\n', r"rates.jsonl:1: a line needs question, and pass_rate from 0 to 1"),
        ('{"question": "a?"}\n', "rates.jsonl:1: a line needs question"),
        ("no json\n", "rates.jsonl:1: not valid JSON"),
        ('{"question": "z?", "pass_rate": 1.0}\n', "has none of the 6 problems to train on"),
        (
            '{"question": "a?", "pass_rate": 0.5}\n',
            r"data.pass_rate_min = 0.9, .*: no problem is left to train on \(0 pr",
        ),
    ],
)
def test_mistakes_in_the_file(text: str | None, message: str, here: Path) -> None:
    Path("rates.jsonl").unlink()
    if text is not None:
        Path("rates.jsonl").write_text(text)
    with pytest.raises(UserError, match=message) as error:
        load_problems(section(pass_rate_min=0.9))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"pass_rate_min": 0.5, "pass_rate_file": None}, "need data.pass_rate_file"),
        ({"pass_rate_min": 0.5, "pass_rate_max": 0.4}, "pass_rate_min = 0.5 is above data.pass_rate_max"),
    ],
)
def test_mistakes_in_the_recipe(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        section(**keys)


def test_rates_are_measured_and_used(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written is what the next run keeps, and a second call draws nothing."""
    monkeypatch.setattr(grader, "quick_verifier", lambda *_: lambda response, problem: float(len(response) % 2))
    small = ("data.limit=12", "data.digits=1", "rollout.max_tokens=40", "data.held_out=0.5")
    keys = [word for key in small for word in ("--set", key)]
    said = delta("data", "rate", "quickstart", "--samples", "4", "--quiet", "--backend", "fake", *keys)
    assert said.code == 0, said.err
    file = Path("evaluations/pass_rates-quickstart-step0/pass_rates.jsonl")
    rates = [json.loads(line)["pass_rate"] for line in file.read_text().splitlines()]
    assert len(rates) == 6
    assert f"never solved  {rates.count(0.0):>7}" in said.out
    low = min(rates) + 0.01
    recipe = load_recipe(None, [*small, f"data.pass_rate_file={file}", f"data.pass_rate_min={low}"])
    kept = load_problems(recipe.data, recipe.run.seed).problems
    assert sorted(each.pass_rate or 0.0 for each in kept) == sorted(rate for rate in rates if rate >= low)
    shown = delta("data", "show", "quickstart", *keys, "--set", f"data.pass_rate_file={file}",
                  "--set", f"data.pass_rate_min={low}")  # fmt: skip
    assert f"{rates.count(min(rates))} with a pass rate below data.pass_rate_min" in shown.out
    Path("recipe.toml").touch()  # what makes a folder a run
    refused = delta("data", "rate", ".", "--set", "run.steps=1")
    assert (refused.code, refused.err.count("\n")) == (2, 1)
    assert "--set run.steps=1: changes a recipe, and . is a run" in refused.err
    before = file.stat().st_mtime_ns, Path(file.parent / "evaluation.json").read_text()
    again = delta("data", "rate", "quickstart", "--samples", "4", "--json", "--backend", "fake", *keys)
    assert json.loads(again.out)["classes"]["never solved"] == rates.count(0.0)
    assert Path(file.parent / "evaluation.json").read_text() == before[1]
