"""Trackers, each replaced by a fake that records its calls."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from delta_cli.errors import UserError
from delta_cli.recipe import load_recipe
from delta_cli.reporting.trackers import PACKAGES, numbers, with_tracking
from delta_cli.runs.observer import Observer

EVALUATION = {"step": 0, "accuracy": 0.4, "low": 0.3, "high": 0.5, "problems": 100, "samples": 1}
RECORD = {"step": 1, "reward_mean": 0.5, "loss": float("nan"), "degenerate": None}


class StandIn(ModuleType):
    """A package with every tracker's entry points; ``said`` is what it heard, ``made`` how it was opened."""

    class Error(Exception):
        """As wandb's."""

    def __init__(self) -> None:
        super().__init__("stand_in")
        self.said: list[Any] = []
        self.made: list[dict[str, Any]] = []
        self.finished = 0
        self.refuses = False
        self.exceptions = SimpleNamespace(MlflowException=self.Error)

    def Settings(self, **options: Any) -> dict[str, Any]:
        """As wandb's."""
        return options

    def init(self, **options: Any) -> Any:
        """As wandb's and trackio's."""
        if self.refuses:
            raise self.Error("not logged in")
        self.made.append(options)
        print("a greeting")
        return SimpleNamespace(log=lambda values, step: self.said.append((step, values)), finish=self._finish)

    def SummaryWriter(self, folder: str, purge_step: int | None) -> Any:
        """As tensorboardX's."""
        self.made.append({"folder": folder, "purge_step": purge_step})
        return SimpleNamespace(add_scalar=lambda *scalar: self.said.append(scalar), close=self._finish)

    def set_experiment(self, name: str) -> None:
        """As mlflow's."""
        if self.refuses:
            raise self.Error("no server\nat all")
        self.experiment = name

    def start_run(self, run_name: str | None = None, run_id: str | None = None) -> Any:
        """As mlflow's."""
        self.made.append({"name": run_name, "id": run_id})
        return SimpleNamespace(info=SimpleNamespace(run_id=f"id-{len(self.made)}"))

    def log_params(self, values: dict[str, Any]) -> None:
        """As mlflow's."""
        self.made[-1]["config"] = values

    def log_metrics(self, values: dict[str, float], step: int) -> None:
        """As mlflow's."""
        self.said.append((step, values))

    def end_run(self) -> None:
        """As mlflow's."""
        self._finish()

    def _finish(self) -> None:
        self.finished += 1


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """In place of every package."""
    made = StandIn()
    for name in PACKAGES.values():
        monkeypatch.setitem(sys.modules, name, made)
    return made


def play(kind: str, folder: Path, first: int = 0) -> None:
    """A run of one step under a tracker."""
    recipe = load_recipe(None, [f"tracking.kind={kind}", "tracking.project=sums"])
    observer = with_tracking(Observer(), recipe, folder)
    observer.begin("runs/a", 2, first)
    observer.phase("rollout", 4)
    observer.advance(1, 2)
    observer.evaluation(EVALUATION)
    observer.step(RECORD, [])
    observer.end()
    observer.end()


def test_none_is_the_observer_itself(tmp_path: Path) -> None:
    """Without a tracker nothing is wrapped."""
    observer = Observer()
    assert with_tracking(observer, load_recipe(None, []), tmp_path) is observer


def test_tensorboard(package: StandIn, tmp_path: Path) -> None:
    """A scalar for each finite number, under its own name; resumed runs hide what they do again."""
    play("tensorboard", tmp_path)
    play("tensorboard", tmp_path, first=10)
    scalars = [("eval_accuracy", 0.4, 0), ("eval_low", 0.3, 0), ("eval_high", 0.5, 0), ("reward_mean", 0.5, 1)]
    assert package.said == scalars * 2
    assert [made["purge_step"] for made in package.made] == [None, 11]
    assert package.made[0]["folder"] == str(tmp_path / "tensorboard")
    assert package.finished == 2


@pytest.mark.parametrize("kind", ["wandb", "trackio", "swanlab"])
def test_packages_with_runs(kind: str, package: StandIn, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One call a record, the recipe as the configuration, the recipe's project; resumed where training is."""
    play(kind, tmp_path)
    play(kind, tmp_path, first=1)
    values = [(0, {"eval_accuracy": 0.4, "eval_low": 0.3, "eval_high": 0.5}), (1, {"reward_mean": 0.5})]
    assert package.said == values * 2
    first, second = package.made
    assert first["project"] == "sums"
    assert first["name"] == tmp_path.name
    assert first["config"]["rollout"]["prompts"] == 32
    assert second["resume"] == "allow"
    if kind in ("wandb", "swanlab"):
        assert first["id"] == second["id"]
    else:
        assert first["resume"] == "never"
        assert capsys.readouterr().out == ""
    assert package.finished == 2


def test_mlflow(package: StandIn, tmp_path: Path) -> None:
    """A run in the experiment of the project, with the recipe as parameters; a resumed one goes on in the same run."""
    play("mlflow", tmp_path)
    play("mlflow", tmp_path, first=1)
    values = [(0, {"eval_accuracy": 0.4, "eval_low": 0.3, "eval_high": 0.5}), (1, {"reward_mean": 0.5})]
    assert package.said == values * 2
    first, second = package.made
    assert package.experiment == "sums"
    assert (first["name"], second["id"]) == (tmp_path.name, "id-1")
    assert first["config"]["rollout.prompts"] == "32"
    assert package.finished == 2
    package.refuses = True
    with pytest.raises(UserError, match=r"mlflow did not start \(no server\); set MLFLOW_TRACKING_URI"):
        play("mlflow", tmp_path)


def test_a_new_run_in_a_folder_is_a_new_run_in_wandb(package: StandIn, tmp_path: Path) -> None:
    """The id is kept for resuming only."""
    play("wandb", tmp_path)
    play("wandb", tmp_path)
    assert package.made[0]["id"] != package.made[1]["id"]


def test_wandb_that_does_not_start(package: StandIn, tmp_path: Path) -> None:
    """One line with what to do."""
    package.refuses = True
    with pytest.raises(UserError, match=r"wandb did not start \(not logged in\); run: wandb login"):
        play("wandb", tmp_path)


@pytest.mark.parametrize("kind", list(PACKAGES))
def test_missing_package(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The line says what to install, before anything is loaded."""
    monkeypatch.setitem(sys.modules, PACKAGES[kind], None)
    with pytest.raises(UserError, match=rf"pip install 'delta-rlvr\[{kind}\]'"):
        with_tracking(Observer(), load_recipe(None, [f"tracking.kind={kind}"]), tmp_path)


def test_numbers() -> None:
    """Finite numbers only: no text, no truth values, no step."""
    record = {"step": 1, "a": 1, "b": 2.5, "c": True, "d": None, "e": "text", "f": float("inf")}
    assert numbers(record) == {"a": 1, "b": 2.5}
