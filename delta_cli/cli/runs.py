"""``delta runs``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from delta_cli.cli import app
from delta_cli.errors import UserError
from delta_cli.runs import RUNS


@app.command(short_help="List runs and their state.")
def runs(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder to search, with its subfolders.")] = RUNS,
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
    if json:
        for run in found:
            typer.echo(dumps(run.as_json()))
        return
    Console(highlight=False).print(RunTable(found))
