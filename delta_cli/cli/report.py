"""``delta report``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from delta_cli.cli import app
from delta_cli.cli.say import say


@app.command(short_help="Write a page about one or several runs.")
def report(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN", help="Run folders; the curves of several share one figure.")
    ],
    output: Annotated[Path, typer.Option(metavar="FILE", help="The page to write.")] = Path("report.html"),
    figures: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Also write the figures here, as PNG and SVG.", show_default=False),
    ] = None,
) -> None:
    """Write one HTML page that opens offline: curves, evaluations, responses and heatmaps."""
    from delta_cli.reporting.report import write_report

    for file in write_report(runs, output, figures):
        say(str(file))
