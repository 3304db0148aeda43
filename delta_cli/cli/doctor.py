"""``delta doctor``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from delta_cli.cli import app
from delta_cli.cli.options import BackendOption, RecipeArgument, SetOption, quickstart

if TYPE_CHECKING:
    from delta_cli.recipe import Recipe

SIGNS = {"ok": "[green]✓[/]", "note": "[blue]·[/]", "wrong": "[red]✗[/]"}


@app.command()
def doctor(recipe: RecipeArgument = None, backend: BackendOption = "auto", set_: SetOption = None) -> None:
    """Check machine, recipe, data and model, and run the longest batch once. Exit code 1 when something is wrong."""
    from delta_cli.recipe import load_recipe

    if not report(load_recipe(recipe or quickstart(), tuple(set_ or ())), backend, run_model=True):
        raise typer.Exit(1)


def report(recipe: Recipe, backend: str, run_model: bool) -> bool:
    """Print each finding as it is made; whether none is wrong."""
    from rich.console import Console
    from rich.markup import escape

    from delta_cli.doctor.checks import examine

    console = Console(highlight=False)
    fine = True
    for finding in examine(recipe, backend, run_model):
        console.print(f"{SIGNS[finding.level]} {finding.subject:<16} {escape(finding.text)}", soft_wrap=True)
        fine = fine and finding.level != "wrong"
    return fine
