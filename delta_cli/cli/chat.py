"""``delta chat``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing
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
    ThreadsOption,
    TopKOption,
    TopPOption,
)
from delta_cli.cli.say import say, say_aside
from delta_cli.errors import UserError

if TYPE_CHECKING:
    from delta_cli.evaluation.conversation import Conversation
    from delta_cli.evaluation.results import EvaluationSettings
    from delta_cli.recipe import Recipe

TEMPERATURE, MAX_TOKENS = 0.7, 1024  # of a model without a run


@app.command(short_help="Talk to a model or to a run.")
def chat(
    model: Annotated[str, typer.Argument(metavar="MODEL_OR_RUN", help="Model folder, hub name, tiny-base, or a run.")],
    prompt: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="Ask this and exit. Repeatable.", show_default=False)
    ] = None,
    checkpoint: CheckpointOption = None,
    template: TemplateOption = None,
    system: Annotated[
        str | None, typer.Option(metavar="TEXT", help="System message of the conversation.", show_default=False)
    ] = None,
    temperature: TemperatureOption = None,
    top_p: TopPOption = None,
    top_k: TopKOption = None,
    min_p: MinPOption = None,
    max_tokens: MaxTokensOption = None,
    seed: SeedOption = None,
    backend: BackendOption = "auto",
    threads: ThreadsOption = None,
) -> None:
    """Talk to a model or to a run, line by line. An empty line or the end of the input ends it.

    A run answers as it was trained: each question on its own, in the run's prompt template, with its environment, its
    temperature and its limit on tokens. A model with a chat template holds a conversation, at temperature 0.7 and with
    at most 1024 tokens in an answer.
    """
    from backends import registry
    from delta_cli.evaluation.conversation import Conversation, load_tokenizer_and_template
    from delta_cli.runs.checkpoint_reference import find_checkpoint
    from delta_cli.training.setup import open_environments

    reference = find_checkpoint(model, checkpoint, say_aside).with_threads(threads)
    tokenizer, template = load_tokenizer_and_template(reference, template)
    if system is not None and template is not None:
        raise UserError(
            "--system is for conversations, but here each question is asked on its own in a template; leave it out"
        )
    settings = _settings(
        reference.recipe,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        max_tokens=max_tokens,
        seed=seed,
    )
    sampling, recipe = settings.sampling(tokenizer, settings.seed), reference.recipe
    with ExitStack() as stack:
        engine = stack.enter_context(closing(registry.create(backend, reference.settings)))
        reference.load_into(engine)
        environments = None
        if (
            recipe is not None
            and recipe.environment.kind in ("text", "tools")
            and template == recipe.data.prompt_template
        ):
            environments = stack.enter_context(open_environments(recipe, tokenizer))
        _talk(Conversation(engine, tokenizer, template, sampling, system, environments), prompt)


def _settings(recipe: Recipe | None, **changes: object) -> EvaluationSettings:
    """How answers are sampled: as in the run's training, changed by the options."""
    from delta_cli.evaluation.results import EvaluationSettings
    from delta_cli.evaluation.suites import file_suite

    usual = EvaluationSettings(samples=1, top_p=1.0, temperature=TEMPERATURE, max_tokens=MAX_TOKENS)
    if recipe is not None:
        rollout = recipe.rollout
        drawn = {"temperature": rollout.temperature, "max_tokens": rollout.max_tokens, "stop": rollout.stop}
        usual = usual.model_copy(update=drawn)
    return file_suite("chat", usual).with_settings(**changes).settings


def _talk(conversation: Conversation, prompts: list[str] | None) -> None:
    for question in prompts if prompts else _typed():
        answer, cut = conversation.ask(question)
        say(answer.expandtabs(4))
        if cut:
            say_aside(f"(cut at {conversation.sampling.max_tokens} tokens; allow more with --max-tokens)")


def _typed() -> Iterator[str]:
    """The lines of standard input; at a terminal, each after a prompt."""
    asks = sys.stdin.isatty()
    while True:
        if asks:
            typer.echo("> ", nl=False)
        line = sys.stdin.readline().rstrip("\n")
        if not line:
            return
        yield line
