"""``delta data show``: the prompts that the model gets, gold answers, token counts, and rows that are left out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from delta_cli.assets import model_path
from delta_cli.data.tokenizer import Tokenizer
from tests.command import delta

ROWS = [
    {"problem": "12+34=?", "solution": "46"},
    {"problem": "10+20=?", "solution": "30"},
    {"problem": "12+34=?", "solution": "47"},
    {"problem": "", "solution": "1"},
    {"problem": "5+5=?", "solution": None},
    {"problem": "11+11=? 11+11=? 11+11=?", "solution": "22"},
]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    Path("sums.toml").write_text(
        '[data]\nsource = "sums.jsonl"\nquestion = "problem"\nanswer = "solution"\ntemplate = "sum: {question}"\n'
        'held_out = 0.5\n[model]\npath = "tiny-base"\n[rollout]\nmax_prompt_tokens = 16\n'
    )
    return tmp_path


def test_a_recipe_shows_what_the_model_gets_and_what_it_does_not(here: Path) -> None:
    said = delta("data", "show", "sums.toml")
    assert said.code == 0, said.err
    tokens = len(Tokenizer.load(model_path("tiny-base")).encode("sum: 12+34=?"))
    assert f"problem 1, {tokens} tokens" in said.out
    assert "  | sum: 12+34=?\n  gold: 46\n" in said.out
    assert said.out.count(", held out") == 1
    for line in (
        "sums.jsonl:3: with the question of an earlier row",
        "sums.jsonl:4: without a question",
        "sums.jsonl:5: without a gold answer",
        "problem 6: with too long a prompt",
    ):
        assert f"  left out: {line}\n" in said.out
    assert "2 problems of 6 rows" in said.out


def test_a_file_needs_no_recipe(here: Path) -> None:
    said = delta("data", "show", "sums.jsonl", "--rows", "1")
    assert "  | 12+34=?\n  gold: 46\n" in said.out
    assert "not counted without a tokenizer" in said.out
    assert "2 more problems: --rows 0 prints all" in said.out
    counted = delta("data", "show", "sums.jsonl", "--model", "tiny-base", "--rows", "0")
    assert counted.out.count("\n  gold: ") == 3
    assert "problem 6, " in counted.out


def test_json_holds_everything(here: Path) -> None:
    found = json.loads(delta("data", "show", "sums.toml", "--json").out)
    assert [each["id"] for each in found["problems"]] == ["1", "2"]
    assert found["problems"][0]["answer"] == "46"
    assert found["left_out"][0] == {"where": "sums.jsonl:3", "why": "with the question of an earlier row"}


def test_generated_problems_and_mistakes(here: Path) -> None:
    assert "5000 problems of 5000 rows" in delta("data", "show", "quickstart", "--rows", "2").out
    for arguments, part in (
        (("absent.jsonl",), "no such file"),
        (("absent.toml",), "no such file"),
        (("sums.jsonl", "--set", "run.steps=1"), "changes a recipe"),
    ):
        said = delta("data", "show", *arguments)
        assert said.code == 2
        assert part in said.err
