"""``delta eval`` and ``delta compare``."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from delta_cli.cli import app
from delta_cli.cli.options import (
    BackendOption,
    CheckpointOption,
    MaxTokensOption,
    MinPOption,
    SeedOption,
    TemperatureOption,
    TemplateOption,
    TopKOption,
    TopPOption,
)
from delta_cli.cli.sampler import EngineOption, PythonOption, engine_section, open_sampler_for
from delta_cli.cli.say import say, say_aside
from delta_cli.errors import UserError

if TYPE_CHECKING:
    from backends.settings import EngineSection
    from delta_cli.evaluation.evaluate import Benchmark
    from delta_cli.evaluation.results import EvaluationResult, EvaluationSettings
    from delta_cli.recipe import Recipe
    from delta_cli.rewards.weighted import WeightedReward
    from delta_cli.runs.checkpoint_reference import CheckpointReference

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

    from delta_cli.evaluation.tables import render
    from delta_cli.runs.checkpoint_reference import find_checkpoint

    if suite and data:
        raise UserError("--suite and --data: give only one of them")
    reference = find_checkpoint(model, checkpoint, say_aside)
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
    name, settings, benchmarks = _benchmarks(reference, suite, data, limit, changes)
    grader = _grader(reference, suite, settings, allow_unsandboxed)
    place = out or _folder_of(reference, model) / _title(name, reference, limit)
    found, folder = _run(
        reference, backend, drawing, name, settings, benchmarks, limit, grader, place, out is None, quiet or json
    )
    if json:
        typer.echo(found.model_dump_json(indent=1))
        return
    console = Console()
    console.print(render(found))
    say(f"written to {folder / 'evaluation.json'}")


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
    from delta_cli.runs.checkpoint_reference import find_checkpoint

    reference = find_checkpoint(str(run), checkpoint, say_aside)
    name, settings, benchmarks = _benchmarks(reference, None, None, None, {})
    grader = _grader(reference, None, settings, False)
    place = run / "evaluations" / _title(name, reference, None)
    drawing = engine_section(reference, None, None)
    return _run(reference, backend, drawing, name, settings, benchmarks, None, grader, place, True, quiet)


def _benchmarks(
    reference: CheckpointReference,
    suite: str | None,
    data: str | None,
    limit: int | None,
    changes: Mapping[str, object],
) -> tuple[str, EvaluationSettings, list[Benchmark]]:
    """Name, settings and problems of the evaluation that was asked for."""
    from delta_cli.evaluation import suites

    if data:
        chosen = suites.file_suite(data, _settings_of(reference)).with_settings(**changes)
    elif suite:
        chosen = suites.load_suite(suite).with_settings(**changes)
    elif reference.recipe is None:
        raise UserError(
            f"{reference.name}: choose what to evaluate on, with --data FILE or --suite {'|'.join(suites.names())}"
        )
    else:
        own = suites.file_suite("held_out", _settings_of(reference)).with_settings(**changes)
        return "held_out", own.settings, _own_benchmarks(reference.recipe, limit)
    return chosen.name, chosen.settings, suites.load_benchmarks(chosen.benchmarks, limit)


def _own_benchmarks(recipe: Recipe, limit: int | None) -> list[Benchmark]:
    """The benchmarks of the run's evaluations during training."""
    from delta_cli.recipe.loading import with_overrides
    from delta_cli.training.setup import load_benchmarks, load_data, load_tokenizer

    if limit is not None:
        recipe = with_overrides(recipe, [f"evaluation.problems={limit}"])
    return load_benchmarks(recipe, load_data(recipe, load_tokenizer(recipe)))


def _settings_of(reference: CheckpointReference) -> EvaluationSettings:
    """The run's own evaluation settings; for a model, those of the paper."""
    from delta_cli.evaluation.results import EvaluationSettings
    from delta_cli.training.setup import evaluation_settings

    return EvaluationSettings() if reference.recipe is None else evaluation_settings(reference.recipe)


def _grader(
    reference: CheckpointReference, suite: str | None, settings: EvaluationSettings, allow_unsandboxed: bool
) -> WeightedReward:
    """The suite's verifier; without a suite, the run's own reward."""
    from delta_cli.recipe.reward import Reward
    from delta_cli.rewards.grader import Grader
    from delta_cli.rewards.weighted import RewardTerm, WeightedReward
    from delta_cli.training.setup import make_grader

    if suite is None and reference.recipe is not None:
        return make_grader(reference.recipe).verifying
    reward = Reward(kind=settings.verifier, allow_unsandboxed=allow_unsandboxed, run_seconds=settings.run_seconds)
    return WeightedReward([RewardTerm(Grader(reward))])


def _folder_of(reference: CheckpointReference, model: str) -> Path:
    if reference.recipe is not None:
        return Path(model) / "evaluations"
    return Path("evaluations") / Path(model).name


def _title(name: str, reference: CheckpointReference, limit: int | None) -> str:
    """The name of the folder: what is measured. Other settings add a number to it."""
    step = f"-step{reference.step}" if reference.recipe is not None and reference.step is not None else ""
    return name + step + (f"-limit{limit}" if limit is not None else "")


def _run(
    reference: CheckpointReference,
    backend_name: str,
    drawing: EngineSection,
    name: str,
    settings: EvaluationSettings,
    benchmarks: list[Benchmark],
    limit: int | None,
    grader: WeightedReward,
    place: Path,
    numbered: bool,
    quiet: bool,
) -> tuple[EvaluationResult, Path]:
    """The evaluation and its folder: ``place``, or if ``numbered`` the first free one of place, place-2, …"""
    from delta_cli.data.tokenizer import Tokenizer
    from delta_cli.evaluation.evaluate import evaluate as evaluate_benchmarks
    from delta_cli.evaluation.evaluate import own_folder
    from delta_cli.reporting.evaluation_progress import evaluation_progress
    from delta_cli.rollout.worker import RolloutWorker

    with ExitStack() as stack:
        stack.enter_context(grader)
        tokenizer = Tokenizer.load(reference.settings.model.path).chatting(settings.system, settings.thinking)
        log = place.with_name(f"{place.name}-vllm.log")
        sampler, label = open_sampler_for(reference, backend_name, drawing, settings.max_tokens, log, stack)
        folder = next(own_folder(place, reference.weights, label, settings, benchmarks))
        if folder != place and not numbered:
            raise UserError(f"{place}: holds a different evaluation; choose another folder with --out")
        progress = stack.enter_context(evaluation_progress(quiet))
        evaluation = evaluate_benchmarks(
            RolloutWorker(sampler, tokenizer, grader, settings.template),
            benchmarks,
            settings,
            model=reference.name,
            backend=label,
            suite=name,
            folder=folder,
            weights=reference.weights,
            step=reference.step,
            limit=limit,
            progress=progress,
        )
    return evaluation, folder
