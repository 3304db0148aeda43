"""``delta study``."""

from __future__ import annotations

import shlex
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from delta_cli.cli import app
from delta_cli.cli.options import SetOption
from delta_cli.cli.say import say_aside
from delta_cli.errors import UserError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from delta_cli.study.plan import Study


class Terminated(BaseException):
    """A signal asked the study to stop."""


@app.command(short_help="Compare settings or methods over several seeds.")
def study(
    plan: Annotated[
        Path, typer.Argument(metavar="STUDY", help="A study, e.g. recipes/study_quickstart.toml, or a recipe.")
    ],
    grid: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=A,B", help="Compare these values of a recipe key; several are combined.", show_default=False
        ),
    ] = None,
    seeds: Annotated[int | None, typer.Option(metavar="N", help="Runs of each arm.", show_default=False)] = None,
    scale: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="tiny: the same protocol on the embedded task.", show_default=False),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder of the study; by default studies/NAME.", show_default=False),
    ] = None,
    jobs: Annotated[int | None, typer.Option(metavar="N", help="Runs at a time.", show_default=False)] = None,
    backend: Annotated[
        str | None, typer.Option(metavar="NAME", help="auto, cpu, cuda, mlx or fake.", show_default=False)
    ] = None,
    set_: SetOption = None,
    summary: Annotated[bool, typer.Option("--summary", help="Summarise finished runs; run nothing.")] = False,
) -> None:
    """Train every arm with every seed and write a table as text, JSON and a figure.

    A study can also measure each run's best checkpoint on a suite. If a study is stopped, the same command
    continues it. One line compares values of a recipe's key:

    delta study quickstart --grid update.learning_rate=2e-4,1e-3 --seeds 3
    """
    from rich.console import Console

    from delta_cli.runs.folder import alone
    from delta_cli.study.plan import load_study
    from delta_cli.study.progress import StudyProgress
    from delta_cli.study.runner import StudyRunner

    options = {"seeds": seeds, "jobs": jobs, "backend": backend}
    given = {name: value for name, value in options.items() if value is not None}  # 0 is given, and then refused
    loaded = load_study(plan, scale, set_ or (), dict(map(_values, grid or ())), **given)
    folder = out or Path("studies") / loaded.name
    try:
        with alone(folder, "study"):
            if not summary:
                signal.signal(signal.SIGTERM, _terminate)
                with StudyProgress(Console()) as progress:
                    progress.runner = StudyRunner(loaded, folder, progress.line)
                    progress.runner.run()
            _sum_up(loaded, folder)
    except Terminated:
        say_aside(f"stopped; continue with: {shlex.join(['delta', *sys.argv[1:]])}")
        raise typer.Exit(128 + signal.SIGTERM) from None


def _values(text: str) -> tuple[str, list[str]]:
    """The key and the values of ``--grid KEY=A,B``."""
    key, _, values = text.partition("=")
    if not key or not values:
        raise UserError(f"--grid {text}: write KEY=A,B, e.g. update.learning_rate=2e-4,1e-3")
    return key.strip(), [value.strip() for value in values.split(",") if value.strip()]


def _terminate(number: int, frame: FrameType | None) -> None:
    raise Terminated


def _sum_up(study: Study, folder: Path) -> None:
    """Print the table, and write it as text, JSON and a figure."""
    import json
    from dataclasses import asdict

    from rich.console import Console

    from backends import registry
    from delta_cli.doctor.machine import describe_machine
    from delta_cli.runs.folder import writing
    from delta_cli.study import render
    from delta_cli.study import summary as results
    from delta_cli.study.checkpoint_table import measured, measured_arms, measured_table

    found = results.outcomes(study, folder)
    rows = results.summarise(study, found)
    backend = registry.default() if study.backend == "auto" else study.backend
    record = results.as_json(study, found, rows) | {"machine": asdict(describe_machine(backend))}
    table: RenderableType = render.table(study, rows)
    if study.measure is not None:
        chosen = measured(study, folder)
        arms = measured_arms(study, chosen)
        table = measured_table(study, arms)
        record["measured"] = [asdict(row) for row in arms]
        record["evaluations"] = [{"arm": each.arm, "seed": each.seed} | each.scores() for each in chosen]
    with writing(folder):
        with (folder / "table.txt").open("w", encoding="utf-8") as file:
            Console(file=file, width=160).print(table)
        (folder / "study.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        render.figure(study, found, rows, [folder / "curves.png", folder / "curves.svg"])
    console = Console()
    console.print(table)
    console.print(f"written to {folder}", highlight=False)
