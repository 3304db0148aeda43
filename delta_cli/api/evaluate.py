"""One evaluation of a model or of a run's checkpoint: what is measured, how it is graded, and where it is written."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from delta_cli.errors import UserError
from delta_cli.recipe.reward import Reward

if TYPE_CHECKING:
    from backends.interface import Sampler
    from backends.settings import EngineSection
    from delta_cli.evaluation.evaluate import Benchmark
    from delta_cli.evaluation.results import EvaluationResult, EvaluationSettings
    from delta_cli.recipe import Recipe
    from delta_cli.rewards.weighted import WeightedReward
    from delta_cli.runs.checkpoint_reference import CheckpointReference

Say = Callable[[str], None]


@dataclass(frozen=True)
class EvaluationRequest:
    """What is evaluated on what, and how."""

    reference: CheckpointReference
    name: str
    settings: EvaluationSettings
    benchmarks: list[Benchmark]
    is_suite: bool  # a suite has its own verifier; otherwise the run's reward grades
    limit: int | None

    @classmethod
    def of(
        cls,
        reference: CheckpointReference,
        suite: str | None = None,
        data: str | None = None,
        limit: int | None = None,
        changes: Mapping[str, object] | None = None,
    ) -> EvaluationRequest:
        """A suite, a data file, or without both the run's held-out problems. ``changes`` replace settings.

        Raises UserError if there is nothing to evaluate on.
        """
        from delta_cli.data.tokenizer import model_folder
        from delta_cli.evaluation import suites

        given = dict(changes or {})
        if data:
            chosen = suites.file_suite(data, _settings_of(reference)).with_settings(**given)
        elif suite:
            chosen = suites.load_suite(suite).with_settings(**given)
        elif reference.recipe is None:
            model_folder(reference.settings.model.path)  # a missing model is the first thing to say
            raise UserError(
                f"{reference.name}: choose what to evaluate on, with --data FILE or --suite {'|'.join(suites.names())}"
            )
        else:
            own = suites.file_suite("held_out", _settings_of(reference)).with_settings(**given)
            return cls(reference, "held_out", own.settings, _own_benchmarks(reference.recipe, limit), False, limit)
        benchmarks = suites.load_benchmarks(chosen.benchmarks, limit)
        return cls(reference, chosen.name, chosen.settings, benchmarks, bool(suite), limit)

    @property
    def title(self) -> str:
        """The name of the folder: what is measured. Other settings add a number to it."""
        own = self.reference
        step = f"-step{own.step}" if own.recipe is not None and own.step is not None else ""
        return self.name + step + (f"-limit{self.limit}" if self.limit is not None else "")

    @property
    def place(self) -> Path:
        """The usual folder of the results: in the run, or in ./evaluations."""
        name = self.reference.name
        usual = Path("evaluations") / Path(name).name if self.reference.recipe is None else Path(name) / "evaluations"
        return usual / self.title

    def grader(self, allow_unsandboxed: bool = False) -> WeightedReward:
        """The suite's verifier; without a suite, the run's own reward."""
        from delta_cli.rewards.grader import Grader
        from delta_cli.rewards.weighted import RewardTerm, WeightedReward
        from delta_cli.training.setup import make_grader

        if not self.is_suite and self.reference.recipe is not None:
            return make_grader(self.reference.recipe).verifying
        settings = self.settings
        kind, seconds = settings.verifier, settings.run_seconds
        reward = Reward(kind=kind, allow_unsandboxed=allow_unsandboxed, run_seconds=seconds)
        return WeightedReward([RewardTerm(Grader(reward))])


def evaluate(
    request: EvaluationRequest,
    backend: str,
    engine: EngineSection,
    *,
    out: Path | None = None,
    place: Path | None = None,
    allow_unsandboxed: bool = False,
    quiet: bool = False,
    say: Say = lambda line: None,
) -> tuple[EvaluationResult, Path]:
    """Draw and grade what is not on disk yet; the result and its folder, ``out`` or a numbered one at ``place``.

    Raises UserError if ``out`` holds an evaluation with other settings.
    """
    from delta_cli.data.tokenizer import Tokenizer
    from delta_cli.evaluation.evaluate import evaluate as evaluate_benchmarks
    from delta_cli.evaluation.evaluate import own_folder
    from delta_cli.reporting.evaluation_progress import evaluation_progress
    from delta_cli.rollout.worker import RolloutWorker
    from delta_cli.training.setup import open_episodes

    reference, settings, benchmarks = request.reference, request.settings, request.benchmarks
    place = out or place or request.place
    with ExitStack() as stack:
        grader = stack.enter_context(request.grader(allow_unsandboxed))
        tokenizer = Tokenizer.load(reference.settings.model.path).chatting(settings.system, settings.thinking)
        log = place.with_name(f"{place.name}-vllm.log")
        sampler, label = _open_sampler(reference, backend, engine, settings.max_tokens, log, stack, say)
        folder = next(own_folder(place, reference.weights, label, settings, benchmarks))
        if folder != place and out is not None:
            raise UserError(f"{place}: holds a different evaluation; choose another folder with --out")
        environments = None
        if settings.environment is not None and reference.recipe is not None:
            environments = open_episodes(reference.recipe, tokenizer, stack)
        progress = stack.enter_context(evaluation_progress(quiet))
        evaluation = evaluate_benchmarks(
            RolloutWorker(sampler, tokenizer, grader, settings.template, environments=environments),
            benchmarks,
            settings,
            model=reference.name,
            backend=label,
            suite=request.name,
            folder=folder,
            weights=reference.weights,
            step=reference.step,
            limit=request.limit,
            progress=progress,
        )
    return evaluation, folder


def engine_section(reference: CheckpointReference, engine: str | None, python: str | None = None) -> EngineSection:
    """The [engine] section for an option --engine; raises UserError if the option is not allowed."""
    from pydantic import ValidationError

    from backends.settings import EngineSection

    changes: dict[str, object] = {} if python is None else {"python": python}
    if engine == "local":
        return EngineSection()
    if engine == "vllm":
        changes |= {"kind": "vllm", "launch": True, "url": ()}
    elif engine is not None and engine.startswith(("http://", "https://")):
        changes |= {"kind": "vllm", "launch": False, "url": (engine,)}
    elif engine is not None:
        raise UserError(f"--engine {engine}: choose local, vllm, or http://host:port of a running server")
    own = {} if reference.recipe is None else reference.recipe.engine.model_dump(exclude_defaults=True)
    try:
        return EngineSection(**(own | {"colocated": False, "async_steps": 0, "in_flight": False} | changes))
    except ValidationError as error:
        raise UserError(f"--engine: {error.errors()[0]['msg']}") from error


def _open_sampler(
    reference: CheckpointReference,
    backend: str,
    engine: EngineSection,
    max_tokens: int,
    log: Path,
    stack: ExitStack,
    say: Say,
) -> tuple[Sampler, str]:
    """The sampler for responses of at most ``max_tokens``, and its name in the results. ``stack`` closes it."""
    from backends import registry
    from delta_cli.rollout.open_vllm import open_evaluation_servers

    if engine.kind == "local":
        learner = registry.create(backend, reference.settings)
        stack.callback(learner.close)
        reference.load_into(learner)
        return learner, learner.name
    if not reference.settings.frozen:
        raise UserError(f"{reference.name}: vLLM reads finished models, not checkpoints; add --engine local, or wait")
    prompt = 2048 if reference.recipe is None else reference.recipe.rollout.max_prompt_tokens
    opened = open_evaluation_servers(engine, str(reference.settings.model.path), prompt + max_tokens, log, say)
    return stack.enter_context(opened), "vllm"


def _own_benchmarks(recipe: Recipe, limit: int | None) -> list[Benchmark]:
    """The benchmarks of the run's evaluations during training, also if it had none."""
    from delta_cli.recipe.loading import with_overrides
    from delta_cli.training.setup import load_benchmarks, load_data, load_tokenizer

    changes = [] if limit is None else [f"evaluation.problems={limit}"]
    if recipe.evaluation.every == "never":
        changes.append("evaluation.every=0")
    recipe = with_overrides(recipe, changes)
    return load_benchmarks(recipe, load_data(recipe, load_tokenizer(recipe)))


def _settings_of(reference: CheckpointReference) -> EvaluationSettings:
    """The run's own evaluation settings; for a model, those of the paper."""
    from delta_cli.evaluation.results import EvaluationSettings
    from delta_cli.training.setup import evaluation_settings

    return EvaluationSettings() if reference.recipe is None else evaluation_settings(reference.recipe)
