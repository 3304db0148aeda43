"""``delta init``: what it sees in data, and the way from a data file to an exported model that it prints."""

from __future__ import annotations

import json
import re
import shutil
import tomllib
from pathlib import Path
from typing import Any

import pytest

from delta_cli.assets import model_path
from delta_cli.data.columns import FINAL_PATTERN, find_columns
from delta_cli.errors import UserError
from delta_cli.recipe import load_recipe

from .test_commands import run


@pytest.mark.parametrize(
    ("row", "question", "answer", "kind", "pattern"),
    [
        ({"question": "1+1?", "answer": "2"}, "question", "answer", "math", None),
        ({"id": 7, "problem": "1+1?", "Final_Answer": 2}, "problem", "Final_Answer", "math", None),
        ({"prompt": "1+1?", "label": "B"}, "prompt", "label", "choice", None),
        ({"problem": "f", "tests": {"type": "asserts", "code": "x"}}, "problem", "tests", "code", None),
        ({"question": "q", "answer": "so it is\n#### 1,000"}, "question", "answer", "math", FINAL_PATTERN),
        ({"input": "q", "output": r"x^2 \geq 3"}, "input", "output", "math", None),
    ],
)
def test_columns_and_reward_are_seen(row: dict[str, Any], question: str, answer: str, kind: str, pattern: str) -> None:
    found = find_columns("file", [row] * 20)
    assert (found.question, found.answer, found.kind, found.pattern) == (question, answer, kind, pattern)


def test_columns_that_cannot_be_told_are_asked_for() -> None:
    with pytest.raises(UserError, match=r"f\.csv: none of the columns a, b is known to be the question.*--question"):
        find_columns("f.csv", [{"a": "1", "b": "2"}])
    with pytest.raises(UserError, match=r"--answer c: f\.csv has no such column; its columns are a, b"):
        find_columns("f.csv", [{"a": "1", "b": "2"}], "a", "c")
    assert find_columns("f.csv", [{"a": "1", "b": "2"}], "a", "b").answer == "b"
    assert "LONG TEXTS" in find_columns("f", [{"question": "?", "answer": "word " * 30}]).why
    with pytest.raises(UserError, match="holds no rows"):
        find_columns("f", [])


def folder_with_data_and_model(folder: Path) -> None:
    rows = [{"problem": f"{a}+{b}=?", "solution": str(a + b)} for a in range(10, 22) for b in range(10, 22)]
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shutil.copytree(model_path("tiny-base"), folder / "m")


@pytest.mark.long
def test_the_printed_commands_lead_from_a_data_file_to_an_exported_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Typed as printed; only the backend is named, and the run made short, so that this takes seconds."""
    monkeypatch.chdir(tmp_path)
    folder_with_data_and_model(tmp_path)
    assert run(monkeypatch, "init") == 0
    printed = capsys.readouterr().out
    assert "question = problem, answer = solution" in printed
    commands = re.findall(r"^\d  delta (.*?)(?:  .*)?$", printed, re.MULTILINE)
    assert [command.split()[0] for command in commands] == ["doctor", "train", "report", "export"]
    recipe = load_recipe(Path("sums.toml"))
    assert (recipe.data.question, recipe.data.answer, recipe.model.path) == ("problem", "solution", "./m")
    assert recipe.checkpoint.keep_best == "eval_accuracy"
    assert "the columns are problem, solution" in Path("sums.toml").read_text()
    small = ["--set", "run.steps=1", "--set", "rollout.prompts=4", "--set", "rollout.responses=4"]
    for command in commands:
        words = command.split()
        also = ["--backend", "fake", *small] if words[0] == "train" else []
        if words[0] == "doctor":
            also = ["--backend", "fake", *small, "--set", "rollout.batch=16"]
        assert run(monkeypatch, *words, *also) == 0, capsys.readouterr()
    assert (tmp_path / "sums-model" / "model.safetensors").is_file()
    assert (tmp_path / "report.html").is_file()
    assert tomllib.loads((tmp_path / "runs/sums-1/recipe.toml").read_text())["data"]["question"] == "problem"


def test_a_recipe_is_not_overwritten_and_a_choice_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for arguments, part in (
        ([], "no data file here"),
        (["--data", "sums.jsonl"], "no model folder here"),
        (["--data", "absent.jsonl", "--model", "tiny-base"], "no such file"),
    ):
        assert run(monkeypatch, "init", *arguments) == 2
        assert part in capsys.readouterr().err
    folder_with_data_and_model(tmp_path)
    (tmp_path / "more.csv").write_text("question,answer\n1+1=?,2\n")
    assert run(monkeypatch, "init") == 2
    assert "2 data files here (more.csv, sums.jsonl); choose one with --data" in capsys.readouterr().err
    assert run(monkeypatch, "init", "--data", "more.csv") == 0
    assert load_recipe(Path("more.toml")).data.source == "more.csv"
    assert "questions in words" not in capsys.readouterr().err
    (tmp_path / "prose.csv").write_text("question,answer\nTom has 3 apples and gets 4. How many?,7\n")
    assert run(monkeypatch, "init", "--data", "prose.csv") == 0
    assert "./m can only do sums such as 45+84=? and will learn nothing from" in capsys.readouterr().err
    assert run(monkeypatch, "init", "--data", "more.csv") == 2
    assert "more.toml: exists already" in capsys.readouterr().err


@pytest.mark.parametrize("model", ["Qwen/absent-model", "tiny-base"])
def test_a_data_set_of_the_hub_is_taken_by_its_name(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither it nor the model need be here."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert run(monkeypatch, "init", "--data", "openai/gsm8k", "--model", model, "--out", "r.toml") == 0
    recipe = load_recipe(Path("r.toml"))
    assert (recipe.data.source, recipe.data.question, recipe.model.path) == ("openai/gsm8k", None, model)
