"""A plan for a person, in 80 columns, and for a program."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from delta_cli.doctor.assumptions import ASSUMPTIONS
from delta_cli.doctor.memory import MemoryItem, bytes_by_phase
from delta_cli.doctor.plan import RunPlan
from delta_cli.doctor.plan_request import PlanRequest
from delta_cli.doctor.step_time import NAMES

COLUMNS = 80
SHORT = {"drawing": "draw", "scoring": "score", "updating": "update", "collectives": "coll.", "weight sync": "sync"}
HEADER = ("GPUs", "GB", *(SHORT.get(name, name) for name in NAMES), "step", "run h", "GPU h")
WIDTHS = (4, 6, 7, 6, 6, 7, 6, 5, 7, 7, 7)
UNMEASURED = "Arithmetic from data sheets and the assumptions below: nothing was run on a GPU."


def text(name: str, found: RunPlan, settings: Sequence[str], scaling: Sequence[RunPlan]) -> Iterator[str]:
    """The lines of a plan. ``settings`` are the recipe's keys that ``scaling`` was worked out with, for this number."""
    spread = "" if found.layout.processes == 1 else f", sharding {found.layout.sharding}"
    yield f"{name} on {found.layout.processes} × {found.gpu.name}{spread}, engine {found.engine}"
    yield from _wrapped(UNMEASURED)
    yield ""
    yield from _memory(found)
    yield ""
    yield from _step(found)
    yield from (line for note in found.notes for line in _wrapped(note, "! "))
    yield ""
    yield from _wrapped(
        "Seconds of a step by number of GPUs, with the keys that change no result set to what each has room for "
        f"(with {found.layout.processes}: --set {' --set '.join(settings)}). GB: of one GPU; ! is more than there is."
    )
    yield from table(scaling)
    for count, what in found.limits:
        if any(each.layout.processes > count for each in scaling):
            yield from _wrapped(f"Above {count} GPUs some have nothing to {what}.")
    yield ""
    yield "Assumptions:"
    yield from (line for each in ASSUMPTIONS for line in _wrapped(each, "- "))


def table(plans: Sequence[RunPlan]) -> Iterator[str]:
    """A line for each number of GPUs, within 80 columns."""
    for cells in (HEADER, *map(row, plans)):
        yield " ".join(cell.rjust(width) for cell, width in zip(cells, WIDTHS, strict=True)).rstrip()


def row(found: RunPlan) -> tuple[str, ...]:
    """The cells of a plan, under ``HEADER``."""
    processes, memory = str(found.layout.processes), _short(found.bytes / 1e9)
    if not found.fits:
        return processes, f"{memory}!", *"-" * (len(HEADER) - 2)
    times = [*(phase.seconds for phase in found.phases), found.step_seconds, found.hours]
    return processes, memory, *map(_short, times), _short(found.hours * found.layout.processes)


def as_json(name: str, found: RunPlan, settings: Sequence[str], scaling: Sequence[RunPlan]) -> dict[str, Any]:
    """Everything that ``text`` prints. Seconds, bytes and hours."""
    return {
        "recipe": name,
        "measured": False,
        "gpu": found.gpu.name,
        "engine": found.engine,
        "plan": _numbers(found) | {"items": [vars(item) for item in found.items]},
        "scaling_settings": list(settings),
        "scaling": [_numbers(each) for each in scaling],
        "assumptions": list(ASSUMPTIONS),
    }


def settings(request: PlanRequest) -> list[str]:
    """The keys that ``fitted`` sets, as ``--set`` takes them."""
    rollout, update = request.recipe.rollout, request.recipe.update
    batch = [f"rollout.batch={rollout.batch}"] if request.engine == "local" else []
    return [
        *batch,
        f"update.offload={str(update.offload).lower()}",
        f"update.micro_batch_tokens={update.micro_batch_tokens}",
        f"update.feature_bytes={update.feature_bytes}",
    ]


def _numbers(found: RunPlan) -> dict[str, Any]:
    return {
        "processes": found.layout.processes,
        "sharding": found.layout.sharding,
        "bytes": found.bytes,
        "room": found.room,
        "fits": found.fits,
        "host_bytes": found.host_bytes,
        "phases": [vars(phase) for phase in found.phases],
        "step_seconds": found.step_seconds,
        "run_hours": found.hours,
        "gpu_hours": found.hours * found.layout.processes,
        "notes": list(found.notes),
        "limits": [{"gpus": count, "nothing_to": what} for count, what in found.limits],
    }


def _memory(found: RunPlan) -> Iterator[str]:
    verdict = "fits" if found.fits else "DOES NOT FIT"
    most, room = found.bytes / 1e9, found.room / 1e9
    yield f"Memory of each GPU: {most:.1f} GB at the worst moment, {room:.1f} to use: {verdict}"
    for phase, total in bytes_by_phase(found.items).items():
        mine: list[MemoryItem] = sorted(
            (i for i in found.items if i.phase == phase and i.bytes), key=lambda i: -i.bytes
        )
        if mine:
            yield f"  {phase:<8}{total / 1e9:>8.2f}"
        for item in mine:
            yield from _wrapped(f"{item.bytes / 1e9:>16.2f}  {item.name}: {item.how}", "  ", 18)
    if found.host_bytes:
        count = min(found.layout.processes, found.gpu.node)
        yield f"  Host memory of a node, for {count} processes: {found.host_bytes / 1e9:.0f} GB"


def _step(found: RunPlan) -> Iterator[str]:
    rate = found.tokens / found.step_seconds
    yield (
        f"A step: {_short(found.step_seconds)} s, {rate:,.0f} tokens a second; "
        f"{found.steps} steps: {_short(found.hours)} h, {_short(found.hours * found.layout.processes)} GPU hours"
    )
    for phase in found.phases:
        share = phase.seconds / found.step_seconds
        yield from _wrapped(f"{phase.name:<12}{_short(phase.seconds):>8} s {share:>4.0%}  {phase.how}", "  ", 29)


def _short(number: float) -> str:
    """Three digits that count, or whole numbers."""
    if number == 0:
        return "0"
    return f"{number:.2f}" if number < 1 else f"{number:.1f}" if number < 100 else f"{number:.0f}"


def _wrapped(line: str, start: str = "", hang: int = 2) -> list[str]:
    after = " " * (hang + len(start) if hang > 2 else len(start))
    return textwrap.wrap(
        line, COLUMNS, initial_indent=start, subsequent_indent=after, drop_whitespace=True, break_on_hyphens=False
    )
