"""Which run is meant, and what may differ when it goes on."""

from __future__ import annotations

import os
from io import StringIO
from pathlib import Path

import pytest
from filelock import FileLock
from rich.console import Console

from delta_cli.api.resume import recipe_of_run
from delta_cli.cli.run_folder import run_folder
from delta_cli.errors import Interrupted, UserError
from delta_cli.recipe import load_recipe, to_toml
from delta_cli.reporting.run_list import RunTable, find_runs
from delta_cli.runs.status import RunStatus, read_status, recorded_status


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "recipe.toml").write_text(to_toml(load_recipe(None, ["run.steps=10"])))
    return tmp_path


def test_without_changes_it_is_the_runs_own(run: Path) -> None:
    said: list[str] = []
    assert recipe_of_run(run, None, (), say=said.append) == load_recipe(run / "recipe.toml")
    assert said == []


def test_what_may_change_is_said(run: Path) -> None:
    said: list[str] = []
    changes = ["run.steps=20", "update.micro_batch_tokens=4096", "evaluation.every=5", "run.threads=1"]
    recipe = recipe_of_run(run, None, changes, say=said.append)
    assert (recipe.run.steps, recipe.update.micro_batch_tokens) == (20, 4096)
    [line] = said
    assert "run.steps: 10 → 20" in line
    assert "update.micro_batch_tokens: 16384 → 4096" in line
    assert "run.threads: absent → 1" in line


def test_what_may_not_is_refused_with_every_key(run: Path, tmp_path: Path) -> None:
    """In a given recipe as well, and with what would have been allowed."""
    given = tmp_path / "other.toml"
    given.write_text('run = {steps = 20, seed = 1}\nmethod.preset = "grpo"\n')
    with pytest.raises(UserError) as error:
        recipe_of_run(run, given, ())
    text = str(error.value)
    assert "run.seed: 0 → 1" in text
    assert 'method.preset: "delta" → "grpo"' in text
    assert "run.steps: 10 → 20 would be allowed" in text
    assert "\n" not in text


def test_a_folder_without_a_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no run to resume"):
        recipe_of_run(tmp_path, None, ())


def test_names_of_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest by number, not by the alphabet; other folders do not count."""
    monkeypatch.chdir(tmp_path)
    assert run_folder(None, None, resume=False) == Path("runs/quickstart-1")
    with pytest.raises(UserError, match="no run to resume"):
        run_folder(Path("mine.toml"), None, resume=True)
    for name in ("quickstart-2", "quickstart-10", "quickstart-x", "mine-3"):
        (tmp_path / "runs" / name).mkdir(parents=True)
    assert run_folder(Path("quickstart.toml"), None, resume=True) == Path("runs/quickstart-10")
    assert run_folder(Path("mine.toml"), None, resume=False) == Path("runs/mine-4")
    assert run_folder(None, Path("elsewhere"), resume=True) == Path("elsewhere")


def make_run(folder: Path, step: int, ending: str | None, age: float = 0, steps: int = 4) -> Path:
    """A run that has come to ``step``; its process said ``ending`` last, or nothing."""
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "model").mkdir()
    (folder / "recipe.toml").write_text(to_toml(load_recipe(None, [f"run.steps={steps}", "method.preset=dapo"])))
    (folder / "metrics.jsonl").write_text("".join(f'{{"step": {n + 1}}}\n' for n in range(step)))
    accuracies = [0.25, 0.75, 0.5]
    (folder / "evaluations.jsonl").write_text("".join(f'{{"accuracy": {value}}}\n' for value in accuracies))
    if step == steps:
        (folder / "model" / "delta.json").write_text(f'{{"format": 1, "step": {step}}}')
    if ending is not None:
        (folder / "end.json").write_text(ending)
    for file in (folder / "recipe.toml", folder / "metrics.jsonl", folder / "checkpoints"):
        os.utime(file, (1e9 - age, 1e9 - age))
    return folder


def test_runs_are_listed_with_their_state(tmp_path: Path) -> None:
    make_run(tmp_path / "a/done-1", 4, '{"state": "done"}')
    make_run(tmp_path / "stopped-1", 2, '{"state": "stopped"}', age=10)
    make_run(tmp_path / "failed-1", 2, '{"state": "failed", "reason": "UserError: disk"}', age=20)
    make_run(tmp_path / "died-1", 2, None, age=30)
    make_run(tmp_path / "longer-1", 2, '{"state": "done"}', age=40)  # its recipe was given more steps
    going = make_run(tmp_path / "going-1", 2, None, age=50)
    make_run(tmp_path / "broken-1", 2, None, age=60).joinpath("metrics.jsonl").write_text("no json\n")
    (tmp_path / "no-run").mkdir()
    with FileLock(going / ".lock"):
        found = find_runs(tmp_path)
    by_name = {run.path.name: run for run in found}
    states = {name: run.state for name, run in by_name.items()}
    assert states == {
        "broken-1": "damaged",
        "going-1": "going",
        "longer-1": "stopped",
        "died-1": "died",
        "failed-1": "failed",
        "stopped-1": "stopped",
        "done-1": "done",
    }
    assert [run.path.name for run in found if run.path.name != "broken-1"][-1] == "done-1"  # changed last
    done = by_name["done-1"]
    assert (done.method, done.model, done.step, done.steps, done.accuracy, done.best) == (
        *("dapo", "tiny-base", 4, 4),
        *(0.5, 0.75),
    )
    console = Console(file=StringIO(), width=60, color_system=None)
    console.print(RunTable(found))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "UserError: disk" in text
    assert max(map(len, text.splitlines())) <= 60


def test_resuming_without_a_folder_takes_the_newest_unfinished_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="no run to resume"):
        run_folder(None, None, resume=True)
    make_run(Path("runs/mine-1"), 4, '{"state": "done"}')
    with pytest.raises(
        UserError, match=r"no run is unfinished; the newest is runs/mine-1, step 4 of 4.*run.steps=MORE"
    ):
        run_folder(None, None, resume=True)
    assert run_folder(None, None, resume=True, longer=True) == Path("runs/mine-1")
    make_run(Path("runs/old-1"), 2, '{"state": "stopped"}', age=20)
    make_run(Path("runs/new-1"), 3, None, age=10)
    assert run_folder(None, None, resume=True) == Path("runs/new-1")
    assert "resuming runs/new-1: died after step 3 of 4" in capsys.readouterr().err
    with FileLock("runs/new-1/.lock"):
        assert run_folder(None, None, resume=True) == Path("runs/old-1")


def test_the_end_of_a_run_is_written_as_it_is(tmp_path: Path) -> None:
    with recorded_status(tmp_path):
        assert read_status(tmp_path) is None  # while it goes on, and if it is killed
    assert read_status(tmp_path) == RunStatus("done")
    with pytest.raises(Interrupted), recorded_status(tmp_path):
        raise Interrupted(3)
    assert read_status(tmp_path) == RunStatus("stopped")
    with pytest.raises(UserError), recorded_status(tmp_path):
        raise UserError("a disk that is full")
    assert read_status(tmp_path) == RunStatus("failed", "UserError: a disk that is full")
    with recorded_status(tmp_path, rank=1):
        pass
    assert read_status(tmp_path) == RunStatus("failed", "UserError: a disk that is full")
