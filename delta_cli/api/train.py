"""Training from Python: ``delta_cli.train``."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

from backends import registry
from backends.collective import SOLO
from backends.interface import Collective
from delta_cli.api.resume import recipe_of_run
from delta_cli.api.run import Run
from delta_cli.errors import Interrupted, UserError
from delta_cli.recipe import Recipe, load_recipe, parse_recipe
from delta_cli.recipe.loading import merge, nested
from delta_cli.reporting.console import DisplayMode, console_observer
from delta_cli.reporting.trackers import with_tracking
from delta_cli.runs import RUNS
from delta_cli.runs.folder import next_folder
from delta_cli.runs.observer import Observer, ObserverGroup, PhaseObserver
from delta_cli.runs.status import record_failure, recorded_status
from delta_cli.runs.stop_signal import StopSignal
from delta_cli.training.setup import open_trainer

Changes = Mapping[str, Any]


def train(
    recipe: str | Path | Recipe | Changes = "quickstart",
    *,
    backend: str = "auto",
    folder: str | Path | None = None,
    resume: bool = False,
    fit: bool = False,
    display: DisplayMode = "auto",
    **changes: Any,
) -> Run:
    """Train a model by a recipe in this process, and return the run.

    ``recipe`` is a file, the name of a shipped recipe, a Recipe, or a mapping of sections. ``changes`` replace its
    keys: sections as mappings, or dotted names::

        run = delta_cli.train("quickstart", run={"steps": 20}, rollout={"responses": 8})
        run = delta_cli.train("mine.toml", **{"update.learning_rate": 1e-4})

    ``folder`` is the run's folder (default: a new one in runs/); ``resume`` continues the run in it with the recipe
    that it has. ``fit`` sets smaller batches if the recipe does not fit this machine. Ctrl-C, or the stop button of a
    notebook, saves and returns the run. Raises UserError or BackendError, with one line each.
    """
    name = registry.resolve(backend)
    place, chosen = _chosen(recipe, folder, resume, _table(changes))
    if chosen.parallel.processes > 1:
        raise UserError(
            f"parallel.processes = {chosen.parallel.processes}: from Python a run has one process; use delta train"
        )
    if fit:
        from delta_cli.doctor.fit import with_fit
        from delta_cli.doctor.machine import describe_machine

        chosen = with_fit(chosen, describe_machine(name), name)[0]
    with StopSignal() as stop:
        stopped = run_recipe(chosen, name, place, console_observer(display), resume, SOLO, stop)
    if stopped is not None and display != "quiet":
        print(f"stopped after step {stopped.step}; continue with: delta_cli.train(folder={str(place)!r}, resume=True)")
    return Run(place, name)


def run_recipe(
    recipe: Recipe,
    backend: str,
    folder: Path,
    display: Observer,
    resume: bool,
    ranks: Collective,
    stop: StopSignal,
) -> Interrupted | None:
    """Train until the end, or until ``stop`` asks to end; returns what was saved then. Every rank calls it."""
    observer = with_tracking(display, recipe, folder) if ranks.rank == 0 else Observer()
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
        return interrupted
    finally:
        observer.end()
    return None


def _chosen(
    recipe: str | Path | Recipe | Changes, folder: str | Path | None, resume: bool, over: dict[str, Any]
) -> tuple[Path, Recipe]:
    """The run's folder and its recipe."""
    if resume:
        if folder is None:
            raise UserError("resume=True continues the run in a folder; give it, as in folder='runs/quickstart-1'")
        return Path(folder), recipe_of_run(Path(folder), None, (), over)
    if isinstance(recipe, Recipe | Mapping):
        table = recipe.model_dump() if isinstance(recipe, Recipe) else deepcopy(dict(recipe))
        merge(table, over)
        loaded, name = parse_recipe(table, "the recipe"), "run"
    else:
        loaded, name = load_recipe(Path(recipe), over=over), Path(recipe).stem
    return (next_folder(RUNS, name) if folder is None else Path(folder)), loaded


def _table(changes: Changes) -> dict[str, Any]:
    """The changes as nested tables: ``{"run.steps": 3}`` is ``{"run": {"steps": 3}}``."""
    table: dict[str, Any] = {}
    for name, value in changes.items():
        merge(table, nested(name.split("."), deepcopy(value)))
    return table
