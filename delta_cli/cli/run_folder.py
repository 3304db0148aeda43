"""The folder of a run: a new one, or the one to resume, and the recipe to resume it with."""

from __future__ import annotations

import sys
from pathlib import Path

import typer

from delta_cli.cli.say import say_aside
from delta_cli.errors import UserError
from delta_cli.runs import RUNS
from delta_cli.runs.folder import next_folder, numbered_folders


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
    if not resume:
        return next_folder(RUNS, name)
    taken = numbered_folders(RUNS, name)
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
