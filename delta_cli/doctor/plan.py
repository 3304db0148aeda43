"""What a step would take on rented GPUs: memory of each process and seconds of each phase. Arithmetic only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from delta_cli.doctor.estimate import Item, needed, totals
from delta_cli.doctor.gpus import Gpu
from delta_cli.doctor.phases import Phase, memory, phases
from delta_cli.doctor.placement import Layout
from delta_cli.doctor.plan_request import Engine, Question


@dataclass(frozen=True)
class Plan:
    """A run on some GPUs, worked out."""

    gpu: Gpu
    layout: Layout
    engine: Engine
    room: int  # bytes of a GPU that a run may take
    steps: int
    tokens: float  # drawn in a step, by all processes
    items: tuple[Item, ...]  # memory of one process
    phases: tuple[Phase, ...]
    notes: tuple[str, ...]
    limits: tuple[tuple[int, str], ...]  # GPUs above which some have nothing to do, and what

    @property
    def bytes(self) -> int:
        """Of one GPU's memory, at the worst moment."""
        return needed(self.items)

    @property
    def fits(self) -> bool:
        """Whether the memory suffices."""
        return self.bytes <= self.room

    @property
    def host_bytes(self) -> int:
        """Of one node's host memory, by all its processes."""
        return totals(self.items)["host"] * min(self.layout.processes, self.gpu.node)

    @property
    def step_seconds(self) -> float:
        """Of one step, evaluation and checkpoints apart."""
        return sum(phase.seconds for phase in self.phases)

    @property
    def hours(self) -> float:
        """Of the whole run."""
        return self.step_seconds * self.steps / 3600


def plan(question: Question) -> Plan:
    """Memory and time of the question's run."""
    items = memory(question)
    rollout = question.recipe.rollout
    return Plan(
        gpu=question.gpu,
        layout=question.layout,
        engine=question.engine,
        room=question.room,
        steps=question.recipe.run.steps,
        tokens=question.work(rollout.prompts).drawn,
        items=tuple(items),
        phases=phases(question, items),
        notes=tuple(_notes(question, items)),
        limits=((rollout.prompts // question.recipe.update.mini_batches, "update"), (rollout.prompts, "draw")),
    )


def fitted(question: Question) -> Question:
    """The question with those keys of its recipe that change no result set to what the GPU has room for.

    Moments are on the GPU or the host, micro-batches as the recipe has them or as small as one sequence,
    whichever makes the faster step; responses drawn at a time and features take what is left. Where nothing
    fits, the least.
    """
    rollout, asked = question.recipe.rollout, question.recipe.update.micro_batch_tokens
    sizes = sorted({asked, min(asked, rollout.max_prompt_tokens + rollout.max_tokens)}, reverse=True)
    options = [_filled(question, offload, size) for size in sizes for offload in (False, True)]
    fitting = [option for option in options if needed(memory(option)) <= question.room]
    if not fitting:
        return min(options, key=lambda option: needed(memory(option)))
    return min(fitting, key=lambda option: plan(option).step_seconds)


def _filled(question: Question, offload: bool, micro_batch_tokens: int) -> Question:
    """The question with its memory filled up with features and with responses drawn at a time."""
    update = {"offload": offload, "micro_batch_tokens": micro_batch_tokens, "feature_bytes": 0}
    found = _changed(question, rollout={"batch": 1}, update=update)
    taken = totals(memory(found))
    spare = question.room - taken["stays"] - taken["score"]
    found = _changed(found, update={"feature_bytes": max(0, spare)})
    low, high = 1, max(1, question.drawn.responses)
    while low < high:  # the most responses at a time that fit
        middle = (low + high + 1) // 2
        fits = needed(memory(_changed(found, rollout={"batch": middle}))) <= question.room
        low, high = (middle, high) if fits else (low, middle - 1)
    return _changed(found, rollout={"batch": low})


def _changed(question: Question, **sections: Mapping[str, Any]) -> Question:
    changes = {name: getattr(question.recipe, name).model_copy(update=keys) for name, keys in sections.items()}
    return replace(question, recipe=question.recipe.model_copy(update=changes))


def _notes(question: Question, items: list[Item]) -> list[str]:
    processes, rollout, update = question.processes, question.recipe.rollout, question.recipe.update
    notes = []
    if needed(items) > question.room:
        taken = totals(items)
        full = {phase for phase, size in taken.items() if phase != "host" and taken["stays"] + size > question.room}
        largest = sorted((item for item in items if item.phase in full | {"stays"}), key=lambda item: -item.bytes)
        advice = {item.name: item.remedy for item in largest if item.remedy}
        first = "; ".join(f"{name}: {remedy}" for name, remedy in list(advice.items())[:3])
        notes.append(f"Does not fit {question.gpu.name}. What is largest, and makes it smaller: {first}.")
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
