"""Arguments and options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

RecipeArgument = Annotated[
    Path | None,
    typer.Argument(
        metavar="RECIPE", help="Recipe file, or the name of a shipped one. Default: the quickstart.", show_default=False
    ),
]
BackendOption = Annotated[str, typer.Option(metavar="NAME", help="auto, cpu, cuda, mlx or fake.")]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Set a key of the recipe: section.key=value. Repeatable.", show_default=False
    ),
]

# How eval and chat sample responses. The default of each is the run's or the suite's own setting.
CheckpointOption = Annotated[
    str | None,
    typer.Option(metavar="STEP", help="Checkpoint: best, last, base or a step. Default: last.", show_default=False),
]
TemplateOption = Annotated[str | None, typer.Option(metavar="TEXT", help="Prompt template.", show_default=False)]
TemperatureOption = Annotated[
    float | None,
    typer.Option(metavar="X", help="Sampling temperature; 0 takes the likeliest token.", show_default=False),
]
TopPOption = Annotated[float | None, typer.Option(metavar="X", help="Nucleus sampling.", show_default=False)]
TopKOption = Annotated[
    int | None, typer.Option(metavar="N", help="Sample from the N likeliest tokens; 0: all.", show_default=False)
]
MinPOption = Annotated[
    float | None,
    typer.Option(
        metavar="X", help="Sample from tokens at least X times as likely as the likeliest.", show_default=False
    ),
]
MaxTokensOption = Annotated[
    int | None, typer.Option(metavar="N", help="Longest response, in tokens.", show_default=False)
]
ThreadsOption = Annotated[
    int | None,
    typer.Option(min=1, max=1024, metavar="N", help="Processor threads.", show_default="the cores it may use"),
]
EngineOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME|URL",
        help="What samples: local, vllm (starts a server), or the address of a running vLLM server. Default: as in the "
        "run's training.",
        show_default=False,
    ),
]
PythonOption = Annotated[
    str | None, typer.Option(metavar="FILE", help="Python of the environment that has vLLM.", show_default=False)
]
SeedOption = Annotated[int | None, typer.Option(metavar="N", help="Seed of the sampling.", show_default=False)]


def quickstart() -> Path:
    """The recipe that ships with the package."""
    from delta_cli.recipe.shipped import FOLDER

    return FOLDER / "quickstart.toml"
