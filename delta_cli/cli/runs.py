"""``delta runs``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from delta_cli.cli import app
from delta_cli.cli.options import RUNS
from delta_cli.errors import UserError


@app.command(short_help="List runs and what became of them.")
def runs(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where to look, in it and below it.")] = RUNS,
    json: Annotated[bool, typer.Option("--json", help="Print JSON, a line for each run.")] = False,
) -> None:
    """List runs: method, model, steps, last and best held-out accuracy, and whether they go on.

    going: a process trains in it. done: its last step and its model are there. stopped: asked to end, and saved.
    failed: ended with an error, which is shown. died: ended without a word, as by a power cut.
    """
    from json import dumps

    from rich.console import Console

    from delta_cli.reporting.run_list import RunTable, find_runs

    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; train something first, or say where the runs are: delta runs DIR")
    found = find_runs(folder)
    if not found:
        raise UserError(f"{folder}: holds no run; train something first, or say where the runs are: delta runs DIR")
    if json:
        for run in found:
            typer.echo(dumps(run.as_json(), ensure_ascii=False))
        return
    Console(highlight=False).print(RunTable(found))
