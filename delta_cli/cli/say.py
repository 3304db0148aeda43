"""Lines of a command for a person. Names of files and models may contain anything, so control characters are shown."""

from __future__ import annotations

import typer


def say(line: str, err: bool = False) -> None:
    """Print a line, with control characters and direction marks written out, and commands as they are typed here."""
    from delta_cli.cli.program import as_typed
    from delta_cli.text import visible

    typer.echo(visible(as_typed(line), "\n"), err=err)


def say_aside(line: str) -> None:
    """Print a line to standard error."""
    say(line, err=True)
