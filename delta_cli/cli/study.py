"""``delta study``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from delta_cli.cli import app


@app.command()
def study(
    plan: Annotated[Path, typer.Argument(help="A study, e.g. recipes/study_quickstart.toml.")],
    out: Annotated[
        Path | None, typer.Option(help="Folder of the study; without one, studies/NAME.", show_default=False)
    ] = None,
    seeds: Annotated[int | None, typer.Option(help="So many seeds.", show_default=False)] = None,
    jobs: Annotated[int | None, typer.Option(help="So many runs at a time.", show_default=False)] = None,
    summary: Annotated[bool, typer.Option("--summary", help="Sum up what is finished; run nothing.")] = False,
) -> None:
    """Run a grid of methods and seeds and write its table, as text, JSON and a figure.

    Called again, it goes on where it stopped.
    """
    import json
    from dataclasses import asdict

    from rich.console import Console

    from delta_cli.doctor.machine import look
    from delta_cli.study import render
    from delta_cli.study import summary as results
    from delta_cli.study.grid import Cell, run_grid
    from delta_cli.study.plan import load_study
    from delta_cli.training.run_folder import writing

    changes = {name: value for name, value in (("seeds", seeds), ("jobs", jobs)) if value is not None}
    loaded = load_study(plan, **changes)
    folder = out or Path("studies") / loaded.name
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)

    def report(done: int, total: int, cell: Cell) -> None:
        typer.echo(f"{done}/{total}  {cell.folder.name}")

    if not summary:
        run_grid(loaded, plan.parent, folder, report)
    found = results.outcomes(loaded, folder)
    rows = results.summarise(loaded, found)
    table = render.table(loaded, rows)
    with writing(folder):
        with (folder / "table.txt").open("w", encoding="utf-8") as file:
            Console(file=file, width=140).print(table)
        record = results.as_json(loaded, found, rows) | {"machine": asdict(look(loaded.backend))}
        (folder / "study.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        render.figure(loaded, found, rows, [folder / "curves.png", folder / "curves.svg"])
    console = Console()
    console.print(table)
    console.print(f"written to {folder}", highlight=False)
