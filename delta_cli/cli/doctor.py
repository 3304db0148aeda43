"""``delta doctor``."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from delta_cli.cli import app
from delta_cli.cli.options import BackendOption, RecipeArgument, SetOption, quickstart
from delta_cli.cli.say import say_aside
from delta_cli.errors import UserError

if TYPE_CHECKING:
    from delta_cli.recipe import Recipe

SIGNS = {"ok": "[green]✓[/]", "note": "[blue]·[/]", "wrong": "[red]✗[/]"}
COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)  # GPUs in the table of a plan
MOST = 4096  # GPUs of a plan


@app.command(short_help="Check machine, recipe, data and model.")
def doctor(
    recipe: RecipeArgument = None,
    backend: BackendOption = "auto",
    set_: SetOption = None,
    gpu: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Run nothing, but plan a run on h100, h200, b200, a100, l40s or rtx4090 by arithmetic.",
            show_default=False,
        ),
    ] = None,
    processes: Annotated[
        int | None,
        typer.Option(metavar="N", help="With --gpu: number of GPUs. Default: the recipe's.", show_default=False),
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="With --gpu: local or vllm. Default: the recipe's.", show_default=False),
    ] = None,
    mean_tokens: Annotated[
        int | None,
        typer.Option(metavar="N", help="With --gpu: mean length of a response.", show_default=False),
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option(min=1, metavar="N", help="Run the model for at most N seconds. Default: 120.", show_default=False),
    ] = None,
    details: Annotated[
        bool, typer.Option("--details", help="List every use of memory, and a plan's assumptions.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON; without --gpu, one line for each finding.")] = False,
) -> None:
    """Check machine, recipe, data and model, and run the longest batch once. Exit code 1 if something is wrong.

    With --gpu, print instead what a step would need on such GPUs, and what to set if it does not fit. With a run folder
    in place of the recipe, print how far its sampler was from its trainer, and which correction fits.
    """
    from delta_cli.recipe import load_recipe

    if recipe is not None and recipe.is_dir():
        from delta_cli.doctor.run_gap import explain

        for line in explain(recipe):
            typer.echo(line)
        return
    path = recipe or quickstart()
    loaded = load_recipe(path, tuple(set_ or ()))
    if gpu is None:
        given = {"--processes": processes, "--engine": engine, "--mean-tokens": mean_tokens}
        if named := [name for name, value in given.items() if value is not None]:
            raise UserError(f"{named[0]} is for a plan; add the GPUs it is for, such as --gpu h100")
        if not report(loaded, backend, run_model=True, json=json, details=details, seconds=seconds):
            raise typer.Exit(1)
        return
    count = loaded.parallel.processes if processes is None else processes
    if not _plan(loaded, path.name, gpu, count, engine or loaded.engine.kind, mean_tokens, json, details):
        raise typer.Exit(1)


def _plan(
    recipe: Recipe,
    name: str,
    gpu: str,
    processes: int,
    engine: str,
    mean_tokens: int | None,
    json: bool,
    details: bool,
) -> bool:
    """Print the plan, and return whether the recipe fits the GPUs as it is."""
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
        raise UserError(
            f"--mean-tokens {mean_tokens}: choose a number from 1 to rollout.max_tokens = {recipe.rollout.max_tokens}"
        )
    request = PlanRequest(
        recipe, *shape_of(recipe.model.path), find_gpu(gpu), processes, engine=SAMPLERS[engine], mean_tokens=mean_tokens
    )
    counts = sorted({*COUNTS, processes})
    scaling = [plan(fitted(replace(request, processes=count))) for count in counts]
    best = fitted(request)
    found = plan(request)
    parts = (name, found, plan(best), plan_text.settings(request, best), scaling)
    for line in [dumps(plan_text.as_json(*parts))] if json else plan_text.text(*parts, details=details):
        typer.echo(line)
    return found.fits


def report(
    recipe: Recipe,
    backend: str,
    run_model: bool,
    json: bool = False,
    quiet: bool = False,
    details: bool = True,
    seconds: float | None = None,
) -> bool:
    """Print each finding as soon as it is made, and return whether none is wrong.

    ``quiet`` prints only what is wrong. Without ``details`` the uses of memory are one line. In a terminal, each long
    check is announced, and the end repeats what to fix first.
    """
    from json import dumps

    from rich.console import Console
    from rich.markup import escape

    from delta_cli.cli.program import as_typed
    from delta_cli.doctor.checks import SECONDS, examine
    from delta_cli.doctor.finding import Finding
    from delta_cli.text import visible

    console = Console(highlight=False)
    watched = sys.stderr.isatty() and not (json or quiet)
    wrong: list[Finding] = []

    def show(finding: Finding, also: str = "") -> None:
        text = escape(visible(as_typed(finding.text + also), " "))
        console.print(f"{SIGNS[finding.level]} {finding.subject:<16} {text}", soft_wrap=True)

    def announce(line: str) -> None:
        if watched:
            say_aside(f"… {line}")

    for finding in examine(recipe, backend, run_model, SECONDS if seconds is None else seconds, announce):
        if finding.level == "wrong":
            wrong.append(finding)
        elif quiet:
            continue
        if json:
            typer.echo(dumps({"event": "finding"} | vars(finding)))
        elif not details and finding.level == "ok" and finding.subject.startswith("memory, "):
            continue
        else:
            show(finding, "; its parts: --details" if not details and finding.subject == "memory" else "")
    if wrong and run_model and not (json or quiet):
        console.print(f"\nfix first: {', '.join(finding.subject for finding in wrong)}")
    return not wrong
