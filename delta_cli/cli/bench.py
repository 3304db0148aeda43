"""``delta bench``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from delta_cli.cli import app

if TYPE_CHECKING:
    from delta_cli.bench.arms import BenchArm

QUICK_TASKS = ["fork"]  # on which a good credit is known to win
QUICK_ARMS = ["dapo", "wrong side × 0.5", "solver", "solver, flipped", "random", "surprisal"]
FULL_TASKS = ["fork", "chain", "addition", "noisy"]
QUICK_SEEDS, SEEDS = 12, 16


@app.command(short_help="Compare a token credit of your own with others on equal terms.")
def bench(
    credit: Annotated[
        list[str] | None,
        typer.Option(metavar="FILE.py:FUNCTION", help="A credit to compare; several may be given.", show_default=False),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A first answer: one task, few seeds and arms.")] = False,
    task: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Tasks; by default all that need no model of yours.")
    ] = None,
    arm: Annotated[list[str] | None, typer.Option(metavar="NAME", help="Built-in arms; by default all.")] = None,
    seeds: Annotated[int | None, typer.Option(metavar="N", min=1, help="Seeds of every arm.")] = None,
    first_seed: Annotated[int, typer.Option(metavar="N", min=0, help="The first of them.")] = 0,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change the recipe of every arm.")
    ] = None,
    smollm2: Annotated[Path | None, typer.Option(metavar="DIR", help="SmolLM2-135M-Instruct, for task words.")] = None,
    sparse_base: Annotated[
        Path | None, typer.Option(metavar="DIR", help="A base for task sparse (benchmarks/make_tiny_base.py).")
    ] = None,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder of the answers and the page.")] = Path("bench"),
    jobs: Annotated[int, typer.Option(metavar="N", min=1, help="Processes at a time.")] = 2,
    backend: Annotated[str, typer.Option(metavar="NAME", help="auto, cpu, cuda, mlx or fake.")] = "cpu",
    summary: Annotated[bool, typer.Option("--summary", help="Write the page of what is there; run nothing.")] = False,
) -> None:
    """Compare token credits: do they find the mistake, is the gradient better, do they learn faster, what do they cost.

    A stopped bench continues when the same command is given again.

    delta bench --credit my_credit.py:weights --quick
    """
    from backends import registry
    from delta_cli.bench.runner import plan, run
    from delta_cli.bench.tasks import find_tasks
    from delta_cli.runs.folder import alone

    arms = _arms(credit or [], arm, quick)
    models = {"--smollm2": smollm2, "--sparse-base": sparse_base}
    tasks = find_tasks(task or (QUICK_TASKS if quick else FULL_TASKS), models)
    count = seeds or (QUICK_SEEDS if quick else SEEDS)
    units = list(plan(tasks, arms, range(first_seed, first_seed + count), registry.resolve(backend), quick, set_ or ()))
    for unit in units:
        unit.recipe(*unit.arm.changes)  # so that a mistake in --set shows before anything runs
    with alone(out, "bench"):
        if not summary:
            run(units, out / "answers.jsonl", jobs, typer.echo)
        _page(out)


def _arms(credits: list[str], names: list[str] | None, quick: bool) -> list[BenchArm]:
    """The arms to compare: DAPO, the built-in ones chosen, and the user's own."""
    from delta_cli.bench.arms import ARMS, DAPO, find_arms, own_arm

    chosen = find_arms(names if names is not None else QUICK_ARMS if quick else list(ARMS))
    return list(dict.fromkeys([DAPO, *chosen, *map(own_arm, credits)]))


def _page(out: Path) -> None:
    """Print the page, and write it as text, HTML and JSON."""
    import json
    from dataclasses import asdict

    from rich.console import Console

    from delta_cli.bench import page
    from delta_cli.bench.runner import records
    from delta_cli.bench.summary import summarise
    from delta_cli.doctor.machine import describe_machine
    from delta_cli.errors import UserError

    answers = records(out / "answers.jsonl")
    if not answers:
        raise UserError(f"{out}: no answers yet; run the command without --summary first")
    found = summarise(answers)
    hours = sum(record["seconds"] for record in answers) / 3600
    about = f"{len(answers)} answers, {hours:.1f} hours of one core in all."
    (out / "page.html").write_text(page.as_html(found, about), encoding="utf-8")
    with (out / "page.txt").open("w", encoding="utf-8") as file:
        Console(file=file, width=170).print(page.as_text(found, about), highlight=False)
    machine = asdict(describe_machine("cpu"))
    (out / "summary.json").write_text(
        json.dumps({"machine": machine, "tasks": [asdict(task) for task in found]}, indent=1) + "\n", encoding="utf-8"
    )
    console = Console(width=max(Console().width, 150))  # a narrow terminal breaks lines; it would break words here
    console.print(page.as_text(found, about), highlight=False)
    console.print(f"written to {out}", highlight=False)
