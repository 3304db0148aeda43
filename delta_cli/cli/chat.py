"""``delta chat``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import closing
from typing import TYPE_CHECKING, Annotated

import typer

from delta_cli.cli import app
from delta_cli.cli.options import BackendOption
from delta_cli.errors import UserError

if TYPE_CHECKING:
    from delta_cli.evaluation.conversation import Conversation

TEMPERATURE, LONGEST = 0.7, 1024  # where there is no run to take them from


@app.command(short_help="Ask a model or a run by hand.")
def chat(
    model: Annotated[str, typer.Argument(metavar="MODEL_OR_RUN", help="Model folder, hub name, tiny-base, or a run.")],
    prompt: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="Ask this and end. May be repeated.", show_default=False)
    ] = None,
    checkpoint: Annotated[
        str | None,
        typer.Option(metavar="STEP", help="Of a run: best, last or a step; without it, last.", show_default=False),
    ] = None,
    template: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT",
            help="Prompt template; without it, a run's own, or a conversation in the model's.",
            show_default=False,
        ),
    ] = None,
    system: Annotated[
        str | None, typer.Option(metavar="TEXT", help="What a conversation begins with.", show_default=False)
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(metavar="X", help="0 takes the likeliest token; without it, a run's or 0.7.", show_default=False),
    ] = None,
    top_p: Annotated[float, typer.Option(metavar="X", help="Nucleus sampling.", min=0.01, max=1.0)] = 1.0,
    max_tokens: Annotated[
        int | None,
        typer.Option(metavar="N", help="Longest answer; without it, a run's or 1024.", min=1, show_default=False),
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", help="Of the sampling.")] = 0,
    backend: BackendOption = "auto",
) -> None:
    """Ask a model or a run by hand, line by line; an empty line or end of input ends it.

    A run is asked as it was trained: every question in the run's prompt template, and none remembers the one before.
    A model with a chat template holds a conversation.
    """
    from backends import registry
    from backends.interface import Sampling
    from delta_cli.data.tokenizer import Tokenizer
    from delta_cli.evaluation.conversation import Conversation
    from delta_cli.evaluation.subject import find_subject
    from delta_cli.training.setup import template_of

    subject = find_subject(model, checkpoint, lambda line: typer.echo(line, err=True))
    recipe = subject.recipe
    tokenizer = Tokenizer.load(subject.settings.model)
    if template is None and recipe is not None:
        template = template_of(recipe)
        tokenizer.chatting(recipe.data.system, recipe.data.thinking)
    elif template is None and not tokenizer.converses:
        template = "plain"
    if system is not None and template is not None:
        raise UserError("--system is for conversations; here every question stands alone in a template: leave it out")
    if temperature is None:
        temperature = recipe.rollout.temperature if recipe is not None else TEMPERATURE
    if max_tokens is None:
        max_tokens = recipe.rollout.max_tokens if recipe is not None else LONGEST
    with closing(registry.create(backend, subject.settings)) as engine:
        subject.load_into(engine)
        stop = tokenizer.stop_text(recipe.rollout.stop) if recipe is not None else None
        sampling = Sampling(max_tokens, tokenizer.eos_ids, temperature, top_p, seed=seed, stop=stop)
        _hold(Conversation(engine, tokenizer, template, sampling, system), prompt)


def _hold(conversation: Conversation, prompts: list[str] | None) -> None:
    for question in prompts if prompts else _typed():
        answer, cut = conversation.ask(question)
        typer.echo(answer)
        if cut:
            typer.echo(f"(cut at {conversation.sampling.max_tokens} tokens; --max-tokens)", err=True)


def _typed() -> Iterator[str]:
    """What is typed, line by line; a prompt is shown where a person types."""
    asks = sys.stdin.isatty()
    while True:
        if asks:
            typer.echo("> ", nl=False)
        line = sys.stdin.readline().rstrip("\n")
        if not line:
            return
        yield line
