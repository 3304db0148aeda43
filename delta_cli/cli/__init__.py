"""The command line. Each command imports what it needs when it is called, so that --help is fast."""

from __future__ import annotations

import os
import sys
import warnings
from typing import Any

import typer
from typer.core import TyperGroup

from delta_cli import __version__
from delta_cli.errors import RenamedWarning

ORDER = (
    "train",
    "init",
    "doctor",
    "data",
    "runs",
    "eval",
    "compare",
    "inspect",
    "report",
    "chat",
    "serve",
    "export",
    "study",
    "bench",
    "recipe",
    "parity",
)  # of the commands in --help: the order of use


class CommandGroup(TyperGroup):
    """Lists commands in the order of use; a command that ORDER does not name comes last."""

    def list_commands(self, ctx: object) -> list[str]:
        """The names of the commands."""
        return sorted(self.commands, key=lambda name: ORDER.index(name) if name in ORDER else len(ORDER))


app = typer.Typer(
    cls=CommandGroup,
    name="delta",
    help="Reinforcement learning with verifiable rewards and DelTA token credit, on MLX and PyTorch.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def command_group(name: str, short_help: str, help: str) -> typer.Typer:
    """A command that has commands of its own, such as ``delta recipe``."""
    made = typer.Typer(short_help=short_help, help=help, no_args_is_help=True)
    app.add_typer(made, name=name)
    return made


def _version(show: bool) -> None:
    if show:
        typer.echo(f"delta {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
) -> None:
    """Options of every command."""


# Each module registers its commands on app.
from delta_cli.cli import (  # noqa: E402, F401
    bench,
    chat,
    data,
    doctor,
    evaluate,
    export,
    init,
    inspect,
    parity,
    recipe,
    report,
    runs,
    serve,
    study,
    train,
)


def _show_renamed(
    message: Warning | str, category: type[Warning], *place: Any, show: Any = warnings.showwarning
) -> None:
    """Print the warning about a renamed key as one line, and other warnings as Python does."""
    if issubclass(category, RenamedWarning):
        from delta_cli.cli.say import say_aside

        say_aside(f"note: {message}")
    else:
        show(message, category, *place)


def main() -> None:
    """Run a command. An error that a person can fix is one line and exit code 2."""
    warnings.showwarning = _show_renamed  # type: ignore[assignment]  # it passes further arguments on unchanged
    try:
        code = app(prog_name="delta", standalone_mode=False)
    except (typer.Abort, KeyboardInterrupt):
        typer.echo("aborted", err=True)
        sys.exit(130)
    except BrokenPipeError:  # the reader of our output has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except Exception as error:
        from delta_cli.cli.error_exit import exit_with_error
        from delta_cli.cli.say import say_aside
        from delta_cli.cli.usage_error import is_usage, usage_message

        if is_usage(error):
            say_aside(usage_message(error))
            sys.exit(2)
        exit_with_error(error)
    sys.exit(code if isinstance(code, int) else 0)
