"""``delta recipe``: what a recipe may say."""

from __future__ import annotations

from typing import Annotated

import typer

from delta_cli.cli import app
from delta_cli.cli.options import RecipeArgument, SetOption, quickstart
from delta_cli.errors import UserError

recipes = typer.Typer(help="What a recipe may say: its keys, its schema, and a recipe resolved.", no_args_is_help=True)
app.add_typer(recipes, name="recipe")


@recipes.command()
def keys(
    section: Annotated[str, typer.Argument(help="Only keys that begin so, e.g. update", show_default=False)] = "",
) -> None:
    """List every key with its type, default, range, unit and meaning."""
    from rich.console import Console
    from rich.table import Table

    from delta_cli.recipe import key_reference

    found = [key for key in key_reference() if key.name.startswith(section)]
    if not found:
        raise UserError(f"no key begins with '{section}'; see: delta recipe keys")
    table = Table("key", "type", "default", "allowed", "meaning")
    for key in found:
        meaning = f"{key.description} [{key.unit}]" if key.unit else key.description
        table.add_row(*(text.replace("[", "\\[") for text in (key.name, key.type, key.default, key.allowed, meaning)))
    Console().print(table)


@recipes.command()
def schema() -> None:
    """Print the JSON schema, for completion in editors."""
    from delta_cli.recipe import json_schema

    typer.echo(json_schema(), nl=False)


@recipes.command()
def show(recipe: RecipeArgument = None, set_: SetOption = None) -> None:
    """Print a recipe with every key resolved."""
    from delta_cli.recipe import load_recipe, to_toml

    typer.echo(to_toml(load_recipe(recipe or quickstart(), tuple(set_ or ()))), nl=False)
