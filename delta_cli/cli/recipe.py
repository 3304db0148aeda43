"""``delta recipe``: the keys of recipes."""

from __future__ import annotations

from typing import Annotated

import typer

from delta_cli.cli import command_group
from delta_cli.cli.options import RecipeArgument, SetOption, quickstart
from delta_cli.cli.say import say

recipes = command_group(
    "recipe",
    short_help="List and explain the keys of recipes.",
    help="The keys of recipes, their JSON schema, and a recipe with every key filled in.",
)


@recipes.command(short_help="List all keys, or those of one section.")
def keys(
    section: Annotated[
        str,
        typer.Argument(metavar="SECTION", help="Only keys that start with this, such as update.", show_default=False),
    ] = "",
) -> None:
    """List keys with default, type, range, unit and meaning."""
    from rich.console import Console

    from delta_cli.reporting.recipe_help import key_lines

    for line in key_lines(section, Console().width):
        typer.echo(line)


@recipes.command()
def explain(
    key: Annotated[str, typer.Argument(metavar="KEY", help="A key, or its name in TRL, verl or mlx-lm-lora.")],
) -> None:
    """Explain one key."""
    from rich.console import Console

    from delta_cli.reporting.recipe_help import explained

    for line in explained(key, Console().width):
        typer.echo(line)


@recipes.command("list", short_help="List the recipes and studies that ship with the package.")
def list_() -> None:
    """List the recipes and studies that ship with the package. Their names work wherever a recipe's path does."""
    import textwrap

    from rich.console import Console

    from delta_cli.recipe.shipped import shipped_recipes

    width = Console().width
    found = shipped_recipes()
    for title, is_study in (("recipes, for delta train NAME", False), ("studies, for delta study NAME", True)):
        say(f"{title}:")
        for each in found:
            if each.is_study == is_study:
                line = f"{each.name:<26} {each.about}".rstrip()
                typer.echo("\n".join(textwrap.wrap(line, width, initial_indent="  ", subsequent_indent=" " * 6)))
    say("a copy to change: delta recipe show quickstart > mine.toml")


@recipes.command(short_help="Print the JSON schema, for editors.")
def schema() -> None:
    """Print the JSON schema of a recipe, with which editors complete and check recipes."""
    from delta_cli.recipe import json_schema

    typer.echo(json_schema(), nl=False)


@recipes.command(short_help="Print a recipe with every key filled in.")
def show(recipe: RecipeArgument = None, set_: SetOption = None) -> None:
    """Print a recipe with every key filled in."""
    from delta_cli.recipe import load_recipe, to_toml

    typer.echo(to_toml(load_recipe(recipe or quickstart(), tuple(set_ or ()))), nl=False)
