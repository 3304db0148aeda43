"""``delta train``."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from backends.launch import LAUNCHER
from backends.process import rank_and_size
from delta_cli.cli import app
from delta_cli.cli.lossy_output import lossy_output
from delta_cli.cli.options import BackendOption, RecipeArgument, SetOption, quickstart
from delta_cli.cli.say import say, say_aside
from delta_cli.errors import UserError, delta_command

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
    fit: Annotated[
        bool,
        typer.Option("--fit", help="Set smaller batches if the recipe does not fit this machine; changes no result."),
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
        backend = registry.resolve(backend)
        ranks = registry.join(backend)
        choice = _choose(recipe, run_dir, resume, overrides, fit and backend, not resume) if rank == 0 else None
        folder, loaded, _ = from_first(ranks, choice)
        with lossy_output():
            code = _train(loaded, backend, folder, mode, resume, ranks)
        os._exit(code)  # all is written; torch's threads may abort while the interpreter shuts down
    folder, loaded, overrides = _choose(
        recipe, run_dir, resume, overrides, fit and registry.resolve(backend), new=not (resume or dry_run)
    )
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
    recipe: Path | None,
    run_dir: Path | None,
    resume: bool,
    overrides: list[str],
    fit: str | Literal[False],
    new: bool,
) -> tuple[Path, Recipe, list[str]]:
    """The run folder, the recipe and all overrides. Raises UserError if they do not fit together.

    ``fit`` names the backend whose memory the recipe is made to fit; ``new`` refuses a folder that holds a run.
    """
    from delta_cli.api.resume import recipe_of_run
    from delta_cli.cli.run_folder import run_folder
    from delta_cli.doctor.fit import with_fit
    from delta_cli.doctor.machine import describe_machine
    from delta_cli.recipe import load_recipe

    longer = any(override.partition("=")[0].strip() == "run.steps" for override in overrides)
    folder = run_folder(recipe, run_dir, resume, longer)
    if resume:
        told = LAUNCHER in os.environ  # the launcher has printed what changes
        loaded = recipe_of_run(folder, recipe, overrides, say=(lambda line: None) if told else say_aside)
    else:
        loaded = load_recipe(recipe or quickstart(), overrides)
    if new and (folder / "recipe.toml").exists():
        raise UserError(f"{folder}: holds a run already; add --resume to continue it, or choose another --run-dir")
    if not fit:
        return folder, loaded, overrides
    fitting, found = with_fit(loaded, describe_machine(fit), fit)
    say_aside(f"--fit: {' '.join(f'--set {each}' for each in found) or 'the recipe fits as it is'}")
    return folder, fitting, overrides + found


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
    from backends import registry
    from delta_cli.api.train import run_recipe
    from delta_cli.reporting.console import console_observer
    from delta_cli.runs.observer import Observer
    from delta_cli.runs.stop_signal import StopSignal

    leads, stop = ranks.rank == 0, StopSignal()
    stop.listen()
    display = console_observer(mode) if leads else Observer()
    stopped = run_recipe(recipe, backend, folder, display, resume, ranks, stop)
    ranks.close()
    if stopped is not None:
        if leads:
            chosen = () if backend in ("auto", registry.default()) else ("--backend", backend)
            again = delta_command("train", "--resume", "--run-dir", folder, *chosen)
            say_aside(f"stopped after step {stopped.step}; continue with: {again}")
            if stopped.dropped:
                say_aside(f"dropped: the unfinished {stopped.dropped} phase, which is then done again")
        return 128 + (stop.number or signal.SIGTERM)  # SIGTERM: another rank got the signal
    if mode == "auto" and leads:
        say(f"done: {folder}  (the model is in {folder / 'model'})")
    return 0
