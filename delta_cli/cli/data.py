"""``delta data``: what a recipe trains on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from delta_cli.cli import app
from delta_cli.cli.options import SetOption
from delta_cli.cli.say import say

if TYPE_CHECKING:
    from delta_cli.api.show_data import ShownProblem

ANSWER = 200  # characters of an answer that are printed
LEFT_OUT = 10  # rows left out that are listed

data = typer.Typer(
    short_help="Show the problems of a data file or a recipe.",
    help="The problems that a recipe trains on, as the model gets them.",
    no_args_is_help=True,
)
app.add_typer(data, name="data")


@data.command(short_help="List prompts, gold answers and what is left out.")
def show(
    source: Annotated[str, typer.Argument(metavar="FILE|RECIPE", help="Data file, or a recipe or its name.")],
    rows: Annotated[int, typer.Option(min=0, metavar="N", help="Problems to print; 0: all.")] = 5,
    model: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Model whose tokenizer counts. Default: the recipe's.", show_default=False),
    ] = None,
    set_: SetOption = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON, with every problem.")] = False,
) -> None:
    """List rows as the prompts that the model gets, with gold answers, token counts, and what is left out and why."""
    from json import dumps

    from delta_cli.api.show_data import show_data

    found = show_data(source, model, tuple(set_ or ()))
    if json:
        typer.echo(dumps(found.as_json(), default=str))
        return
    for each in found.problems[:rows] if rows else found.problems:
        _print(each)
    say(str(found.report))
    counts = [each.tokens for each in found.problems if each.tokens is not None]
    if counts:
        middle = sorted(counts)[len(counts) // 2]
        say(f"tokens of a prompt: {min(counts)} to {max(counts)}, half of them at most {middle}")
    else:
        say("tokens are not counted without a tokenizer; name a model with --model")
    for where, why in found.left_out[:LEFT_OUT]:
        say(f"  left out: {where}: {why}")
    if rows and len(found.problems) > rows:
        say(f"{len(found.problems) - rows:,} more problems: --rows 0 prints all, --json for a program")


def _print(problem: ShownProblem) -> None:
    answer = str(problem.answer)
    cut = f"{answer[:ANSWER]} …" if len(answer) > ANSWER else answer
    size = "" if problem.tokens is None else f", {problem.tokens} tokens"
    say(f"problem {problem.id}{size}{', held out' if problem.held_out else ''}")
    for line in problem.prompt.splitlines():
        say(f"  | {line}")
    say(f"  gold: {cut}\n")
