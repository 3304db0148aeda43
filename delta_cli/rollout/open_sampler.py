"""Opens what draws the responses of a run or of an evaluation, as a recipe's [engine] says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from backends.collective import SOLO
from backends.interface import Collective, Engine, Sampler
from delta_cli.recipe import Recipe


@contextmanager
def open_sampler(
    recipe: Recipe,
    learner: Engine,
    run_dir: Path,
    on_notice: Callable[[str], None],
    ranks: Collective = SOLO,
) -> Iterator[Sampler]:
    """The learner itself, or vLLM servers that it publishes its weights to. Our own server ends on leaving."""
    if recipe.engine.kind == "local":
        yield learner
        return
    from delta_cli.rollout.open_vllm import open_training_servers  # a local run does without vLLM's client

    with open_training_servers(recipe, learner, run_dir, on_notice, ranks) as sampler:
        yield sampler
