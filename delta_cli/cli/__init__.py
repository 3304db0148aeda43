"""The command line: parse, load, call, render. Each command imports what it needs when it is called."""

from __future__ import annotations

import os
import sys

import typer

from delta_cli import __version__
from delta_cli.errors import UserError

app = typer.Typer(
    name="delta",
    help="Reinforcement learning with verifiable rewards and DelTA token credit, on MLX and PyTorch.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(show: bool) -> None:
    if show:
        typer.echo(f"delta {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
) -> None:
    """Options of every command."""


# Each registers its commands on app.
from delta_cli.cli import chat, doctor, evaluate, export, init, look, parity, recipe, runs, study, train  # noqa: E402, F401


def main() -> None:
    """Run a command; what a person can put right is one line and exit code 2."""
    from backends.interface import BackendError
    from delta_cli.cli.failure import fail

    try:
        app()
    except (UserError, BackendError) as error:
        fail(error)
    except BrokenPipeError:  # whoever read our output has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except Exception as error:  # a mistake of ours: a traceback, but not one from each of several processes
        fail(error)
