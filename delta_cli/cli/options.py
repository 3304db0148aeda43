"""Arguments that several commands take."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

RecipeArgument = Annotated[
    Path | None, typer.Argument(help="A recipe; without one, the quickstart.", show_default=False)
]
BackendOption = Annotated[str, typer.Option(help="auto, cpu, cuda, mlx or fake.")]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", help="Change a key: section.key=value. May be repeated.", show_default=False),
]


def quickstart() -> Path:
    """The recipe that ships with the package."""
    from delta_cli import assets

    return Path(assets.__file__).parent / "quickstart.toml"
