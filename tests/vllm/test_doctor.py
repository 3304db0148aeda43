"""The doctor's sum of a trainer and a server on one GPU."""

from __future__ import annotations

import pytest

from delta_cli.doctor.checks import _shared
from delta_cli.doctor.memory import MemoryItem, estimate_memory
from delta_cli.doctor.model_shape import shape_of
from delta_cli.doctor.sharding import ONE
from delta_cli.recipe import load_recipe

GIB = 2**30


def items(*changes: str) -> dict[tuple[str, str], MemoryItem]:
    recipe = load_recipe(None, changes)
    shape, config = shape_of(recipe.model.path)
    found = estimate_memory(recipe, shape, config, ONE)
    return {(item.name, item.phase): item for item in found if item.phase in ("rollout", "host")}


def test_the_trainer_draws_nothing_where_vllm_does() -> None:
    assert ("KV cache", "rollout") in items()
    apart = ("engine.kind=vllm", "engine.launch=true")
    assert not [name for name, phase in items(*apart) if phase == "rollout"]
    shared = items(*apart, "engine.colocated=true")
    parameters = shape_of("tiny-base")[0].parameters
    assert shared["vLLM's weights", "rollout"].bytes == shared["vLLM's weights, asleep", "host"].bytes == 4 * parameters
    # tiny-base: 2 layers, keys and values of 2 heads of 16 numbers; prompts of 2048 and responses of 48 tokens
    assert shared["vLLM's KV cache", "rollout"].bytes == (2048 + 48) * 2 * 2 * 2 * 16 * 4


@pytest.mark.parametrize(("memory", "level"), [("0.5", "ok"), ("0.75", "wrong"), (None, "wrong")])
def test_both_sides_are_added_up(memory: str | None, level: str) -> None:
    changes = ["engine.kind=vllm", "engine.launch=true", "engine.colocated=true"]
    recipe = load_recipe(None, changes + ([f"engine.memory={memory}"] if memory else []))
    finding = _shared(recipe, stays=24 * GIB, available=80 * GIB)
    assert finding.level == level
    assert level == "ok" or "set engine.memory = 0.65" in finding.text
