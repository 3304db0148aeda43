"""``delta inspect`` and ``delta report``: look at what a run did."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from delta_cli.cli import app


class Format(StrEnum):
    """How an inspection is written."""

    text = "text"
    html = "html"
    json = "json"


class Scope(StrEnum):
    """Which tokens the table of amplified and damped ones counts."""

    batch = "batch"
    run = "run"


@app.command(short_help="Show where the credit of a step went.")
def inspect(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run, going on or ended.")],
    step: Annotated[
        int | None, typer.Option(metavar="N", help="Which step; without it, the newest.", show_default=False)
    ] = None,
    problem: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="A problem: its id, its number, or words of it.", show_default=False),
    ] = None,
    tokens: Annotated[
        Scope, typer.Option(metavar="batch|run", help="Count tokens over the step's batch, or over the run.")
    ] = Scope.batch,
    format_: Annotated[
        Format,
        typer.Option("--format", metavar="text|html|json", help="In the terminal, or a file to standard output."),
    ] = (Format.text),
) -> None:
    """Show where the credit of a step went: responses side by side, token by token."""
    from delta_cli.reporting.inspection import inspect_run, to_json

    found = inspect_run(run, step, problem, whole_run=tokens is Scope.run)
    if format_ is Format.json:
        typer.echo(to_json(found))
    elif format_ is Format.html:
        from delta_cli.reporting.html_pages import inspection_page

        typer.echo(inspection_page(found))
    else:
        from rich.console import Console

        from delta_cli.reporting.inspection_text import render

        Console().print(render(found))


@app.command(short_help="Write a page about one or several runs.")
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN", help="Runs; several are laid over each other.")],
    output: Annotated[Path, typer.Option(metavar="FILE", help="The page to write.")] = Path("report.html"),
    figures: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder for the figures as PNG and SVG.", show_default=False)
    ] = None,
) -> None:
    """Write one page that opens offline: curves, evaluations, completions, heatmaps."""
    from delta_cli.reporting.report import write_report

    for file in write_report(runs, output, figures):
        typer.echo(file)
