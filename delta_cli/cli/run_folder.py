"""The folder of a run: a new one, or the one to resume, and the recipe to resume it with."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from backends.launch import LAUNCHER
from delta_cli.cli.options import RUNS
from delta_cli.cli.say import say_aside
from delta_cli.errors import UserError

if TYPE_CHECKING:
    from delta_cli.recipe import Recipe

# What may change when a run is resumed: its length, what is watched and kept, how it fits into the machine, and the
# learning rate, which may have to be lowered after a run diverged.
CHANGEABLE = (
    *("run.steps", "run.threads", "evaluation.", "checkpoint.", "tracking.", "reward.workers", "reward.timeout"),
    *("rollout.batch", "update.micro_batch_tokens", "update.head_chunk_tokens"),
    *("update.feature_bytes", "update.feature_host_bytes", "update.offload", "parallel."),
    *("model.gradient_checkpointing", "update.learning_rate"),
)


def run_folder(recipe: Path | None, chosen: Path | None, resume: bool, longer: bool = False) -> Path:
    """The ``chosen`` folder; otherwise the newest run of this recipe to resume, or a new name.

    To resume without a recipe, it is the newest unfinished run of any recipe, or a finished one that is to become
    ``longer``. At a terminal the person confirms it.
    """
    if chosen is not None:
        return chosen
    if resume and recipe is None:
        return _newest_unfinished(longer)
    name = "quickstart" if recipe is None else recipe.stem
    taken = sorted(
        (path for path in RUNS.glob(f"{name}-*") if path.name.removeprefix(f"{name}-").isdigit()),
        key=lambda path: int(path.name.removeprefix(f"{name}-")),
    )
    if not resume:
        last = int(taken[-1].name.removeprefix(f"{name}-")) if taken else 0
        return RUNS / f"{name}-{last + 1}"
    if not taken:
        raise UserError(f"{RUNS}/{name}-*: there is no run to resume; give its folder with --run-dir")
    return taken[-1]


def _newest_unfinished(longer: bool) -> Path:
    from delta_cli.reporting.run_list import find_runs
    from delta_cli.text import visible

    runs = [run for run in find_runs(RUNS) if run.state != "damaged"] if RUNS.is_dir() else []
    if not runs:
        raise UserError(f"{RUNS}: there is no run to resume; give its folder with --run-dir")
    open_to = [run for run in runs if run.unfinished or (longer and run.state == "done")]
    if not open_to:
        newest = runs[-1]
        hint = "it is still training" if newest.state == "going" else "to make it longer, add --set run.steps=MORE"
        raise UserError(
            f"{RUNS}: no run is unfinished; the newest is {newest.path}, step {newest.step} of {newest.steps}: {hint}"
        )
    found = open_to[-1]
    said = visible(f"{found.path}: {found.state} after step {found.step} of {found.steps}")
    if sys.stdin.isatty() and sys.stdout.isatty():
        typer.confirm(f"{said}. Resume it?", default=True, abort=True, err=True)
    else:
        say_aside(f"resuming {said}")
    return found.path


def recipe_of_run(folder: Path, given: Path | None, overrides: Sequence[str]) -> Recipe:
    """The recipe to resume with: the run's own with the changes that are given.

    Prints the changes to stderr. Raises UserError if there is no run, or if a key would change that decides the result.
    """
    from delta_cli.recipe import load_recipe
    from delta_cli.recipe.loading import differences, with_overrides

    own = folder / "recipe.toml"
    if not own.is_file():
        raise UserError(f"{folder}: holds no run to resume; to start one there, leave out --resume")
    before = load_recipe(own)
    after = load_recipe(given, overrides) if given else with_overrides(before, overrides)
    changes = differences(before, after)
    refused = [line for name, line in changes if not name.startswith(CHANGEABLE)]
    allowed = [line for name, line in changes if name.startswith(CHANGEABLE)]
    if refused:
        also = f" ({'; '.join(allowed)} would be allowed)" if allowed else ""
        raise UserError(
            f"{own}: resuming would change {'; '.join(refused)}{also}. Only {', '.join(CHANGEABLE)} may change; "
            "start a new run for the rest"
        )
    if allowed and LAUNCHER not in os.environ:  # otherwise the launcher has printed it
        say_aside(f"changed: {'; '.join(allowed)}")
    return after
