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

# How responses are drawn: what an evaluation and a conversation have in common. None: as usual there.
CheckpointOption = Annotated[
    str | None,
    typer.Option(metavar="STEP", help="Of a run: best, last, base or a step; without it, last.", show_default=False),
]
TemplateOption = Annotated[str | None, typer.Option(metavar="TEXT", help="Prompt template.", show_default=False)]
TemperatureOption = Annotated[
    float | None, typer.Option(metavar="X", help="0 takes the likeliest token.", show_default=False)
]
TopPOption = Annotated[float | None, typer.Option(metavar="X", help="Nucleus sampling.", show_default=False)]
TopKOption = Annotated[
    int | None, typer.Option(metavar="N", help="Only the N likeliest tokens; 0: all.", show_default=False)
]
MinPOption = Annotated[
    float | None,
    typer.Option(metavar="X", help="Only tokens at least X times as likely as the likeliest.", show_default=False),
]
MaxTokensOption = Annotated[
    int | None, typer.Option(metavar="N", help="Longest response, in tokens.", show_default=False)
]
SeedOption = Annotated[int | None, typer.Option(metavar="N", help="Of the sampling.", show_default=False)]


def quickstart() -> Path:
    """The recipe that ships with the package."""
    from delta_cli import assets

    return Path(assets.__file__).parent / "quickstart.toml"
