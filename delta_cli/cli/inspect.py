"""``delta inspect``."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from delta_cli.cli import app
from delta_cli.errors import UserError


class Format(StrEnum):
    """How the inspection is written."""

    text = "text"
    html = "html"
    json = "json"


class TokenScope(StrEnum):
    """Which tokens the table of amplified and damped tokens counts."""

    batch = "batch"
    run = "run"


@app.command(short_help="Show where the credit of a step went.")
def inspect(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="Run folder, which may still be training; or an evaluation's folder.")
    ],
    step: Annotated[
        int | None, typer.Option(metavar="N", help="Step to show. Default: the newest.", show_default=False)
    ] = None,
    problem: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT", help="Show only this problem: its id, its number, or words of it.", show_default=False
        ),
    ] = None,
    tokens: Annotated[
        TokenScope, typer.Option(metavar="batch|run", help="Count tokens over the step's batch, or over the whole run.")
    ] = TokenScope.batch,
    format_: Annotated[
        Format,
        typer.Option(
            "--format", metavar="text|html|json", help="Text for the terminal; html and json go to standard output."
        ),
    ] = Format.text,
) -> None:
    """Show where the credit of a step went: the responses to a problem side by side, token by token.

    Of an evaluation, show the responses, the wrong ones first.
    """
    from delta_cli.reporting.evaluation_inspection import is_evaluation
    from delta_cli.reporting.inspection import inspect_run, to_json

    if is_evaluation(run):
        _evaluation(run, problem, format_)
        return
    found = inspect_run(run, step, problem, whole_run=tokens is TokenScope.run)
    if format_ is Format.json:
        typer.echo(to_json(found))
    elif format_ is Format.html:
        from delta_cli.reporting.html_pages import inspection_page

        typer.echo(inspection_page(found))
    else:
        from rich.console import Console

        from delta_cli.reporting.inspection_text import render

        Console().print(render(found))


def _evaluation(folder: Path, problem: str | None, format_: Format) -> None:
    from json import dumps

    from rich.console import Console

    from delta_cli.reporting.evaluation_inspection import inspect_evaluation, render

    if format_ is Format.html:
        raise UserError("--format html: an evaluation is shown as text or json; choose one of them")
    found = inspect_evaluation(folder, problem)
    if format_ is Format.json:
        typer.echo(dumps(found.as_json(), ensure_ascii=False))
        return
    console = Console()
    for line in render(found):
        console.print(line, highlight=False)
