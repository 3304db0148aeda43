"""``delta parity``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from delta_cli.cli import app
from delta_cli.cli.options import SetOption
from delta_cli.errors import UserError


@app.command(short_help="Compare two backends on a recorded batch.")
def parity(
    batch: Annotated[Path, typer.Argument(metavar="RUN_OR_BATCH", help="Run folder, or one file in its rollouts/.")],
    backends: Annotated[
        str, typer.Option(metavar="A,B", help="Two backends; the second is the reference.")
    ] = "cpu,mlx",
    model: Annotated[
        str | None,
        typer.Option(
            metavar="DIR", help="Weights to start from. Default: those the run started from.", show_default=False
        ),
    ] = None,
    step: Annotated[
        int | None, typer.Option(metavar="N", help="Step of the run. Default: the first.", show_default=False)
    ] = None,
    set_: SetOption = None,
    tolerance: Annotated[
        float, typer.Option(metavar="X", help="Largest difference allowed; ten times as much for the gradient.")
    ] = 1e-5,
) -> None:
    """Replay a recorded batch on two backends and compare every number up to the gradient.

    The exit code is 1 if a difference is above the tolerance.
    """
    from rich.console import Console
    from rich.table import Table

    from delta_cli.assets import model_path
    from delta_cli.recipe import load_recipe
    from delta_cli.recipe.loading import with_overrides
    from delta_cli.training import parity as replays

    names = [name.strip() for name in backends.split(",")]
    if len(names) != 2:
        raise UserError(f"--backends {backends}: name two, separated by a comma, as in cpu,mlx")
    file = _file(batch, step)
    own = file.parent.parent / "recipe.toml"
    recipe = with_overrides(load_recipe(own if own.is_file() else None), tuple(set_ or ()))
    recorded = replays.read_batch(file, recipe.rollout.temperature)
    weights = model_path(model or recipe.model.path)
    first, second = (replays.replay(recipe, weights, recorded, name) for name in names)

    table = Table("quantity", f"largest difference, {names[0]} against {names[1]}", "tolerance", "")
    found = replays.differences(first, second, tolerance)
    for each in found:
        table.add_row(each.quantity, f"{each.value:.2e}", f"{each.tolerance:.0e}", "ok" if each.within else "TOO LARGE")
    console = Console()
    console.print(f"{file}: {len(recorded.texts)} responses, {len(recorded.sequences.tokens)} tokens", highlight=False)
    console.print(table)
    if not all(each.within for each in found):
        raise typer.Exit(1)


def _file(batch: Path, step: int | None) -> Path:
    """The file of the recorded batch."""
    if not batch.is_dir():
        return batch
    found = sorted((batch / "rollouts").glob("step-*.jsonl.gz"))
    if step is not None:
        found = [file for file in found if int(file.name[5:11]) == step]
    if not found:
        raise UserError(
            f"{batch}: has no recorded rollouts{'' if step is None else f' of step {step}'}; give another run or step"
        )
    return found[0]
