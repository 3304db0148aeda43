"""Arguments that several commands take."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

RUNS = Path("runs")  # where runs are made

RecipeArgument = Annotated[
    Path | None, typer.Argument(metavar="RECIPE", help="A recipe; without one, the quickstart.", show_default=False)
]
BackendOption = Annotated[str, typer.Option(metavar="NAME", help="auto, cpu, cuda, mlx or fake.")]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Change a key: section.key=value. May be repeated.", show_default=False
    ),
]


def quickstart() -> Path:
    """The recipe that ships with the package."""
    from delta_cli import assets

    return Path(assets.__file__).parent / "quickstart.toml"
