"""``delta export``."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from delta_cli.cli import app
from delta_cli.cli.options import BackendOption
from delta_cli.cli.say import say, say_aside
from delta_cli.errors import UserError


class QuantisedFor(StrEnum):
    """What opens a quantised model."""

    transformers = "transformers"
    mlx = "mlx"


@app.command(short_help="Write the model of a run as a model folder.")
def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder; the run may still be training.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="New folder for the model.")],
    checkpoint: Annotated[str, typer.Option(metavar="STEP", help="best, last or a step.")] = "last",
    quantise: Annotated[
        int | None,
        typer.Option(metavar="N", help="Quantise to 4 or 8 bits; for mlx-lm also 2, 3 or 6.", show_default=False),
    ] = None,
    target: Annotated[
        QuantisedFor | None,
        typer.Option(
            "--for",
            metavar="mlx|transformers",
            help="What opens the quantised model: mlx-lm, or transformers and vLLM. Default: mlx-lm if installed.",
            show_default=False,
        ),
    ] = None,
    gguf: Annotated[bool, typer.Option("--gguf", help="Also write model.gguf, for llama.cpp.")] = False,
    push: Annotated[
        str | None, typer.Option(metavar="NAME", help="Upload the folder to the hub as owner/name.", show_default=False)
    ] = None,
    public: Annotated[bool, typer.Option("--public", help="With --push: make it visible to everyone.")] = False,
    backend: BackendOption = "auto",
) -> None:
    """Write the model of a run as a folder that transformers and mlx-lm open, with a model card."""
    from delta_cli.publishing import publish
    from delta_cli.runs.checkpoint_reference import export_model, find_checkpoint

    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out}: exists already and is not an empty folder; choose another one")
    if not (run / "recipe.toml").is_file():
        raise UserError(f"{run}: holds no run (no recipe.toml); give a folder that delta train wrote")
    publish.check(quantise, push, public)
    if push:
        publish.check_hub(push)
    reference = find_checkpoint(str(run), checkpoint, say_aside)
    finish = publish.finisher(run, reference.step, push or out.name, quantise, gguf, target.value if target else None)
    export_model(reference, backend, out, finish)
    step = "" if reference.step is None else f", after step {reference.step} of {run}"
    say(f"written to {out}{step}")
    if push:
        say(f"uploaded to {publish.upload(out, push, public)}")
