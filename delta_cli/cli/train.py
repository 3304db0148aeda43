"""``delta train``."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from backends.launch import LAUNCHER
from backends.process import rank_and_size
from delta_cli.cli import app
from delta_cli.cli.lossy_output import lossy_output
from delta_cli.cli.options import BackendOption, RecipeArgument, SetOption, quickstart
from delta_cli.cli.say import say, say_aside
from delta_cli.errors import UserError

if TYPE_CHECKING:
    from backends.interface import Collective
    from delta_cli.recipe import Recipe
    from delta_cli.reporting.console import DisplayMode


@app.command(short_help="Train a model by a recipe, or resume a run.")
def train(
    recipe: RecipeArgument = None,
    backend: BackendOption = "auto",
    set_: SetOption = None,
    run_dir: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Run folder. Default: a new folder in runs/.", show_default=False),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Resume from the newest intact checkpoint: of --run-dir, or of the newest unfinished run.",
        ),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the recipe and what it needs, and do not train.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print warnings only.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one line of JSON for each step.")] = False,
    processes: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=1024,
            metavar="N",
            help="Processes on this machine. Default: the recipe's.",
            show_default=False,
        ),
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option(min=1, max=1024, help="Processor threads of each process.", show_default="the cores it may use"),
    ] = None,
) -> None:
    """Train a model by a recipe."""
    from backends import registry
    from backends.collective import from_first

    own = {"parallel.processes": processes, "run.threads": threads}
    overrides = [*(set_ or ()), *(f"{name}={value}" for name, value in own.items() if value is not None)]
    mode: DisplayMode = "json" if json else "quiet" if quiet else "auto"
    rank, size = rank_and_size()
    if size > 1:  # started with others by a launcher: rank 0 decides for all
        ranks = registry.join(registry.resolve(backend))
        choice = _choose(recipe, run_dir, resume, overrides) if rank == 0 else None
        folder, loaded = from_first(ranks, choice)
        with lossy_output():
            code = _train(loaded, backend, folder, mode, resume, ranks)
        os._exit(code)  # all is written; torch's threads may abort while the interpreter shuts down
    folder, loaded = _choose(recipe, run_dir, resume, overrides, dry_run)
    if dry_run:
        _dry_run(loaded, backend, mode)
    elif loaded.parallel.processes > 1:
        sys.exit(_launch(loaded, recipe, registry.resolve(backend), folder, mode, resume, overrides))
    else:
        with lossy_output():
            code = _train(loaded, backend, folder, mode, resume, registry.join(registry.resolve(backend)))
        sys.exit(code)


def _dry_run(loaded: Recipe, backend: str, mode: DisplayMode) -> None:
    """Print the recipe and what it needs."""
    from json import dumps

    from delta_cli.cli.doctor import report
    from delta_cli.recipe import to_toml

    if mode == "json":
        typer.echo(dumps({"event": "recipe", "recipe": loaded.model_dump()}))
    elif mode == "auto":
        typer.echo(to_toml(loaded))
    report(loaded, backend, run_model=False, json=mode == "json", quiet=mode == "quiet")


def _choose(
    recipe: Path | None, run_dir: Path | None, resume: bool, overrides: Sequence[str], dry_run: bool = False
) -> tuple[Path, Recipe]:
    """The run folder and the recipe. Raises UserError if they do not fit together."""
    from delta_cli.cli.run_folder import recipe_of_run, run_folder
    from delta_cli.recipe import load_recipe

    longer = any(override.partition("=")[0].strip() == "run.steps" for override in overrides)
    folder = run_folder(recipe, run_dir, resume, longer)
    loaded = recipe_of_run(folder, recipe, overrides) if resume else load_recipe(recipe or quickstart(), overrides)
    if not (resume or dry_run) and (folder / "recipe.toml").exists():
        raise UserError(f"{folder}: holds a run already; add --resume to continue it, or choose another --run-dir")
    return folder, loaded


def _launch(
    loaded: Recipe,
    recipe: Path | None,
    backend: str,
    folder: Path,
    mode: DisplayMode,
    resume: bool,
    overrides: Sequence[str],
) -> int:
    """Run this command once for each rank; returns the exit code."""
    from backends.launch import launch
    from delta_cli.runs.status import record_failure

    arguments = ["train", *([str(recipe)] if recipe else []), "--backend", backend, "--run-dir", str(folder)]
    arguments += [part for override in overrides for part in ("--set", override)]
    arguments += [*(["--resume"] if resume else []), *([] if mode == "auto" else [f"--{mode}"])]
    return launch(backend, loaded.parallel, arguments, partial(record_failure, folder))


def _train(recipe: Recipe, backend: str, folder: Path, mode: DisplayMode, resume: bool, ranks: Collective) -> int:
    """Train until the end or until asked to stop; returns the exit code. Only rank 0 prints."""
    from delta_cli.errors import Interrupted
    from delta_cli.reporting.console import console_observer
    from delta_cli.reporting.trackers import with_tracking
    from delta_cli.runs.observer import Observer, ObserverGroup, PhaseObserver
    from delta_cli.runs.status import record_failure, recorded_status
    from delta_cli.training.setup import open_trainer

    stop, stopped, dropped, leads = StopSignal(), None, "", ranks.rank == 0
    observer = with_tracking(console_observer(mode), recipe, folder) if leads else Observer()
    if ranks.watchdog is not None:
        ranks.watchdog.limits = recipe.parallel
        ranks.watchdog.on_failure = partial(record_failure, folder)
        observer = ObserverGroup([observer, PhaseObserver(partial(setattr, ranks.watchdog, "phase"))])
    try:
        with (
            open_trainer(recipe, backend, folder, observer, stop.asked, ranks, new=not resume) as trainer,
            recorded_status(folder, ranks.rank),
        ):
            trainer.run(resume)
    except Interrupted as interrupted:
        stopped, dropped = interrupted.step, interrupted.dropped
    finally:
        observer.end()
    ranks.close()
    if stopped is not None:
        if leads:
            say_aside(f"stopped after step {stopped}; continue with: delta train --resume --run-dir {folder}")
            if dropped:
                say_aside(f"dropped: the unfinished {dropped} phase, which is then done again")
        return 128 + (stop.number or signal.SIGTERM)  # SIGTERM: another rank got the signal
    if mode == "auto" and leads:
        say(f"done: {folder}  (the model is in {folder / 'model'})")
    return 0


STOPS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]


class StopSignal:
    """Ctrl-C, SIGTERM or SIGHUP stops the run at the next safe point. A second signal ends it at once."""

    def __init__(self) -> None:
        self.number = 0
        for each in STOPS:
            if signal.getsignal(each) != signal.SIG_IGN:  # under nohup the run outlives its terminal
                signal.signal(each, self._hear)

    def asked(self) -> bool:
        """Whether a signal came, or the process that started this rank is gone."""
        return self.number != 0 or self._orphaned()

    def _orphaned(self) -> bool:
        launcher = os.environ.get(LAUNCHER)
        return launcher is not None and os.getppid() != int(launcher)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self.number = number
        for each in STOPS:
            signal.signal(each, signal.SIG_DFL)
        if rank_and_size()[0]:
            return  # rank 0 says it
        # Not print: the signal may have interrupted a print, which cannot be entered twice.
        with suppress(OSError):
            os.write(2, b"stopping at the next safe point; once more to stop at once\n")
