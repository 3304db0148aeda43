"""``delta eval`` and ``delta compare``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from delta_cli.cli import app
from delta_cli.cli.options import (
    BackendOption,
    CheckpointOption,
    EngineOption,
    MaxTokensOption,
    MinPOption,
    PythonOption,
    SeedOption,
    TemperatureOption,
    TemplateOption,
    ThreadsOption,
    TopKOption,
    TopPOption,
)
from delta_cli.cli.say import say, say_aside
from delta_cli.errors import UserError, delta_command

if TYPE_CHECKING:
    from delta_cli.evaluation.results import EvaluationResult

SuiteOption = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="A shipped suite, or the .toml file of one.", show_default=False),
]


@app.command("eval", short_help="Measure a model or a run on problems.")
def evaluate(
    model: Annotated[str, typer.Argument(metavar="MODEL_OR_RUN", help="Model folder, hub name, tiny-base, or a run.")],
    checkpoint: CheckpointOption = None,
    suite: SuiteOption = None,
    data: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Data file with the columns question and answer.", show_default=False),
    ] = None,
    samples: Annotated[
        int | None, typer.Option(metavar="N", help="Responses to each problem.", show_default=False)
    ] = None,
    temperature: TemperatureOption = None,
    top_p: TopPOption = None,
    top_k: TopKOption = None,
    min_p: MinPOption = None,
    max_tokens: MaxTokensOption = None,
    template: TemplateOption = None,
    limit: Annotated[
        int | None, typer.Option(metavar="N", help="Use N problems of each benchmark.", min=1, show_default=False)
    ] = None,
    seed: SeedOption = None,
    allow_unsandboxed: Annotated[
        bool,
        typer.Option("--allow-unsandboxed", help="Run programs without a sandbox; only on a machine you can lose."),
    ] = False,
    backend: BackendOption = "auto",
    threads: ThreadsOption = None,
    engine: EngineOption = None,
    engine_python: PythonOption = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder for responses and results.", show_default=False)
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print the result only.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print evaluation.json instead of a table.")] = False,
) -> None:
    """Evaluate a model or a run: avg@k, pass@k and maj@k with intervals, also as JSON.

    Without --suite or --data, a run is evaluated on its held-out problems. A suite has its own verifier; without a
    suite, responses are graded by the reward the run was trained with. Each step, limit and set of settings gets its
    own folder.
    """
    from rich.console import Console

    from delta_cli.api import evaluate as api
    from delta_cli.api.evaluate import EvaluationRequest, engine_section
    from delta_cli.evaluation.tables import render
    from delta_cli.runs.checkpoint_reference import find_checkpoint

    if suite and data:
        raise UserError("--suite and --data: give only one of them")
    reference = find_checkpoint(model, checkpoint, say_aside).with_threads(threads)
    drawing = engine_section(reference, engine, engine_python)
    changes = {
        "samples": samples,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "max_tokens": max_tokens,
        "template": template,
        "seed": seed,
    }
    request = EvaluationRequest.of(reference, suite, data, limit, changes)
    found, folder = api.evaluate(
        request,
        backend,
        drawing,
        out=out,
        allow_unsandboxed=allow_unsandboxed,
        quiet=quiet or json,
        say=say_aside,
    )
    if json:
        typer.echo(found.model_dump_json(indent=1))
        return
    console = Console()
    console.print(render(found))
    say(f"written to {folder / 'evaluation.json'}")
    say(f"to see the wrong answers: {delta_command('inspect', folder)}")


@app.command(short_help="Compare two evaluations.")
def compare(
    before: Annotated[
        Path,
        typer.Argument(metavar="BEFORE", help="A run, a folder in evaluations/, or an evaluation.json."),
    ],
    after: Annotated[
        Path | None,
        typer.Argument(
            metavar="AFTER",
            help="The one that should be better. Default: the run BEFORE is compared with the model it started from.",
            show_default=False,
        ),
    ] = None,
    listed: Annotated[bool, typer.Option("--list", help="List BEFORE's evaluations; compare nothing.")] = False,
    backend: BackendOption = "auto",
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compare two evaluations: is AFTER better than BEFORE? Prints the gain, its interval and a one-sided rank test.

    If a run was evaluated at several steps, its newest evaluation is taken that was made like the other one. A run
    alone is compared with the model it started from, on the problems it held out; both are evaluated if need be.
    """
    from json import dumps

    from rich.console import Console

    from delta_cli.evaluation import compare as comparison
    from delta_cli.evaluation.saved_results import comparable, evaluations_of
    from delta_cli.evaluation.tables import render_comparison, render_evaluations

    console = Console()
    if listed or (after is None and not (before / "recipe.toml").is_file()):
        found = evaluations_of(before)
        if json:
            typer.echo(dumps([{"path": str(each.path)} | each.as_json() for each in found]))
        else:
            console.print(render_evaluations(found))
        return
    if after is None:
        made = [_evaluate_held_out(before, which, backend, json) for which in ("base", "last")]
        first, second = ((evaluation, folder) for evaluation, folder in made)
    else:
        first, second = ((each.evaluation, each.path) for each in comparable(before, after))
    result = comparison.compare(first[0], second[0])
    if json:
        typer.echo(result.model_dump_json(indent=2))
        return
    console.print(render_comparison(result))
    if (first[1], second[1]) != (before, after):
        say(f"compared: {first[1]} and {second[1]}")


def _evaluate_held_out(run: Path, checkpoint: str, backend: str, quiet: bool) -> tuple[EvaluationResult, Path]:
    """Evaluate a run's checkpoint on the problems it held out; responses that are on disk are not drawn again."""
    from delta_cli.api import evaluate as api
    from delta_cli.api.evaluate import EvaluationRequest, engine_section
    from delta_cli.runs.checkpoint_reference import find_checkpoint

    reference = find_checkpoint(str(run), checkpoint, say_aside)
    request = EvaluationRequest.of(reference)
    return api.evaluate(request, backend, engine_section(reference, None), quiet=quiet, say=say_aside)
