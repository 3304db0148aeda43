"""``delta data``: what a recipe trains on."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from delta_cli.cli import command_group
from delta_cli.cli.options import BackendOption, SetOption
from delta_cli.cli.say import say, say_aside
from delta_cli.errors import delta_command

if TYPE_CHECKING:
    from delta_cli.api.show_data import ShownProblem

ANSWER = 200  # characters of an answer that are printed
KEPT = (0.1, 0.9)  # pass rates that Open-R1 keeps
LEFT_OUT = 10  # rows left out that are listed

data = command_group(
    "data",
    short_help="Show the problems of a data file or a recipe.",
    help="The problems that a recipe trains on: as the model gets them, and how many it solves.",
)


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
    if found.notice:
        say(found.notice)
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


@data.command(short_help="Measure the pass rate of each problem.")
def rate(
    source: Annotated[str, typer.Argument(metavar="RECIPE|RUN", help="A recipe or its name, or a run.")],
    samples: Annotated[int, typer.Option(min=1, metavar="N", help="Responses to each problem.")] = 8,
    backend: BackendOption = "auto",
    set_: SetOption = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder for responses and pass rates.", show_default=False)
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print the result only.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON, with the counts.")] = False,
) -> None:
    """Draw responses to each problem to train on, and write the share of right ones to pass_rates.jsonl.

    data.pass_rate_file, data.pass_rate_min and data.pass_rate_max then leave out what is too hard or too easy. A recipe
    is measured with its model, a run with its last checkpoint.
    """
    from json import dumps

    from delta_cli.api.rate_data import rate_data
    from delta_cli.text import count

    found = rate_data(source, samples, backend, tuple(set_ or ()), out, quiet or json, say_aside)
    if json:
        report = {"file": str(found.file), "problems": len(found.problems), "samples": samples}
        typer.echo(dumps(report | {"classes": found.classes()}))
        return
    say(f"{count(len(found.problems), 'problem')}, {count(samples, 'response')} to each; their pass rates:")
    for name, number in found.classes().items():
        say(f"  {name:<13} {number:>7,}")
    say(f"written to {found.file}")
    least, most = KEPT
    if kept := found.kept(least, most):
        run = Path(source) / "recipe.toml"
        keys = (
            *(set_ or ()),
            f"data.pass_rate_file={found.file}",
            f"data.pass_rate_min={least}",
            f"data.pass_rate_max={most}",
        )
        command = delta_command(
            "train", run if run.is_file() else source, *(word for key in keys for word in ("--set", key))
        )
        say(f"to train on the {kept:,} between {least} and {most}: {command}")


def _print(problem: ShownProblem) -> None:
    answer = str(problem.answer)
    cut = f"{answer[:ANSWER]} …" if len(answer) > ANSWER else answer
    size = "" if problem.tokens is None else f", {problem.tokens} tokens"
    say(f"problem {problem.id}{size}{', held out' if problem.held_out else ''}")
    for line in problem.prompt.splitlines():
        say(f"  | {line}")
    say(f"  gold: {cut}\n")
