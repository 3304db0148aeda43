"""``delta export``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from delta_cli.cli import app
from delta_cli.cli.options import BackendOption
from delta_cli.errors import UserError


@app.command(short_help="Write a run's model as a folder to use.")
def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run, going on or ended.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A new folder for the model.")],
    checkpoint: Annotated[str, typer.Option(metavar="STEP", help="best, last or a step.")] = "last",
    quantise: Annotated[
        int | None,
        typer.Option(metavar="N", help="Bits of the weights: 2, 3, 4, 6 or 8; for mlx-lm.", show_default=False),
    ] = None,
    gguf: Annotated[bool, typer.Option("--gguf", help="Write model.gguf too, for llama.cpp.")] = False,
    push: Annotated[
        str | None, typer.Option(metavar="NAME", help="Upload the folder to the hub as owner/name.", show_default=False)
    ] = None,
    public: Annotated[bool, typer.Option("--public", help="Of --push: let everybody see it.")] = False,
    backend: BackendOption = "auto",
) -> None:
    """Write a run's model at one of its steps as a folder that transformers and mlx-lm open, with a model card."""
    from delta_cli.publishing import publish
    from delta_cli.runs.checkpoint_reference import export_model, find_checkpoint

    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out}: is there already and not an empty folder; choose another one")
    if not (run / "recipe.toml").is_file():
        raise UserError(f"{run}: holds no run (no recipe.toml); give the folder that delta train wrote")
    publish.check(quantise, push, public)
    reference = find_checkpoint(str(run), checkpoint, lambda line: typer.echo(line, err=True))
    finish = publish.finisher(run, reference.step, push or out.name, quantise, gguf)
    export_model(reference, backend, out, finish)
    step = "" if reference.step is None else f", after step {reference.step} of {run}"
    typer.echo(f"written to {out}{step}")
    if push:
        typer.echo(f"uploaded to {publish.upload(out, push, public)}")
