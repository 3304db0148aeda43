"""``delta doctor``."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from delta_cli.cli import app
from delta_cli.cli.options import BackendOption, RecipeArgument, SetOption, quickstart
from delta_cli.errors import UserError

if TYPE_CHECKING:
    from delta_cli.recipe import Recipe

SIGNS = {"ok": "[green]✓[/]", "note": "[blue]·[/]", "wrong": "[red]✗[/]"}
COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)  # GPUs of a plan's table
MOST = 4096


@app.command(short_help="Check machine, recipe, data and model.")
def doctor(
    recipe: RecipeArgument = None,
    backend: BackendOption = "auto",
    set_: SetOption = None,
    gpu: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="RunPlan a run on h100, h200, b200, a100, l40s or rtx4090 instead; runs nothing."
        ),
    ] = None,
    processes: Annotated[
        int | None, typer.Option(metavar="N", help="With --gpu: how many; without it, the recipe's.")
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="With --gpu: local or vllm; without it, the recipe's."),
    ] = None,
    mean_tokens: Annotated[int | None, typer.Option(metavar="N", help="With --gpu: mean length of a response.")] = None,
    seconds: Annotated[
        float | None,
        typer.Option(min=1, metavar="N", help="Longest look at the model; without it, 120.", show_default=False),
    ] = None,
    details: Annotated[bool, typer.Option("--details", help="Print the parts of the memory too.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON; findings, a line each.")] = False,
) -> None:
    """Check machine, recipe, data and model, and run the longest batch once. Exit code 1 when something is wrong.

    With --gpu, say instead what memory and time a step would take on such GPUs, by arithmetic.
    """
    from delta_cli.recipe import load_recipe

    path = recipe or quickstart()
    loaded = load_recipe(path, tuple(set_ or ()))
    if gpu is None:
        given = {"--processes": processes, "--engine": engine, "--mean-tokens": mean_tokens}
        if named := [name for name, value in given.items() if value is not None]:
            raise UserError(f"{named[0]} plans a run on other GPUs; say on which with --gpu, such as --gpu h100")
        if not report(loaded, backend, run_model=True, json=json, details=details, seconds=seconds):
            raise typer.Exit(1)
        return
    count = loaded.parallel.processes if processes is None else processes
    _plan(loaded, path.name, gpu, count, engine or loaded.engine.kind, mean_tokens, json)


def _plan(
    recipe: Recipe, name: str, gpu: str, processes: int, engine: str, mean_tokens: int | None, json: bool
) -> None:
    from dataclasses import replace
    from json import dumps

    from delta_cli.doctor import plan_text
    from delta_cli.doctor.gpus import find_gpu
    from delta_cli.doctor.model_shape import shape_of
    from delta_cli.doctor.plan import fitted, plan
    from delta_cli.doctor.plan_request import SAMPLERS, PlanRequest

    if not 1 <= processes <= MOST:
        raise UserError(f"--processes {processes}: choose a number from 1 to {MOST}")
    if engine not in SAMPLERS:
        raise UserError(f"--engine {engine}: choose {' or '.join(SAMPLERS)}")
    if mean_tokens is not None and not 1 <= mean_tokens <= recipe.rollout.max_tokens:
        raise UserError(f"--mean-tokens {mean_tokens}: choose 1 to rollout.max_tokens = {recipe.rollout.max_tokens}")
    request = PlanRequest(
        recipe, *shape_of(recipe.model.path), find_gpu(gpu), processes, engine=SAMPLERS[engine], mean_tokens=mean_tokens
    )
    counts = sorted({*COUNTS, processes})
    scaling = [plan(fitted(replace(request, processes=count))) for count in counts]
    parts = (name, plan(request), plan_text.settings(fitted(request)), scaling)
    if json:
        typer.echo(dumps(plan_text.as_json(*parts), ensure_ascii=False))
        return
    for line in plan_text.text(*parts):
        typer.echo(line)


def report(
    recipe: Recipe,
    backend: str,
    run_model: bool,
    json: bool = False,
    quiet: bool = False,
    details: bool = True,
    seconds: float | None = None,
) -> bool:
    """Print each finding as it is made, or only what is wrong; whether none is wrong.

    Without ``details`` the parts of the memory are left to the one line that sums them up. In a terminal what is
    going on is said meanwhile, and what needs action once more at the end.
    """
    from json import dumps

    from rich.console import Console
    from rich.markup import escape

    from delta_cli.doctor.checks import SECONDS, examine
    from delta_cli.doctor.finding import Finding

    console = Console(highlight=False)
    watched = sys.stderr.isatty() and not (json or quiet)
    wrong: list[Finding] = []
    parts = 0

    def show(finding: Finding, also: str = "") -> None:
        text = escape(finding.text + also)
        console.print(f"{SIGNS[finding.level]} {finding.subject:<16} {text}", soft_wrap=True)

    def say(line: str) -> None:
        if watched:
            typer.echo(f"… {line}", err=True)

    for finding in examine(recipe, backend, run_model, SECONDS if seconds is None else seconds, say):
        if finding.level == "wrong":
            wrong.append(finding)
        elif quiet:
            continue
        if json:
            typer.echo(dumps({"event": "finding"} | vars(finding), ensure_ascii=False))
        elif not details and finding.level == "ok" and finding.subject.startswith("memory, "):
            parts += 1
        else:
            show(finding, f"; its {parts} parts: --details" if parts and finding.subject == "memory" else "")
    if len(wrong) > 0 and run_model and not (json or quiet):
        console.print(f"\nto put right first: {wrong[0].subject}" + "".join(f", {each.subject}" for each in wrong[1:]))
    return not wrong
