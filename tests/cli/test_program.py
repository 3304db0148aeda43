"""What is printed can be typed: the program's name as the shell finds it, and shipped recipes without a checkout."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from delta_cli.cli.program import as_typed, program
from delta_cli.recipe import load_recipe
from delta_cli.recipe.shipped import find_shipped, shipped_names, shipped_recipes
from tests.command import delta

LINE = "stopped; continue with: delta train --resume"


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An environment that nobody activated, below the current folder."""
    scripts = tmp_path / "my env" / "bin"
    scripts.mkdir(parents=True)
    for name in ("python", "delta"):
        (scripts / name).write_text("#!/bin/sh\necho started $*\n")
        (scripts / name).chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", str(scripts / "python"))
    monkeypatch.setattr(sys, "argv", ["delta"])
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    return scripts


def test_commands_are_printed_as_the_shell_finds_them(environment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert program() == "'my env/bin/delta'"
    assert as_typed(LINE) == "stopped; continue with: 'my env/bin/delta' train --resume"
    typed = as_typed("delta train --resume")
    assert subprocess.run(shlex.split(typed), capture_output=True, text=True).stdout == "started train --resume\n"
    monkeypatch.setenv("PATH", f"{environment}:/usr/bin:/bin")
    assert program() == "delta"
    assert as_typed(LINE) == LINE


def test_another_program_of_that_name_is_another_one(environment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = environment.parent / "other"
    other.mkdir()
    (other / "delta").write_text("#!/bin/sh\n")
    (other / "delta").chmod(0o755)
    monkeypatch.setenv("PATH", f"{other}:/usr/bin:/bin")
    assert program() == "'my env/bin/delta'"
    (environment / "delta").unlink()
    assert program() == "'my env/bin/python' -m delta_cli"


def test_only_commands_are_rewritten(environment: Path) -> None:
    for text in (
        "delta.json",
        "the delta method",
        "delta: no such file",
        "docs/delta train.md",
        "preset delta, trains",
    ):
        assert as_typed(text) == text


def test_messages_name_the_program_as_it_is_started(environment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = delta("train", "x.jsonl")
    (Path("x.jsonl")).write_text("{}\n")
    assert "no such file" in said.err
    assert "'my env/bin/delta' init --data x.jsonl" in delta("train", "x.jsonl").err
    assert "see 'my env/bin/delta' train --help" in delta("train", "--nonsense").err


def test_every_shipped_recipe_is_found_by_its_name_and_nothing_here_is_shadowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    root = Path(__file__).parents[2] / "recipes"
    assert shipped_names() == sorted(
        file.relative_to(root).as_posix().removesuffix(".toml") for file in root.rglob("*.toml")
    )
    for each in shipped_recipes():
        assert each.about, each.name
        if not each.is_study:
            load_recipe(Path(each.name))
    assert load_recipe(Path("ablations/k0")).delta.refinements == 0
    assert find_shipped(Path("qwen3_1.7b_mac")).is_file()
    (tmp_path / "qwen3_8b").mkdir()
    assert find_shipped(Path("qwen3_8b")) == Path("qwen3_8b")
    assert find_shipped(Path("qwen3_8b.toml")) == Path("qwen3_8b.toml")


def test_recipes_and_studies_are_listed_and_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    listed = delta("recipe", "list").out
    assert "  qwen3_8b_lora " in listed
    assert listed.index("studies, for") < listed.index("study_quickstart")
    assert 'path = "Qwen/Qwen3-8B-Base"' in delta("recipe", "show", "qwen3_8b").out
    assert "did you mean qwen3_8b?" in delta("recipe", "show", "recipes/qwen3_8b.toml").err
