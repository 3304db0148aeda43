"""What a step would take on rented GPUs: memory of each process and seconds of each phase. Arithmetic only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from delta_cli.doctor.gpus import Gpu
from delta_cli.doctor.memory import MemoryItem, bytes_by_phase, peak_bytes
from delta_cli.doctor.plan_request import PlanRequest, SamplerKind
from delta_cli.doctor.sharding import ShardingLayout
from delta_cli.doctor.step_time import StepPhase, memory, phases


@dataclass(frozen=True)
class RunPlan:
    """The plan of a run on some GPUs."""

    gpu: Gpu
    layout: ShardingLayout
    engine: SamplerKind
    room: int  # bytes of a GPU that a run may take
    steps: int
    tokens: float  # drawn in a step, by all processes
    items: tuple[MemoryItem, ...]  # memory of one process
    phases: tuple[StepPhase, ...]
    notes: tuple[str, ...]
    limits: tuple[tuple[int, str], ...]  # GPUs above which some have nothing to do, and what

    @property
    def bytes(self) -> int:
        """Bytes of one GPU at the peak."""
        return peak_bytes(self.items)

    @property
    def fits(self) -> bool:
        """Whether the memory suffices."""
        return self.bytes <= self.room

    @property
    def host_bytes(self) -> int:
        """Bytes of one node's host memory, for all its processes."""
        return bytes_by_phase(self.items)["host"] * min(self.layout.processes, self.gpu.node)

    @property
    def step_seconds(self) -> float:
        """Seconds of a step, without evaluations and checkpoints."""
        return sum(phase.seconds for phase in self.phases)

    @property
    def hours(self) -> float:
        """Hours of the whole run."""
        return self.step_seconds * self.steps / 3600


def plan(request: PlanRequest) -> RunPlan:
    """Memory and time of the requested run."""
    items = memory(request)
    rollout = request.recipe.rollout
    return RunPlan(
        gpu=request.gpu,
        layout=request.layout,
        engine=request.engine,
        room=request.room,
        steps=request.recipe.run.steps,
        tokens=request.work(rollout.prompts).drawn,
        items=tuple(items),
        phases=phases(request, items),
        notes=tuple(_notes(request, items)),
        limits=((rollout.prompts // request.recipe.update.mini_batches, "update"), (rollout.prompts, "draw")),
    )


def fitted(request: PlanRequest) -> PlanRequest:
    """The request, with keys that change no result set to fit the GPU.

    Moments go to the GPU or the host, and micro-batches are the recipe's or as small as one sequence, whichever makes
    the faster step; responses sampled at a time and features take the rest of the memory. If nothing fits, the
    smallest.
    """
    rollout, asked = request.recipe.rollout, request.recipe.update.micro_batch_tokens
    sizes = sorted({asked, min(asked, rollout.max_prompt_tokens + rollout.max_tokens)}, reverse=True)
    options = [_filled(request, offload, size) for size in sizes for offload in (False, True)]
    fitting = [option for option in options if peak_bytes(memory(option)) <= request.room]
    if not fitting:
        return min(options, key=lambda option: peak_bytes(memory(option)))
    return min(fitting, key=lambda option: plan(option).step_seconds)


def _filled(request: PlanRequest, offload: bool, micro_batch_tokens: int) -> PlanRequest:
    """The request with the rest of the memory used for features and for responses sampled at a time."""
    update = {"offload": offload, "micro_batch_tokens": micro_batch_tokens, "feature_bytes": 0}
    found = _changed(request, rollout={"batch": 1}, update=update)
    taken = bytes_by_phase(memory(found))
    spare = request.room - taken["stays"] - taken["score"]
    found = _changed(found, update={"feature_bytes": max(0, spare)})
    sizes = sorted({1, *(min(2**power, request.drawn.responses) for power in range(1, 12))})
    options = [_changed(found, rollout={"batch": size}) for size in sizes]
    fitting = [option for option in options if peak_bytes(memory(option)) <= request.room]
    return min(fitting, key=lambda option: plan(option).step_seconds, default=found)


def _changed(request: PlanRequest, **sections: Mapping[str, Any]) -> PlanRequest:
    changes = {name: getattr(request.recipe, name).model_copy(update=keys) for name, keys in sections.items()}
    return replace(request, recipe=request.recipe.model_copy(update=changes))


def _notes(request: PlanRequest, items: list[MemoryItem]) -> list[str]:
    processes, rollout, update = request.processes, request.recipe.rollout, request.recipe.update
    notes = []
    if peak_bytes(items) > request.room:
        taken = bytes_by_phase(items)
        full = {phase for phase, size in taken.items() if phase != "host" and taken["stays"] + size > request.room}
        largest = sorted((item for item in items if item.phase in full | {"stays"}), key=lambda item: -item.bytes)
        advice = {item.name: item.remedy for item in largest if item.remedy}
        first = "; ".join(f"{name}: {remedy}" for name, remedy in list(advice.items())[:3])
        notes.append(f"Does not fit {request.gpu.name}. What is largest, and makes it smaller: {first}.")
    each = rollout.prompts // update.mini_batches
    if processes > rollout.prompts:
        notes.append(
            f"{processes - rollout.prompts} of {processes} processes have nothing to draw: a step has "
            f"{rollout.prompts} prompts, and the responses to one stay on one process."
        )
    elif processes > each:
        notes.append(
            f"A mini-batch has {each} prompts (rollout.prompts / update.mini_batches), so {processes - each} of "
            f"{processes} processes have nothing to do in an update."
        )
    elif rollout.prompts % processes or each % processes:
        notes.append(
            f"{processes} processes cannot share the {each} prompts of a mini-batch evenly: some wait for "
            "those that have one more."
        )
    return notes
