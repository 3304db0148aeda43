"""The keys that make a run fit into a machine's memory and change no result beyond rounding."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from delta_cli.doctor.mac import attention_scores, second_chunk
from delta_cli.doctor.machine import Machine
from delta_cli.doctor.memory import MemoryItem, bytes_by_phase, estimate_memory, pooled, trained
from delta_cli.doctor.model_shape import ModelShape, shape_of
from delta_cli.doctor.reward_model_memory import reward_model_items
from delta_cli.doctor.sharding import ShardingLayout, choose_sharding
from delta_cli.errors import UserError
from delta_cli.recipe import Recipe
from delta_cli.recipe.loading import with_overrides

SMALLEST_CHUNK = 64  # tokens of update.head_chunk_tokens, below which the head is slow

Excess = Callable[[Recipe], int]  # bytes that a recipe needs above what there is, summed over phases; 0 if it fits


@dataclass(frozen=True)
class MachineMemory:
    """The memory of this machine, for a model of a known shape."""

    shape: ModelShape
    config: Mapping[str, Any]
    machine: Machine
    backend: str

    @property
    def separate(self) -> bool:
        """Whether the device has memory of its own. Otherwise it is the host's, and all processes share it."""
        return self.backend == "cuda"

    def items(self, recipe: Recipe) -> list[MemoryItem]:
        """Every use of memory of a process."""
        found = estimate_memory(recipe, self.shape, self.config, self.layout(recipe))
        found += reward_model_items(recipe, self.separate)
        if self.separate and self.machine.device_memory:
            found = pooled(recipe, self.shape, found, self.machine.device_memory)
        if self.backend == "mlx":
            found += [attention_scores(recipe, self.shape), second_chunk(recipe, self.shape)]
        return found

    def layout(self, recipe: Recipe) -> ShardingLayout:
        """How the run is distributed over processes."""
        processes = recipe.parallel.processes
        return choose_sharding(processes, recipe.parallel, trained(recipe, self.shape), processes)

    def excess(self, recipe: Recipe) -> int:
        """The bytes above what there is."""
        phases, processes = bytes_by_phase(self.items(recipe)), self.layout(recipe).processes
        stays, host = phases.pop("stays"), phases.pop("host") * processes
        room = self.machine.device_memory
        if self.separate:
            over = [stays + size - room for size in phases.values()] + [host - self.machine.memory]
        else:
            over = [(stays + size) * processes + host - room for size in phases.values()]
        return sum(max(0, each) for each in over)


def fitting_overrides(recipe: Recipe, excess: Excess, offload: bool = True) -> list[str] | None:
    """The ``key=value`` overrides with which the recipe fits; empty if it fits as it is, None if none suffice.

    ``offload`` allows the optimizer's moments to move to the host's memory.
    """
    chosen: dict[str, object] = {}
    left = excess(recipe)
    for key, value in _smaller(recipe, offload):
        if not left:
            break
        tried = _excess_with(recipe, chosen | {key: value}, excess)
        if tried is not None and tried < left:
            chosen[key], left = value, tried
    if left:
        return None
    for key in list(chosen):  # a later key may have made an earlier one unnecessary
        without = {other: value for other, value in chosen.items() if other != key}
        if _excess_with(recipe, without, excess) == 0:
            chosen = without
    return _overrides(chosen)


def with_fit(recipe: Recipe, machine: Machine, backend: str) -> tuple[Recipe, list[str]]:
    """The recipe with the overrides that make it fit this machine, and the overrides.

    Raises UserError if the shape of the model is not known, or if no override makes the recipe fit.
    """
    memory = MachineMemory(*shape_of(recipe.model.path), machine, backend)
    overrides = fitting_overrides(recipe, memory.excess, memory.separate)
    if overrides is None:
        raise UserError(
            "--fit: no smaller batch makes this recipe fit this machine's memory; train adapters (--set "
            "model.lora.rank=16), take a smaller model, or plan for a larger GPU, such as --gpu h100"
        )
    return with_overrides(recipe, overrides), overrides


def _smaller(recipe: Recipe, offload: bool) -> Iterator[tuple[str, object]]:
    """Every key that saves memory and its smaller values, those that cost the least time first."""
    rollout, update = recipe.rollout, recipe.update
    longest = rollout.max_prompt_tokens + rollout.max_tokens
    if recipe.engine.kind == "local":
        yield from (("rollout.batch", value) for value in _halves(rollout.batch, 1))
    yield from (("update.micro_batch_tokens", value) for value in _halves(update.micro_batch_tokens, longest))
    if recipe.method.resolve().credit == "delta":
        yield from (("update.feature_bytes", value) for value in [*_halves(update.feature_bytes, 2**20), 0])
        yield from (("update.feature_host_bytes", value) for value in [*_halves(update.feature_host_bytes, 2**20), 0])
    yield from (("update.head_chunk_tokens", value) for value in _halves(update.head_chunk_tokens, SMALLEST_CHUNK))
    if not recipe.model.gradient_checkpointing:
        yield "model.gradient_checkpointing", True
    if offload and not update.offload:
        yield "update.offload", True


def _halves(value: int, least: int) -> list[int]:
    """Half the value, a quarter and so on, down to ``least``, which is the last one if the value is above it."""
    halves = list(takewhile(lambda each: each > least, (value >> power for power in range(1, value.bit_length()))))
    return [*halves, least] if value > least else []


def _excess_with(recipe: Recipe, changes: Mapping[str, object], excess: Excess) -> int | None:
    """The excess after the changes; None if the recipe does not allow them."""
    try:
        return excess(with_overrides(recipe, _overrides(changes)))
    except UserError:
        return None


def _overrides(changes: Mapping[str, object]) -> list[str]:
    return [f"{key}={str(value).lower()}" for key, value in changes.items()]
