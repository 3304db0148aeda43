"""The command line as a person meets it: start-up, help, and what it says when something is wrong."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import typer.main

from backends.settings import BackendSettings
from delta_cli import cli
from delta_cli.errors import UserError
from delta_cli.recipe import Recipe, key_reference

FOLDER = Path(__file__).parents[2] / "recipes"
RECIPES = sorted(path for path in FOLDER.rglob("*.toml") if "\narms = " not in path.read_text())  # the rest: studies
FRAMEWORKS = ("torch", "mlx", "mlx_lm", "transformers", "peft", "datasets", "trl", "accelerate")
ALLOWED = {"datasets"}  # inside the function that loads a data set
ROOT = Path(__file__).parents[2]


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """``delta`` with these arguments; its exit code."""
    monkeypatch.setattr(sys, "argv", ["delta", *arguments])
    try:
        cli.main()
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


def fresh(code: str) -> str:
    """What a fresh Python prints for a piece of code."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_the_core_and_the_command_line_import_no_framework() -> None:
    code = f"""
import sys
import delta_cli, delta_cli.cli, delta_cli.recipe, delta_cli.credit, delta_cli.training.setup
import delta_cli.evaluation.suites, delta_cli.reporting.console
import delta_cli.doctor.checks, delta_cli.study.summary, backends.registry, delta_cli.integrations
print([name for name in {FRAMEWORKS} if name in sys.modules])
"""
    assert fresh(code).strip() == "[]"


def test_the_one_module_that_imports_a_framework_is_what_a_user_of_trl_imports_by_name() -> None:
    exception = "delta_cli.integrations.trl"
    for file in sorted((ROOT / "delta_cli").rglob("*.py")):
        if not file.is_relative_to(ROOT / exception.replace(".", "/")):
            imported = imports(file)
            assert exception not in imported, file
            assert not {name.partition(".")[0] for name in imported} & set(FRAMEWORKS) - ALLOWED, file


def imports(file: Path) -> set[str]:
    """The modules that a file imports anywhere in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def test_help_is_there_at_once() -> None:
    """0.3 s of processor time; beside other tests, held against the libraries it cannot do without."""

    def seconds(*arguments: str) -> float:
        before = os.times()
        subprocess.run([sys.executable, *arguments], capture_output=True, check=True)
        after = os.times()
        return after.children_user + after.children_system - before.children_user - before.children_system

    help_ = min(seconds("-m", "delta_cli", "--help") for _ in range(3))
    assert help_ < max(0.3, 2 * min(seconds("-c", "import typer") for _ in range(3)))


COMMANDS = sorted(typer.main.get_command(cli.app).commands)  # type: ignore[attr-defined]


@pytest.mark.parametrize("command", ["", *COMMANDS, "recipe keys", "recipe explain"])
def test_every_command_has_help_that_fits_sixty_columns(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Plain lines, for terminals without colour and for screen readers; no summary is cut off."""
    monkeypatch.setenv("COLUMNS", "60")
    assert run(monkeypatch, *command.split(), "--help") == 0
    printed = capsys.readouterr().out
    assert "Usage" in printed
    assert max(map(len, printed.splitlines())) <= 60
    assert not set("╭│╰\x1b") & set(printed)
    assert "..." not in printed.partition("Commands:")[2]


def test_commands_are_listed_in_the_order_of_use(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "--help") == 0
    listed = re.findall(r"^  (\w+)  ", capsys.readouterr().out.partition("Commands:")[2], re.MULTILINE)
    assert listed[:3] == ["train", "init", "doctor"]
    assert sorted(listed) == COMMANDS
    assert set(listed) == set(cli.ORDER)


@pytest.mark.parametrize("width", [60, 80])
def test_keys_are_readable_in_a_narrow_terminal(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    assert run(monkeypatch, "recipe", "keys") == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= width
    heads = {line.split()[0] for line in lines if line.startswith("    ") and line[4] != " "}
    assert heads == {key.name for key in key_reference()}  # whole


@pytest.mark.parametrize("name", ["rollout.responses", "responses", "num_generations", "actor_rollout_ref.rollout.n"])
def test_a_key_is_explained_by_any_of_its_names(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "recipe", "explain", name) == 0
    printed = capsys.readouterr().out
    for part in ("rollout.responses = 16", "responses to each prompt", "TRL: num_generations", "group_size", "--set"):
        assert part in printed


def test_a_wrong_option_is_exit_code_2(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(monkeypatch, "train", "--steps", "3") == 2


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_passes_a_dry_run_without_weights(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("delta_cli.data.sources.rows", _no_rows)
    assert run(monkeypatch, "train", str(path), "--dry-run", "--backend", "cpu") == 0
    printed = capsys.readouterr().out
    assert "[update]" in printed
    assert "GiB" in printed or "MiB" in printed
    assert not (tmp_path / "runs").exists()


def _no_rows(*_: object) -> None:
    raise UserError("no data sets in this test")


def test_the_schema_describes_a_recipe(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "recipe", "schema") == 0
    schema = json.loads(capsys.readouterr().out)
    assert set(schema["properties"]) == {*Recipe.model_fields, "extends"}
    assert schema["$defs"]["UpdateSection"]["properties"]["learning_rate"]["description"]
    assert schema["$defs"]["UpdateSection"]["additionalProperties"] is False


def test_a_resolved_recipe_is_toml(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "recipe", "show", "--set", "run.steps=7") == 0
    assert tomllib.loads(capsys.readouterr().out)["run"]["steps"] == 7


def test_keys_are_listed_with_ranges(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "recipe", "keys", "delta") == 0
    printed = capsys.readouterr().out
    assert "delta.proxy" in printed
    assert "update." not in printed


def test_the_shipped_model_solves_its_suite_some_of_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["eval", "tiny-base", "--suite", "arithmetic", "--limit", "128", "--backend", "fake"]
    assert run(monkeypatch, *arguments, "--samples", "2", "--out", str(tmp_path)) == 0
    result = json.loads((tmp_path / "evaluation.json").read_text())
    assert 0.3 < result["average"]["avg"]["mean"] < 0.5  # what it was trained to, ± 3 standard errors
    assert "avg@2" in capsys.readouterr().out
    # Once more draws nothing, and says the same.
    assert run(monkeypatch, *arguments, "--samples", "2", "--out", str(tmp_path)) == 0
    assert json.loads((tmp_path / "evaluation.json").read_text()) == result


def test_train_resume_eval_and_inspect_one_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    small = ["--backend", "fake", "--run-dir", str(folder), "--json"]
    for setting in (
        "run.steps=2",
        "rollout.prompts=4",
        "rollout.responses=4",
        "evaluation.problems=8",
        "data.limit=99",
    ):
        small += ["--set", setting]
    assert run(monkeypatch, "train", *small) == 0
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [record["step"] for record in printed if "reward_mean" in record] == [1, 2]
    assert run(monkeypatch, "train", *small) == 2
    assert "--resume" in capsys.readouterr().err
    more = ["--resume", "--run-dir", str(folder), "--backend", "fake", "--set", "run.steps=3", "--quiet"]
    assert run(monkeypatch, "train", *more) == 0
    steps = [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3]
    assert run(monkeypatch, "eval", str(folder), "--backend", "fake", "--limit", "8") == 0
    assert (folder / "evaluations" / "held_out-step3-limit8" / "evaluation.json").is_file()
    assert run(monkeypatch, "inspect", str(folder), "--step", "1") == 0
    assert run(monkeypatch, "report", str(folder), "--output", str(tmp_path / "report.html")) == 0
    assert (tmp_path / "report.html").stat().st_size > 10_000


@pytest.mark.parametrize(
    "words", [("serve", "tiny-base"), ("chat", "tiny-base"), ("eval", "tiny-base", "--suite", "arithmetic")]
)
def test_the_engine_gets_the_threads_that_are_asked_for(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[object] = []

    def create(backend: str, settings: BackendSettings, *_: object, **__: object) -> None:
        asked.append(settings.threads)
        raise UserError("seen")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("backends.registry.create", create)
    assert run(monkeypatch, *words, "--threads", "3", "--backend", "cpu") == 2
    assert asked == [3]
