"""From a recipe's [engine] to what draws its responses."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from backends import registry
from backends.collective import SOLO, from_first
from backends.interface import Collective, Engine, Sampler
from backends.vllm import TOLERANCES, LaunchOptions, VllmSettings
from delta_cli.assets import model_path
from delta_cli.errors import UserError
from delta_cli.recipe import Recipe
from delta_cli.recipe.models import EngineSection

RETURN_SECONDS = 120.0  # a server of somebody else's that went away has so long to come back
MEMORY = Path("/dev/shm")  # a folder that lies in memory, where there is one


@contextmanager
def open_sampler(
    recipe: Recipe,
    learner: Engine,
    run_dir: Path,
    on_progress: Callable[[str], None],
    ranks: Collective = SOLO,
) -> Iterator[Sampler]:
    """The learner itself, or vLLM servers that it publishes its weights to; a server of ours ends on leaving."""
    if recipe.engine.kind == "local":
        yield learner
        return
    engine = recipe.engine
    if engine.async_steps and ranks.size > 1:
        raise UserError(
            f"engine.async_steps needs one training process, but there are {ranks.size}; set engine.async_steps = 0"
        )
    with ExitStack() as stack:
        bytes_needed = learner.parameters * (2 if recipe.model.dtype != "float32" else 4)
        inbox = from_first(ranks, _inbox(recipe, run_dir, bytes_needed, stack) if ranks.rank == 0 else None)
        settings = VllmSettings(
            urls=engine.url,
            inbox=inbox,
            concurrency=engine.concurrency,
            deadline=engine.deadline,
            return_seconds=min(engine.deadline, RETURN_SECONDS),
            tolerance=engine.tolerance or TOLERANCES[recipe.model.dtype],
            colocated=engine.colocated,
            vocabulary=learner.vocabulary,
        )
        longest = max(recipe.rollout.max_tokens, recipe.evaluation.max_tokens or 0)
        lora = recipe.model.published_adapters
        rank = lora.rank if lora else None
        model = model_path(recipe.model.path)
        launch = launch_options(engine, model, recipe.model.dtype, recipe.rollout.max_prompt_tokens + longest, rank)
        sampler = registry.vllm_sampler(settings, launch, engine.python, run_dir / "vllm.log", on_progress, ranks)
        stack.callback(sampler.close)
        yield sampler


@contextmanager
def open_evaluator(
    engine: EngineSection, model: str, max_tokens: int, log: Path, on_progress: Callable[[str], None]
) -> Iterator[Sampler]:
    """vLLM servers of a model as it is on disk, in the type it was saved in; one of ours ends on leaving."""
    settings = VllmSettings(
        urls=engine.url,
        concurrency=engine.concurrency,
        deadline=engine.deadline,
        return_seconds=min(engine.deadline, RETURN_SECONDS),
    )
    launch = launch_options(engine, model, "auto", max_tokens)
    sampler = registry.vllm_sampler(settings, launch, engine.python, log, on_progress)
    with ExitStack() as stack:
        stack.callback(sampler.close)
        sampler.connect(model)
        yield sampler


def launch_options(
    engine: EngineSection, model: str, dtype: str, max_tokens: int, lora_rank: int | None = None
) -> LaunchOptions | None:
    """How to start a server for sequences of at most ``max_tokens``; None where others have started some."""
    if not engine.launch:
        return None
    config = Path(model) / "config.json"
    if config.is_file():  # vLLM refuses a limit that the model does not have
        max_tokens = min(max_tokens, json.loads(config.read_text()).get("max_position_embeddings") or max_tokens)
    return LaunchOptions(
        model=model,
        dtype=dtype,
        max_tokens=max_tokens,
        concurrency=engine.concurrency,
        lora_rank=lora_rank,
        memory=engine.memory,
        sleeps=engine.colocated,
        arguments=engine.arguments,
    )


def _inbox(recipe: Recipe, run_dir: Path, size: int, stack: ExitStack) -> Path:
    """A folder for weights of ``size`` bytes that this machine's servers can read; one in memory goes with the run."""
    if recipe.engine.inbox is not None:
        kind = "adapters" if recipe.model.published_adapters else "model"
        return Path(recipe.engine.inbox).expanduser().resolve() / kind
    if os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free > 2 * size:
        return Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="delta-weights-", dir=MEMORY)))
    return (run_dir / "weights").resolve()
