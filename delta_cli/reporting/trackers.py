"""Experiment trackers: TensorBoard, Weights & Biases, trackio, MLflow and SwanLab.

Each is an observer that logs every number of a step under its name in metrics.jsonl. ``tracking.kind`` in the
recipe chooses one. The packages are optional and imported only if chosen.
"""

from __future__ import annotations

import importlib
import math
import sys
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from delta_cli.errors import UserError, first_line
from delta_cli.recipe import Recipe
from delta_cli.recipe.keys import flattened
from delta_cli.runs.folder import JsonObject
from delta_cli.runs.observer import Observer, ObserverGroup

PACKAGES = {
    "tensorboard": "tensorboardX",
    "wandb": "wandb",
    "trackio": "trackio",
    "mlflow": "mlflow",
    "swanlab": "swanlab",
}
LONGEST = 250  # characters of a parameter or a message


def with_tracking(observer: Observer, recipe: Recipe, folder: Path) -> Observer:
    """The observer, together with the recipe's tracker if it names one.

    Raises UserError if the tracker's package is not installed.
    """
    kind = recipe.tracking.kind
    if kind == "none":
        return observer
    try:
        package = importlib.import_module(PACKAGES[kind])
    except ImportError as error:
        raise UserError(
            f"tracking.kind: {kind} needs the package {PACKAGES[kind]}; run: pip install 'delta-rlvr[{kind}]'"
        ) from error
    made: dict[str, Callable[[Any, Recipe, Path], Observer]]
    made = {
        "tensorboard": TensorBoard,
        "wandb": WeightsAndBiases,
        "trackio": Trackio,
        "mlflow": MLflow,
        "swanlab": SwanLab,
    }
    return ObserverGroup((observer, made[kind](package, recipe, folder)))


class Tracker(Observer, ABC):
    """What the trackers share: which numbers are logged at which step."""

    def __init__(self, package: Any, recipe: Recipe, folder: Path) -> None:
        self.package = package
        self.recipe = recipe
        self.folder = folder

    def step(self, record: JsonObject, examples: list[Any]) -> None:
        self.log(numbers(record), record["step"])

    def evaluation(self, record: JsonObject) -> None:
        """Log the held-out accuracy and the ends of its interval."""
        names = {"eval_accuracy": "accuracy", "eval_low": "low", "eval_high": "high"}
        self.log(numbers({name: record.get(key) for name, key in names.items()}), record["step"])

    @abstractmethod
    def log(self, values: Mapping[str, float], step: int) -> None:
        """Send these values to the tracker."""


class TensorBoard(Tracker):
    """Writes event files into the run's folder; ``tensorboard --logdir RUN`` shows them."""

    _writer: Any = None

    def begin(self, title: str, steps: int, first: int, machine: str = "") -> None:
        """Open an event file; values that an earlier process logged after step ``first`` are hidden."""
        self._writer = self.package.SummaryWriter(
            str(self.folder / "tensorboard"), purge_step=first + 1 if first else None
        )

    def log(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def end(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class RunTracker(Tracker, ABC):
    """A tracker whose package has runs: ``init`` starts one, which is resumed with the training."""

    _run: Any = None

    def start(self, **options: Any) -> None:
        """Call the package's ``init`` with the project, the folder's name, the recipe and ``options``."""
        with redirect_stdout(sys.stderr):  # trackio prints, and stdout may carry JSON
            self._run = self.package.init(
                project=self.recipe.tracking.project,
                name=self.folder.resolve().name,
                config=self.recipe.model_dump(mode="json"),
                **options,
            )

    def kept_id(self, file: str, first: int) -> str:
        """The id of this run in the tracker, from a file in the run folder; a new one unless training is resumed."""
        known = self.folder / file
        if not (first and known.exists()):
            known.write_text(uuid.uuid4().hex[:12], encoding="utf-8")
        return known.read_text(encoding="utf-8")

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._run.log(dict(values), step=step)

    def end(self) -> None:
        if self._run is not None:
            with redirect_stdout(sys.stderr):
                self._run.finish()
            self._run = None


class WeightsAndBiases(RunTracker):
    """A run in a project of Weights & Biases; its id is kept in the run folder."""

    def begin(self, title: str, steps: int, first: int, machine: str = "") -> None:
        """Start the run or resume it; raises UserError if Weights & Biases refuses."""
        settings = self.package.Settings(console="off", silent=True)  # the display uses the terminal
        try:
            self.start(dir=str(self.folder), id=self.kept_id("wandb-id", first), resume="allow", settings=settings)
        except self.package.Error as error:
            raise UserError(
                f"tracking.kind: wandb did not start ({error}); run: wandb login, or set WANDB_MODE=offline"
            ) from error


class Trackio(RunTracker):
    """A run in trackio's local database; ``trackio show`` shows it."""

    def begin(self, title: str, steps: int, first: int, machine: str = "") -> None:
        self.start(resume="allow" if first else "never", embed=False)


class SwanLab(RunTracker):
    """An experiment in a project of SwanLab; its id is kept in the run folder."""

    def begin(self, title: str, steps: int, first: int, machine: str = "") -> None:
        """Start the experiment or resume it; raises UserError if SwanLab refuses."""
        try:
            self.start(log_dir=str(self.folder / "swanlab"), id=self.kept_id("swanlab-id", first), resume="allow")
        except (RuntimeError, OSError) as error:
            raise UserError(
                f"tracking.kind: swanlab did not start ({error}); run: swanlab login, or set SWANLAB_MODE=offline"
            ) from error


class MLflow(Tracker):
    """A run in an experiment of MLflow, at the server or the file that MLFLOW_TRACKING_URI names."""

    _begun = False

    def begin(self, title: str, steps: int, first: int, machine: str = "") -> None:
        """Start the run or resume it, with the recipe's keys as parameters; raises UserError if MLflow refuses."""
        known = self.folder / "mlflow-id"
        try:
            self.package.set_experiment(self.recipe.tracking.project)
            if first and known.exists():
                self.package.start_run(run_id=known.read_text(encoding="utf-8"))
            else:
                run = self.package.start_run(run_name=self.folder.resolve().name)
                known.write_text(run.info.run_id, encoding="utf-8")
                keys = flattened(self.recipe.model_dump(mode="json"))
                self.package.log_params({name: str(value)[:LONGEST] for name, value in keys})
        except self.package.exceptions.MlflowException as error:
            reason = first_line(error)[:LONGEST]
            raise UserError(
                f"tracking.kind: mlflow did not start ({reason}); set MLFLOW_TRACKING_URI, for example to "
                "sqlite:///mlflow.db, which needs the whole package mlflow"
            ) from error
        self._begun = True

    def log(self, values: Mapping[str, float], step: int) -> None:
        self.package.log_metrics(dict(values), step=step)

    def end(self) -> None:
        if self._begun:
            self.package.end_run()
            self._begun = False


def numbers(record: JsonObject) -> dict[str, float]:
    """The finite numbers of a record, without ``step``."""
    return {
        name: value
        for name, value in record.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and name != "step"
    }
