"""What a local reward model takes beside the policy, from its config.json."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from delta_cli.doctor.memory import FLOAT, MemoryItem, MemoryPhase, inside_bytes, many
from delta_cli.doctor.model_shape import ModelShape, shape_of
from delta_cli.errors import UserError
from delta_cli.recipe import Recipe
from delta_cli.recipe.reward import RewardModelSection

Config = Mapping[str, Any]


def reward_model_items(recipe: Recipe, gpu: bool) -> list[MemoryItem]:
    """The uses of memory of each reward model of a process; ``gpu``: the policy trains on a GPU.

    A model of unknown shape is left out; see :func:`unknown_reward_models`.
    """
    found = []
    for settings in _settings(recipe):
        try:
            found += _items(settings, recipe, *shape_of(settings.path), gpu)
        except UserError:
            continue
    return found


def unknown_reward_models(recipe: Recipe) -> list[str]:
    """A line for each reward model whose memory cannot be estimated: why not."""
    lines = []
    for settings in _settings(recipe):
        try:
            shape_of(settings.path)
        except UserError as error:
            lines.append(f"reward model not counted: {error}".replace("model.path", "reward.model.path"))
    return lines


def _settings(recipe: Recipe) -> list[RewardModelSection]:
    return [reward.model for reward in recipe.rewards if reward.model is not None]


def _items(
    settings: RewardModelSection, recipe: Recipe, shape: ModelShape, config: Config, gpu: bool
) -> list[MemoryItem]:
    on_gpu = gpu and settings.device != "cpu"
    processes = recipe.parallel.processes
    named = re.fullmatch(r"cuda:(\d+)", settings.device)
    if named is not None and int(named[1]) >= processes:
        return []  # a GPU on which no process trains
    copies = processes if named is not None else 1  # of all processes, on one GPU
    phase: MemoryPhase = "stays" if on_gpu or not gpu else "host"
    half = on_gpu if settings.dtype == "auto" else settings.dtype != "float32"
    width = 2 if half else FLOAT
    count = classifier_parameters(shape, config)
    length = min(
        limit
        for limit in (
            recipe.rollout.max_prompt_tokens + recipe.rollout.max_tokens,
            settings.max_length,
            config.get("max_position_embeddings"),
        )
        if limit is not None
    )
    tokens = settings.batch_size * length
    inside = inside_bytes(shape, "bfloat16" if half else "float32", width)
    each = "" if copies == 1 else f" × {copies} processes on {settings.device}"
    return [
        MemoryItem(
            "reward model",
            copies * count * width,
            phase,
            f"{many(count)} × {width} bytes{each}",
            'reward.model.device = "cpu" or another GPU',
        ),
        MemoryItem(
            "reward model's activations",
            copies * tokens * inside,
            phase,
            f"{settings.batch_size} chats × {length} tokens × {inside / 1024:.0f} KiB inside one layer{each}",
            "reward.model.batch_size or reward.model.max_length",
        ),
    ]


def classifier_parameters(shape: ModelShape, config: Config) -> int:
    """Parameters of a sequence classifier without its norms and small head; encoders have no gate in a layer."""
    gate = shape.hidden * shape.intermediate if "type_vocab_size" in config else 0
    return shape.layers * (shape.layer_matrices - gate) + shape.vocabulary * shape.hidden
