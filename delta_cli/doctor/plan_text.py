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
FASTER = 0.95  # of a step's time, above which other keys are not worth a line
SHORT = {"drawing": "draw", "scoring": "score", "updating": "update", "collectives": "coll.", "weight sync": "sync"}
HEADER = ("GPUs", "GB", *(SHORT.get(name, name) for name in NAMES), "step", "run h", "GPU h")
WIDTHS = (4, 6, 7, 6, 6, 7, 6, 5, 7, 7, 7)
UNMEASURED = "Arithmetic from data sheets and assumptions (--details lists them): nothing was run on a GPU."


def text(
    name: str,
    found: RunPlan,
    best: RunPlan,
    settings: Sequence[str],
    scaling: Sequence[RunPlan],
    details: bool = False,
) -> Iterator[str]:
    """The lines of a plan, the verdict first.

    ``best`` is the plan with the keys ``settings``, which change no result; ``scaling`` was worked out with such keys
    for every number of GPUs. ``details`` lists every use of memory and the assumptions.
    """
    layout = found.layout
    spread = "" if layout.processes == 1 else f", sharding {layout.sharding}"
    spread += f" over {layout.parts}" if 1 < layout.parts < layout.processes else ""
    yield f"{'FITS' if found.fits else 'DOES NOT FIT'}: {_need(found)} GB of each GPU"
    yield from _advice(found, best, settings)
    yield ""
    yield f"{name} on {found.layout.processes} × {found.gpu.name}{spread}, engine {found.engine}"
    yield from _wrapped(UNMEASURED)
    yield ""
    yield from _memory(found, details)
    yield ""
    yield from _step(found)
    yield from (line for note in found.notes for line in _wrapped(note, "! "))
    yield ""
    yield from _wrapped(
        "Seconds of a step by number of GPUs, with the keys that change no result set to what each has room for. "
        "GB: of one GPU; ! is more than there is."
    )
    yield from table(scaling)
    for count, what in found.limits:
        if any(each.layout.processes > count for each in scaling):
            yield from _wrapped(f"Above {count} GPUs some have nothing to {what}.")
    if details:
        yield ""
        yield "Assumptions:"
        yield from (line for each in ASSUMPTIONS for line in _wrapped(each, "- "))


def _need(found: RunPlan) -> str:
    return f"{found.bytes / 1e9:.1f} of {found.room / 1e9:.1f}"


def _advice(found: RunPlan, best: RunPlan, settings: Sequence[str]) -> Iterator[str]:
    """What to add to the command so that the run fits, or is faster."""
    if not best.fits:
        yield from _wrapped(
            f"Nor with smaller batches ({_need(best)} GB): take more or larger GPUs, add [model.lora], or choose a "
            "smaller model."
        )
    elif settings and (not found.fits or best.step_seconds < found.step_seconds * FASTER):
        better = f"faster ({_short(best.step_seconds)} s a step)" if found.fits else f"fits ({_need(best)} GB)"
        yield from _wrapped(f"It is {better} with keys that change no result:" if found.fits else f"It {better} with:")
        yield " \\\n".join(f"  --set {each}" for each in settings)


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


def as_json(
    name: str, found: RunPlan, best: RunPlan, settings: Sequence[str], scaling: Sequence[RunPlan]
) -> dict[str, Any]:
    """Everything that ``text`` prints. Seconds, bytes and hours."""
    return {
        "recipe": name,
        "measured": False,
        "gpu": found.gpu.name,
        "engine": found.engine,
        "plan": _numbers(found) | {"items": [vars(item) for item in found.items]},
        "fitting_settings": list(settings),
        "fitting_plan": _numbers(best),
        "scaling": [_numbers(each) for each in scaling],
        "assumptions": list(ASSUMPTIONS),
    }


def settings(request: PlanRequest, best: PlanRequest) -> list[str]:
    """The keys that ``fitted`` changed from ``request`` to ``best``, as ``--set`` takes them."""
    keys = [("rollout", "batch")] if request.engine == "local" else []
    keys += [("update", name) for name in ("offload", "micro_batch_tokens", "feature_bytes")]
    pairs = [
        (f"{section}.{name}", *(getattr(getattr(each.recipe, section), name) for each in (request, best)))
        for section, name in keys
    ]
    return [f"{key}={str(after).lower()}" for key, before, after in pairs if before != after]


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


def _memory(found: RunPlan, details: bool) -> Iterator[str]:
    yield f"Memory of each GPU: {found.bytes / 1e9:.1f} GB at the worst moment, {found.room / 1e9:.1f} to use"
    for phase, total in bytes_by_phase(found.items).items():
        mine: list[MemoryItem] = sorted(
            (i for i in found.items if i.phase == phase and i.bytes), key=lambda i: -i.bytes
        )
        if mine:
            yield f"  {phase:<8}{total / 1e9:>8.2f}"
        for item in mine if details else mine[:1]:
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
