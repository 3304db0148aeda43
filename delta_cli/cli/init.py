"""``delta init``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from delta_cli.cli import app
from delta_cli.cli.say import say, say_aside
from delta_cli.errors import NotFetchedError, UserError, delta_command

if TYPE_CHECKING:
    from delta_cli.data.tokenizer import Tokenizer

WIDTH = 42  # of the longest command that leaves room for its purpose on the same line


@app.command(short_help="Write a recipe for your own data and model.")
def init(
    data: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Data file or hub name. Default: the data file here.", show_default=False),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="DIR", help="Model folder, hub name or tiny-base. Default: the folder here.", show_default=False
        ),
    ] = None,
    question: Annotated[
        str | None, typer.Option(metavar="NAME", help="Column of the question.", show_default=False)
    ] = None,
    answer: Annotated[
        str | None, typer.Option(metavar="NAME", help="Column of the answer.", show_default=False)
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The recipe to write. Default: named after the data.", show_default=False),
    ] = None,
) -> None:
    """Write a commented recipe for your own data and model, and list what to run next."""
    from backends import registry
    from delta_cli.cli.program import as_typed
    from delta_cli.cli.run_folder import run_folder
    from delta_cli.cli.starter_recipe import StarterInputs, asks_in_words, is_toy, starter_recipe
    from delta_cli.recipe import load_recipe

    source = data or _only_data()
    chosen = model or _only_model()
    file = out or Path(f"{_stem(source)}.toml")
    if file.suffix != ".toml":
        raise UserError(f"--out {file}: give a name that ends in .toml")
    if file.exists():
        raise UserError(f"{file}: exists already; give another name with --out, or remove it")
    inputs = StarterInputs(source, chosen, question, answer)
    text = starter_recipe(inputs, file.name, _tokenizer(chosen), registry.default())
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"--out {file}: cannot be written ({error.strerror}); give another path") from None
    loaded = load_recipe(file)  # checks that the new recipe is valid
    columns = (
        f"question = {loaded.data.question}, answer = {loaded.data.answer}"
        if loaded.data.question
        else "those of the data set"
    )
    say(f"data    {source}: columns {columns}; reward {loaded.rewards[0].kind}")
    say(f"model   {chosen}: prompt template {loaded.data.template}")
    say(f"recipe  {file}: read through it, then run these commands\n")
    if loaded.data.question and is_toy(chosen) and asks_in_words(source, loaded.data.question):
        say_aside(
            f"{chosen} can only do sums such as 45+84=? and will learn nothing from questions in words; for those "
            "name a language model with --model, such as HuggingFaceTB/SmolLM2-135M-Instruct"
        )
    commands = [(as_typed(line), why) for line, why in _commands(file, run_folder(file, None, resume=False))]
    width = max(len(line) for line, _ in commands)
    for number, (line, why) in enumerate(commands, start=1):
        say(f"{number}  {line:<{width}}  {why}" if width <= WIDTH else f"{number}  {line}\n   {why}")


def _commands(file: Path, run: Path) -> list[tuple[str, str]]:
    """The commands from a data file to a model folder, each with its purpose."""
    return [
        (delta_command("doctor", file), "checks data, model, memory"),
        (delta_command("train", file), "Ctrl-C saves; --resume continues"),
        (delta_command("report", run), "a page about the run"),
        (delta_command("export", run, f"{file.stem}-model"), "a model folder to use"),
    ]


def _only_data() -> str:
    from delta_cli.data.sources import SUFFIXES

    found = sorted(file.name for file in Path().iterdir() if file.is_file() and file.name.endswith(SUFFIXES))
    return _only(found, "--data", "data file", f"({', '.join(SUFFIXES)})")


def _only_model() -> str:
    found = sorted(f"./{file.parent.name}" for file in Path().glob("*/config.json"))
    return _only(found, "--model", "model folder", "(with a config.json); to try things out: --model tiny-base")


def _only(found: list[str], option: str, what: str, which: str) -> str:
    if len(found) == 1:
        return found[0]
    if found:
        raise UserError(f"there are {len(found)} {what}s here ({', '.join(found[:5])}); choose one with {option}")
    raise UserError(f"there is no {what} here {which}; give one with {option}")


def _stem(source: str) -> str:
    """A name for the recipe, from the letters, digits and dashes of the data's name."""
    stem = Path(source).name.partition(".")[0]
    return "".join(char if char.isalnum() or char in "-_" else "-" for char in stem) or "recipe"


def _tokenizer(model: str) -> Tokenizer | None:
    """The model's tokenizer; None if it is not on this machine and cannot be fetched."""
    from delta_cli.assets import model_path
    from delta_cli.data.tokenizer import Tokenizer

    try:
        return Tokenizer.load(model_path(model))
    except NotFetchedError as error:
        say_aside(f"{error}; the recipe is written without it")
        return None
