"""A reference to weights: a model, or a run at one of its steps. Evaluations and exports take one."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from backends import registry
from backends.interface import Learner
from backends.settings import BackendSettings
from delta_cli.assets import model_path
from delta_cli.errors import UserError
from delta_cli.recipe import Recipe, load_recipe
from delta_cli.recipe.backend_settings import backend_settings
from delta_cli.runs import checkpoint, export_stamp
from delta_cli.runs.folder import BACKEND_WRITES, RunFolder

BASE = ("base", "0")  # the model that the run started from
CHOICES = "best, last, base or the number of a step"


@dataclass(frozen=True)
class CheckpointReference:
    """A model, or a run with its recipe and the checkpoint of the requested step."""

    name: str  # as the user gave it
    settings: BackendSettings
    recipe: Recipe | None = None
    checkpoint: Path | None = None  # None: the weights are those of settings.model.path
    step: int | None = None  # of a run; None if unknown

    @property
    def weights(self) -> str:
        """The folder or hub name of the weight files."""
        return str(self.checkpoint or self.settings.model.path)

    def with_threads(self, threads: int | None) -> CheckpointReference:
        """The same with another number of processor threads; None keeps it."""
        return self if threads is None else replace(self, settings=replace(self.settings, threads=threads))

    def load_into(self, learner: Learner) -> None:
        """Load the step's weights into a learner created from ``settings``."""
        if self.checkpoint is not None:
            learner.load(self.checkpoint)


def find_checkpoint(
    name: str, which: str | None = None, say: Callable[[str], None] = lambda line: None
) -> CheckpointReference:
    """Find the model or run ``name``; for a run the step ``which``: "best", "last" (also None), a number, or "base"
    (also "0") for the model that the run started from.

    Prefers the exported model if it holds that step, otherwise the checkpoint. Calls ``say`` with a line for each
    damaged checkpoint it skips. Raises UserError if there is no such step.
    """
    run = RunFolder(Path(name))
    if not run.started:
        if which is not None:
            raise UserError(f"--checkpoint {which}: {name} is a model, not a run that delta train wrote; leave it out")
        settings = BackendSettings.of(model_path(name), frozen=True)
        return CheckpointReference(name, settings, step=export_stamp.step_of(Path(name)))
    recipe = load_recipe(run.recipe)
    if which in BASE:
        return base_model(recipe, name)
    step = _step(run, which or "last", say)
    if (run.model / "config.json").is_file() and step == export_stamp.step_of(run.model):
        return CheckpointReference(name, BackendSettings.of(str(run.model), frozen=True), recipe, step=step)
    assert step is not None  # only an exported model may not know its step
    folder = checkpoint.folder_of(run.checkpoints, step)
    problem = checkpoint.check(folder) if folder.is_dir() else f"it is not there ({_there(run)})"
    if problem is not None:
        raise UserError(f"{folder}: {problem}; choose another --checkpoint: {CHOICES}")
    return CheckpointReference(name, backend_settings(recipe), recipe, folder, step)


def base_model(recipe: Recipe, name: str) -> CheckpointReference:
    """The model before the first update of a run of the recipe."""
    return CheckpointReference(name, _base_settings(recipe), recipe, step=0)


def _base_settings(recipe: Recipe) -> BackendSettings:
    """The model before the first update: the recipe's, with the adapter and the quantisation that it sets."""
    if recipe.model.adapter or recipe.model.load_in_4bit:
        return backend_settings(recipe)
    return BackendSettings.of(model_path(recipe.model.path), frozen=True)


def _step(run: RunFolder, which: str, say: Callable[[str], None]) -> int | None:
    """The step that ``which`` names; None for an exported model without a stamp."""
    if which.isdecimal():
        return int(which)
    if which not in ("best", "last"):
        raise UserError(f"--checkpoint {which}: choose {CHOICES} ({_there(run)})")
    newest = max(checkpoint.steps(run.checkpoints), default=None)
    if which == "last" and newest in (export_stamp.step_of(run.model), None):
        if (run.model / "config.json").is_file():
            return export_stamp.step_of(run.model)
        raise UserError(
            f"{run.path}: this run has neither a model nor a checkpoint yet; wait, or evaluate its base model"
        )
    found, damaged = checkpoint.find(run.checkpoints)
    for line in damaged:
        say(line)
    if found is None:
        raise UserError(f"{run.checkpoints}: no checkpoint is whole; {damaged[0] if damaged else 'there is none'}")
    state = checkpoint.read_state(found)
    if which == "last":
        return state.step
    if state.best_step is None:
        raise UserError(
            f"{run.path}: no best checkpoint was kept; set checkpoint.keep_best before training, e.g. to eval_accuracy"
        )
    return state.best_step


def _there(run: RunFolder) -> str:
    steps = checkpoint.steps(run.checkpoints)
    if not steps:
        return "there are no checkpoints"
    return (
        f"there are checkpoints of the steps {', '.join(map(str, steps))}"
        if steps[1:]
        else f"only step {steps[0]} has one"
    )


def export_model(
    reference: CheckpointReference, backend_name: str, out: Path, finish: Callable[[Path], Path] = lambda folder: folder
) -> None:
    """Write the referenced model to the folder ``out``, which appears complete or not at all.

    ``finish`` receives the folder under its temporary name, may add files or convert it into another folder, and
    returns the folder that becomes ``out``. Raises UserError if the disk refuses a write.
    """
    if reference.step == 0 and reference.recipe is not None:
        path = reference.settings.model.path
        raise UserError(f"--checkpoint base is {path} itself; choose another one to export")
    model = Path(reference.settings.model.path)
    if reference.checkpoint is None and not any(model.glob("*.safetensors")):
        raise UserError(f"{model}: has no *.safetensors file to export; choose a checkpoint with --checkpoint STEP")
    partial = out.with_name(f".{out.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        if reference.checkpoint is None:
            shutil.copytree(reference.settings.model.path, partial)
        else:
            partial.mkdir(parents=True)
            with closing(registry.create(backend_name, reference.settings)) as learner:
                reference.load_into(learner)
                learner.export(partial)
        chosen = finish(partial)
        if reference.step is not None:
            export_stamp.write_step(chosen, reference.step)
        if out.is_dir():
            out.rmdir()  # empty
        chosen.rename(out)
        if chosen != partial:
            shutil.rmtree(partial)
    except (OSError, *BACKEND_WRITES) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise UserError(f"{out}: cannot be written ({error}); make room, or choose another folder") from error
