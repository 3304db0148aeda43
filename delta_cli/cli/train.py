"""``delta train``."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from delta_cli.cli import app
from delta_cli.cli.options import BackendOption, RecipeArgument, SetOption, quickstart
from delta_cli.errors import UserError

if TYPE_CHECKING:
    from delta_cli.recipe import Recipe
    from delta_cli.reporting.console import Mode


@app.command()
def train(
    recipe: RecipeArgument = None,
    backend: BackendOption = "auto",
    set_: SetOption = None,
    run_dir: Annotated[
        Path | None, typer.Option(help="Folder of the run; without one, a new folder below runs/.", show_default=False)
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest whole checkpoint.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the recipe and what it needs; train nothing.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print only what is wrong.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print a line of JSON for each step.")] = False,
) -> None:
    """Train a model by a recipe."""
    from delta_cli.cli.choose import recipe_of_run, run_folder
    from delta_cli.recipe import load_recipe, to_toml

    overrides = tuple(set_ or ())
    folder = run_folder(recipe, run_dir, resume)
    loaded = recipe_of_run(folder, recipe, overrides) if resume else load_recipe(recipe or quickstart(), overrides)
    if dry_run:
        from delta_cli.cli.doctor import report

        typer.echo(to_toml(loaded))
        report(loaded, backend, run_model=False)
        return
    if not resume and (folder / "recipe.toml").exists():
        raise UserError(f"{folder}: holds a run already; add --resume to go on with it, or choose another --run-dir")
    mode: Mode = "json" if json else "quiet" if quiet else "auto"
    sys.exit(_train(loaded, backend, folder, mode, resume))


def _train(recipe: Recipe, backend: str, folder: Path, mode: Mode, resume: bool) -> int:
    """Run to the end or until asked to stop; the exit code."""
    from delta_cli.reporting.console import console_observer
    from delta_cli.reporting.trackers import with_tracking
    from delta_cli.training.setup import open_trainer
    from delta_cli.training.trainer import Interrupted

    stop, stopped = StopSignal(), None
    observer = with_tracking(console_observer(mode), recipe, folder)
    try:
        with open_trainer(recipe, backend, folder, observer, stop.asked) as trainer:
            trainer.run(resume)
    except Interrupted as interrupted:
        stopped = interrupted.step
    finally:
        observer.end()
    if stopped is not None:
        typer.echo(f"stopped after step {stopped}; go on with: delta train --resume --run-dir {folder}", err=True)
        return 128 + stop.number
    if mode == "auto":
        typer.echo(f"done: {folder}  (the model is in {folder / 'model'})")
    return 0


class StopSignal:
    """The first Ctrl-C or SIGTERM asks the run to stop where that loses nothing; the second ends it at once."""

    def __init__(self) -> None:
        self.number = 0
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, self._hear)

    def asked(self) -> bool:
        """Whether a signal came."""
        return self.number != 0

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self.number = number
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, signal.SIG_DFL)
        # Not print: the signal may have come in the middle of one, which cannot be entered twice.
        os.write(2, b"stopping at the next safe point; once more to stop at once\n")
