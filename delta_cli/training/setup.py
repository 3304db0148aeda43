"""From a recipe to the parts of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Literal

from backends import registry
from backends.collective import SOLO
from backends.interface import Collective, Engine, Learner, Sampler
from delta_cli.assets import context_of, model_path
from delta_cli.data.load_report import LoadedData
from delta_cli.data.loading import load_problems
from delta_cli.data.problem import Problem
from delta_cli.data.prompts import CHAT, dropped_turns, encode_prompt
from delta_cli.data.tokenizer import Tokenizer
from delta_cli.environments.opened import Environments
from delta_cli.environments.verifiers_host import VerifiersHost, task_problems
from delta_cli.errors import UserError
from delta_cli.evaluation import suites
from delta_cli.evaluation.evaluate import Benchmark
from delta_cli.evaluation.results import EvaluationSettings
from delta_cli.recipe import Recipe
from delta_cli.recipe.backend_settings import backend_settings
from delta_cli.rewards.grader import Grader
from delta_cli.rewards.reward_model import check_reward_model
from delta_cli.rewards.verifiers import check_answers
from delta_cli.rewards.weighted import RewardTerm, WeightedReward
from delta_cli.rollout.worker import RolloutWorker
from delta_cli.runs.fingerprint import check_ranks, fingerprint
from delta_cli.runs.folder import ReadOnlyRunFolder, RunFolder, ranks_without
from delta_cli.runs.observer import Notice, Observer
from delta_cli.training.credit_file import open_weight_function
from delta_cli.training.trainer import Trainer

GOLD_SAMPLE = 200  # gold answers verified before a run


@contextmanager
def open_trainer(
    recipe: Recipe,
    backend_name: str,
    run_dir: Path,
    observer: Observer,
    stop_asked: Callable[[], bool] = lambda: False,
    ranks: Collective = SOLO,
    new: bool = False,
) -> Iterator[Trainer]:
    """Load everything a trainer needs and lock its run folder; frees both on exit. Every rank opens its own.

    ``new`` refuses a folder that holds a run. Cheap checks run before expensive loading. Raises UserError or
    BackendError, with one line each.
    """
    name = registry.resolve(backend_name)
    check_files(recipe)
    tokenizer = load_tokenizer(recipe)
    data = load_data(recipe, tokenizer)
    benchmarks = load_benchmarks(recipe, data)
    encode_prompt(data.problems[0], recipe.data.prompt_template, tokenizer)  # so that a broken template fails here
    check_context(recipe, data, tokenizer)
    inputs = fingerprint(recipe, data.problems, data.held_out)
    check_ranks(ranks, inputs)
    check_parallel(recipe, ranks)
    with ExitStack() as stack:
        grader = stack.enter_context(make_grader(recipe, run_dir / "judge" / f"verdicts-{ranks.rank}.jsonl"))
        check_functions(grader, data.problems[0])
        if data.report.kept < data.report.read:
            observer.notice(Notice("rows_left_out", f"{recipe.data.title}: {data.report}"))
        if line := dropped_turns(recipe.data.prompt_template, data.problems):
            observer.notice(Notice("turns_left_out", line))
        for line in gold_notices(data, grader):
            observer.notice(Notice("gold_refused", line))
        folder = RunFolder(run_dir) if ranks.rank == 0 else ReadOnlyRunFolder(run_dir)
        folder.hold(new)
        stack.callback(folder.release)
        engine = registry.create(name, backend_settings(recipe), ranks)
        stack.callback(engine.close)
        folder.shared = check_disk(run_dir, engine, ranks)
        notify = partial(_tell, observer)
        drawing_ranks = ranks.separate() if recipe.engine.async_steps else ranks  # batches ahead: in another thread
        drawing: Sampler = engine
        if recipe.engine.kind == "vllm":
            from delta_cli.rollout.open_vllm import open_training_servers  # a local run does without vLLM's client

            drawing = stack.enter_context(open_training_servers(recipe, engine, run_dir, notify, drawing_ranks))
        environments = open_episodes(recipe, tokenizer, stack)
        template, longest = recipe.data.prompt_template, _prompt_tokens(recipe)
        queued = shares_prompts(recipe, engine, ranks)
        yield Trainer(
            recipe,
            engine,
            RolloutWorker(drawing, tokenizer, grader, template, drawing_ranks, longest, environments, queued),
            data.problems,
            benchmarks,
            evaluation_settings(recipe),
            folder,
            observer,
            stop_asked,
            inputs,
            ranks,
        )


def open_environments(recipe: Recipe, tokenizer: Tokenizer) -> Environments:
    """The environments of the recipe's episodes. Raises UserError if they do not fit the model or its template."""
    if recipe.environment.kind == "tools" and recipe.data.prompt_template not in CHAT:
        raise UserError(
            f'environment.kind = "tools" is for chats, but the prompt template is {recipe.data.prompt_template!r}; set '
            f"data.template to {' or '.join(CHAT)}"
        )
    return Environments(recipe.environment, tokenizer, recipe.model.path, recipe.data.thinking)


def open_episodes(recipe: Recipe, tokenizer: Tokenizer, stack: ExitStack) -> Environments | VerifiersHost | None:
    """What plays the recipe's episodes, until ``stack`` closes it; None if a response is one turn.

    Raises UserError if it does not fit the model or its template.
    """
    if not recipe.environment.used:
        return None
    if recipe.environment.kind != "verifiers":
        return stack.enter_context(open_environments(recipe, tokenizer))
    longest = recipe.rollout.max_prompt_tokens + recipe.rollout.max_tokens
    return stack.enter_context(VerifiersHost(recipe.environment, tokenizer, recipe.model.path, longest))


def _prompt_tokens(recipe: Recipe) -> int | None:
    """The length that long prompts are cut to; None if they are dropped instead."""
    return recipe.rollout.max_prompt_tokens if recipe.rollout.long_prompts == "cut" else None


def _tell(observer: Observer, line: str) -> None:
    observer.notice(Notice("engine", line))


def check_files(recipe: Recipe) -> None:
    """Raise UserError for a mistake in a credit file or a reward model's folder, before anything is loaded."""
    open_weight_function(recipe.method.resolve())
    for reward in recipe.rewards:
        if reward.model is not None:
            check_reward_model(reward.model.path)


def load_tokenizer(recipe: Recipe) -> Tokenizer:
    """The model's tokenizer; raises UserError if it has no end-of-sequence token."""
    data = recipe.data
    tokenizer = Tokenizer.load(model_path(recipe.model.path)).chatting(data.system, data.thinking)
    if (data.system is not None or data.thinking is not None) and recipe.data.prompt_template not in CHAT:
        raise UserError(
            "data.system and data.thinking apply to chats only, but the prompt template is "
            f"{data.prompt_template}; set data.template to {' or '.join(CHAT)}, or write the message into a template "
            "of your own"
        )
    if not tokenizer.eos_ids:
        raise UserError(
            f"{recipe.model.path}: no end-of-sequence token is declared, so no response could end; "
            "set eos_token_id in the model's generation_config.json"
        )
    return tokenizer


def check_context(recipe: Recipe, data: LoadedData, tokenizer: Tokenizer) -> None:
    """Raise UserError if the longest prompt and response together exceed the model's context."""
    limits, template = recipe.rollout, recipe.data.prompt_template
    context = context_of(recipe.model.path)
    if context is None or limits.max_prompt_tokens + limits.max_tokens <= context:
        return
    lengths = [len(encode_prompt(problem, template, tokenizer)) for problem in (*data.problems, *data.held_out)]
    longest = min(max(lengths), limits.max_prompt_tokens)
    if longest + limits.max_tokens > context:
        raise UserError(
            f"rollout.max_tokens = {limits.max_tokens}: the model reads {context} tokens, and the longest prompt has "
            f"{longest} of them; set it to at most {max(context - longest, 1)}, or lower rollout.max_prompt_tokens"
        )


def check_parallel(recipe: Recipe, ranks: Collective) -> None:
    """Raise UserError for a method whose result depends on the number of processes."""
    if ranks.size > 1 and recipe.method.resolve().aggregation == "micro_batch_mean":
        raise UserError(
            f'method.aggregation = "micro_batch_mean" depends on which responses share a micro-batch, so {ranks.size} '
            'processes give another result than one; choose "token_mean", or set parallel.processes = 1'
        )


def shares_prompts(recipe: Recipe, engine: Engine, ranks: Collective) -> bool:
    """Whether ranks take prompts from a queue. Raises UserError if the recipe asks for it where that cannot be."""
    if not recipe.parallel.prompt_queue or ranks.size == 1:
        return False
    reasons = {
        "vLLM servers share all requests already": recipe.engine.kind != "local",
        f"the {engine.name} backend cannot": not engine.takes_prompts,
        "episodes begin before anything is drawn": recipe.environment.used,
        "run.deterministic = true asks for the same bits in every run": recipe.run.deterministic,
    }
    for reason in (reason for reason, holds in reasons.items() if holds):
        raise UserError(f"parallel.prompt_queue = true: {reason}; set parallel.prompt_queue = false")
    return True


def check_disk(run_dir: Path, learner: Learner, ranks: Collective) -> bool:
    """Whether every rank sees the run's folder. Raises UserError if one does not and has to write there."""
    without = ranks_without(run_dir, ranks) if ranks.size > 1 else []
    if without and not learner.sample_weights().size:
        raise UserError(
            f"{run_dir}: rank {without[0]} does not see the run's folder of rank 0, but it holds a part of the weights "
            "and writes it into checkpoints there; set --run-dir to a folder on a disk that all machines share, or "
            'parallel.sharding = "none" if the whole model fits on each GPU'
        )
    return not without


def load_data(recipe: Recipe, tokenizer: Tokenizer | None) -> LoadedData:
    """The recipe's problems; raises UserError if there are none, or the reward cannot use their answers."""
    loaded = load_problems(
        recipe.data,
        recipe.run.seed,
        tokenizer,
        recipe.rollout.max_prompt_tokens if recipe.rollout.long_prompts == "drop" else None,
        given_problems(recipe),
    )
    for reward in recipe.verifiers:
        check_answers(reward.kind, (*loaded.problems, *loaded.held_out))
    return loaded


def given_problems(recipe: Recipe) -> list[Problem] | None:
    """The problems that the recipe's environment brings; None: those of data.source. Raises UserError."""
    return task_problems(recipe.environment) if recipe.environment.kind == "verifiers" else None


def load_benchmarks(recipe: Recipe, data: LoadedData) -> list[Benchmark]:
    """The benchmarks a run is evaluated on while it trains; raises UserError if there are none."""
    if recipe.evaluation.suite is not None:
        suite = suites.load_suite(recipe.evaluation.suite)
        if own := [reward.custom_file for reward in recipe.verifiers if reward.kind == "custom"]:
            raise UserError(
                f"evaluation.suite: {suite.name} is graded by its own verifier, not by {own[0]}; "
                "remove it to evaluate on data.held_out, and run `delta eval --suite` on the finished run"
            )
        if others := [reward.kind for reward in recipe.verifiers if reward.kind != suite.settings.verifier]:
            raise UserError(
                f"evaluation.suite: {suite.name} is graded by the {suite.settings.verifier} verifier, but reward.kind "
                f"is {others[0]}; choose another suite"
            )
        return suites.load_benchmarks(suite.benchmarks, recipe.evaluation.problems)
    if recipe.evaluation.every == "never":
        return []
    if not data.held_out:
        raise UserError(
            f"data.source: {recipe.data.title}: no problem is held out to evaluate on ({data.report}); raise "
            "data.held_out, or set evaluation.suite"
        )
    return [Benchmark("held_out", data.held_out[: recipe.evaluation.problems])]


def check_functions(rewards: WeightedReward, problem: Problem) -> None:
    """Raise UserError if a custom reward cannot grade a problem."""
    for term in rewards.terms:
        if term.grader.reward.kind in ("custom", "judge", "model"):
            term.grader.check(problem)


def gold_notices(data: LoadedData, rewards: WeightedReward) -> list[str]:
    """A warning if the verifier rejects gold answers as answers to themselves, judged by a sample; else empty."""
    grader = next((term.grader for term in rewards.terms if term.grader.reward.kind == "math"), None)
    if grader is None:
        return []
    answers = [problem for problem in data.problems if isinstance(problem.answer, str)]
    sample = answers[:: max(1, len(answers) // GOLD_SAMPLE)][:GOLD_SAMPLE]
    verdicts = [grader.submit(f"\\boxed{{{problem.answer}}}", problem, 1, False) for problem in sample]
    refused = [p for p, verdict in zip(sample, verdicts, strict=True) if not verdict.result().correct]
    if not refused:
        return []
    examples = "; ".join(f"{problem.id}: {problem.answer!r}" for problem in refused[:3])
    return [
        f"{len(refused)} of {len(sample)} gold answers are not accepted as answers to themselves, so no response to "
        f"these problems can ever be right: {examples}. Exclude them with data.filter, or fix the data"
    ]


def evaluation_settings(recipe: Recipe) -> EvaluationSettings:
    """How a run samples and grades responses in its evaluations."""
    evaluation = recipe.evaluation
    return EvaluationSettings(
        verifier=_reader(recipe),
        samples=evaluation.samples,
        temperature=evaluation.temperature,
        top_p=evaluation.top_p,
        top_k=evaluation.top_k,
        min_p=evaluation.min_p,
        max_tokens=evaluation.max_tokens or recipe.rollout.max_tokens,
        stop=recipe.rollout.stop,
        template=recipe.data.prompt_template,
        system=recipe.data.system,
        thinking=recipe.data.thinking,
        seed=recipe.run.seed,
        environment=recipe.environment.identity,
        run_seconds=max(reward.run_seconds for reward in recipe.verifiers),
    )


def _reader(recipe: Recipe) -> Literal["math", "number", "choice", "code"]:
    """The verifier that extracts answers for majority votes: the first one, or math for custom rewards."""
    kind = recipe.verifiers[0].kind
    return "math" if kind in ("custom", "environment", "judge", "model", "format", "length") else kind  # type: ignore[return-value]


def make_grader(recipe: Recipe, verdicts: Path | None = None) -> WeightedReward:
    """The recipe's rewards, graded in worker processes; ``verdicts`` is a file that keeps those of a judge."""
    limit, form = recipe.rollout.max_tokens, recipe.verifiers[0].kind
    return WeightedReward(
        [
            RewardTerm(Grader(each, limit, form, verdicts), each.title, each.weight, each in recipe.verifiers)
            for each in recipe.rewards
        ]
    )
