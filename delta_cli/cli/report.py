"""``delta report``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from delta_cli.cli import app
from delta_cli.cli.say import say

RELOAD_SECONDS = 20  # between two pages of --follow


@app.command(short_help="Write a page about one or several runs.")
def report(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN", help="Run folders; the curves of several share one figure.")
    ],
    output: Annotated[Path, typer.Option(metavar="FILE", help="The page to write.")] = Path("report.html"),
    open_: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
    follow: Annotated[
        bool, typer.Option("--follow", help="Write the page again while a run trains; a browser reloads it.")
    ] = False,
    figures: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Also write the figures here, as PNG and SVG.", show_default=False),
    ] = None,
) -> None:
    """Write one HTML page that opens offline: curves, evaluations, responses and heatmaps."""
    import time
    import webbrowser

    from delta_cli.reporting.report import write_report
    from delta_cli.reporting.run_list import summary_of

    files = write_report(runs, output, figures, reload=RELOAD_SECONDS if follow else None)
    for file in files:
        say(str(file))
    if open_:
        webbrowser.open(output.resolve().as_uri())
    while follow and any(summary_of(run).state == "going" for run in runs):
        time.sleep(RELOAD_SECONDS)
        write_report(runs, output, figures, reload=RELOAD_SECONDS)
    if follow:
        write_report(runs, output, figures)
