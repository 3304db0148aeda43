"""How a person starts this program from where they are, so that every printed command works as it stands."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from pathlib import Path

NAME = "delta"


def program() -> str:
    """What to type for ``delta``: the name itself only if the shell finds this program by it.

    Nobody need activate the environment, and another program may be called delta too.
    """
    typed = Path(sys.argv[0])
    own = typed if typed.name == NAME and typed.is_file() else Path(sys.executable).with_name(NAME)
    found = shutil.which(NAME)
    if found is not None and own.is_file() and Path(found).resolve() == own.resolve():
        return NAME
    if own.is_file():
        return shlex.quote(_shortest(own))
    return f"{shlex.quote(_shortest(Path(sys.executable)))} -m delta_cli"


def _shortest(path: Path) -> str:
    """The path from the current folder if it is below it; otherwise the whole path."""
    path = path.absolute()
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def as_typed(text: str) -> str:
    """The text with every ``delta COMMAND`` written as it has to be typed here."""
    from delta_cli.cli import ORDER

    pattern = rf"(?<![\w./-]){NAME}(?= (?:{'|'.join(ORDER)}|--help)\b(?! wrote))"
    if not re.search(pattern, text):
        return text
    name = program()
    return text if name == NAME else re.sub(pattern, lambda _: name, text)
