"""``delta runs``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from delta_cli.cli import app
from delta_cli.cli.say import say
from delta_cli.errors import UserError
from delta_cli.runs import RUNS

if TYPE_CHECKING:
    from delta_cli.reporting.run_list import RunSummary


@app.command(short_help="List runs and their state.")
def runs(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder to search, with its subfolders.")] = RUNS,
    prune: Annotated[
        bool,
        typer.Option("--prune", help="Delete runs that ended without a checkpoint or a model, after showing them."),
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="With --prune: do not ask.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one line of JSON for each run.")] = False,
) -> None:
    """List runs with their state, step, last and best held-out accuracy, method and model.

    going: a process is training in it. done: the last step and the exported model exist. stopped: stopped on request
    and saved. failed: ended with an error, which is shown. died: ended without a message, as in a power cut.
    """
    from json import dumps

    from rich.console import Console

    from delta_cli.reporting.run_list import RunTable, find_runs

    if not folder.is_dir():
        raise UserError(
            f"{folder}: is not a folder; train something first, or give the folder of the runs: delta runs DIR"
        )
    found = find_runs(folder)
    if not found:
        raise UserError(
            f"{folder}: holds no run; train something first, or give the folder of the runs: delta runs DIR"
        )
    if prune:
        _prune(found, yes)
        return
    if json:
        for run in found:
            typer.echo(dumps(run.as_json()))
        return
    Console(highlight=False).print(RunTable(found))


def _prune(found: list[RunSummary], yes: bool) -> None:
    """Show the runs that hold nothing to keep, ask, and delete them."""
    import shutil
    import sys

    from delta_cli.reporting.run_list import empty_runs, folder_bytes, held
    from delta_cli.text import count, memory

    empty = empty_runs(found)
    if not empty:
        say("nothing to delete: every run has a checkpoint or a model, or is still training")
        return
    for run in empty:
        say(f"{run.path}: {run.state} after step {run.step} of {run.steps}, {memory(folder_bytes(run.path))}")
    if not yes and not (sys.stdin.isatty() and typer.confirm(f"Delete {count(len(empty), 'folder')}?", default=False)):
        say("nothing was deleted; to delete them without a question, add --yes")
        return
    for run in empty:
        if not held(run.path):  # nobody has resumed it meanwhile
            shutil.rmtree(run.path)
    say(f"deleted {count(len(empty), 'folder')}")
