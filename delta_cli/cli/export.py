"""``delta export``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from delta_cli.cli import app
from delta_cli.cli.options import BackendOption
from delta_cli.errors import UserError


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="A run, going on or ended.")],
    out: Annotated[Path, typer.Argument(help="A new folder for the model.")],
    checkpoint: Annotated[str, typer.Option(help="best, last or a step.")] = "last",
    backend: BackendOption = "auto",
) -> None:
    """Write a run's model at one of its steps as a folder that transformers and mlx-lm open."""
    from delta_cli.evaluation.subject import export_model, find_subject

    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out}: is there already and not an empty folder; choose another one")
    if not (run / "recipe.toml").is_file():
        raise UserError(f"{run}: holds no run (no recipe.toml); give the folder that delta train wrote")
    subject = find_subject(str(run), checkpoint, lambda line: typer.echo(line, err=True))
    export_model(subject, backend, out)
    step = "" if subject.step is None else f", after step {subject.step} of {run}"
    typer.echo(f"written to {out}{step}")
