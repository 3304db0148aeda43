"""What samples the responses of an evaluation: this process, or vLLM."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from delta_cli.cli.say import say_aside
from delta_cli.errors import UserError

if TYPE_CHECKING:
    from backends.interface import Sampler
    from backends.settings import EngineSection
    from delta_cli.runs.checkpoint_reference import CheckpointReference

EngineOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME|URL",
        help="What samples: local, vllm (starts a server), or the address of a running vLLM server. Default: as in the "
        "run's training.",
        show_default=False,
    ),
]
PythonOption = Annotated[
    str | None, typer.Option(metavar="FILE", help="Python of the environment that has vLLM.", show_default=False)
]


def engine_section(reference: CheckpointReference, engine: str | None, python: str | None) -> EngineSection:
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
        return EngineSection(**(own | {"colocated": False, "async_steps": 0} | changes))
    except ValidationError as error:
        raise UserError(f"--engine: {error.errors()[0]['msg']}") from error


def open_sampler_for(
    reference: CheckpointReference, backend: str, engine: EngineSection, max_tokens: int, log: Path, stack: ExitStack
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

    opened = open_evaluation_servers(engine, str(reference.settings.model.path), prompt + max_tokens, log, say_aside)
    return stack.enter_context(opened), "vllm"
