"""Which run is meant, and what may differ when it goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

from delta_cli.cli.choose import recipe_of_run, run_folder
from delta_cli.errors import UserError
from delta_cli.recipe import load_recipe, to_toml


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "recipe.toml").write_text(to_toml(load_recipe(None, ["run.steps=10"])))
    return tmp_path


def test_without_changes_it_is_the_runs_own(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert recipe_of_run(run, None, ()) == load_recipe(run / "recipe.toml")
    assert capsys.readouterr().err == ""


def test_what_may_change_is_said(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = recipe_of_run(run, None, ["run.steps=20", "update.micro_batch_tokens=4096", "evaluation.every=5"])
    assert (recipe.run.steps, recipe.update.micro_batch_tokens) == (20, 4096)
    said = capsys.readouterr().err
    assert "run.steps: 10 → 20" in said
    assert "update.micro_batch_tokens: 16384 → 4096" in said


def test_what_may_not_is_refused_with_every_key(run: Path, tmp_path: Path) -> None:
    """In a given recipe as well, and with what would have been allowed."""
    given = tmp_path / "other.toml"
    given.write_text('run = {steps = 20, seed = 1}\nmethod.preset = "grpo"\n')
    with pytest.raises(UserError) as error:
        recipe_of_run(run, given, ())
    text = str(error.value)
    assert "run.seed: 0 → 1" in text
    assert "method.preset: 'delta' → 'grpo'" in text
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
        run_folder(None, None, resume=True)
    for name in ("quickstart-2", "quickstart-10", "quickstart-x", "mine-3"):
        (tmp_path / "runs" / name).mkdir(parents=True)
    assert run_folder(None, None, resume=True) == Path("runs/quickstart-10")
    assert run_folder(Path("mine.toml"), None, resume=False) == Path("runs/mine-4")
    assert run_folder(None, Path("elsewhere"), resume=True) == Path("elsewhere")
