"""Run the units of a protocol in a few processes, and keep each answer as soon as it is there."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context, parent_process
from multiprocessing.process import BaseProcess
from pathlib import Path

from delta_cli.bench.arms import DAPO, BenchArm
from delta_cli.bench.tasks import Task
from delta_cli.bench.units import Unit, measure
from delta_cli.runs.folder import JsonObject, read_lines

FINDING_TASKS = ("addition", "sparse", "fork", "chain", "words")
ADAPTER_TASKS = ("addition", "fork")
ADAPTER_SEEDS = 4
MEASURED_SEEDS, QUICK_MEASURED_SEEDS = 8, 2  # on which mistakes and gradients are measured


def plan(
    tasks: Sequence[Task],
    arms: Sequence[BenchArm],
    seeds: Sequence[int],
    backend: str,
    quick: bool,
    changes: Sequence[str] = (),
) -> Iterator[Unit]:
    """Every unit of the protocol, seed by seed, so that what is cut short has all arms on the same seeds."""
    credits = [arm for arm in arms if arm.role != "reference"]
    given = tuple(changes)
    measured = QUICK_MEASURED_SEEDS if quick else MEASURED_SEEDS
    for number, seed in enumerate(seeds):
        for task in tasks:
            if task.name in FINDING_TASKS and number < measured:
                yield from (Unit("finding", task, arm, seed, backend, given) for arm in credits)
                yield from (Unit("gradient", task, arm, seed, backend, given) for arm in arms)
            if task.name in ADAPTER_TASKS and number < ADAPTER_SEEDS and not quick:
                yield Unit("adapters", task, DAPO, seed, backend, given)
            yield from (Unit("learning", task, arm, seed, backend, given) for arm in arms)


def run(units: Sequence[Unit], file: Path, jobs: int, say: Callable[[str], None]) -> None:
    """Compute the units that the file does not hold yet, one line each.

    A process computes one unit, so that the most memory it used is that unit's.
    """
    _cut_unfinished_line(file)
    done = {tuple(record["key"]) for record in records(file)}
    missing = [unit for unit in units if unit.key not in done]
    with ProcessPoolExecutor(jobs, get_context("spawn"), initializer=_end_with_parent, max_tasks_per_child=1) as pool:
        futures = [pool.submit(measure, unit) for unit in missing]
        try:
            for number, future in enumerate(as_completed(futures), 1):
                record = future.result()
                with file.open("a", encoding="utf-8") as out:
                    out.write(json.dumps(record) + "\n")
                what = " ".join(str(record[name]) for name in ("question", "task", "arm"))
                say(f"{number}/{len(missing)}  {what}, seed {record['seed']}  {record['seconds']:.0f} s")
        except BaseException:
            for future in futures:
                future.cancel()
            raise


def _end_with_parent() -> None:
    """End this worker when the bench ends, even if a signal killed it; else it would wait for work forever."""

    def watch(parent: BaseProcess) -> None:
        parent.join()
        os._exit(1)

    parent = parent_process()
    assert parent is not None
    threading.Thread(target=watch, args=(parent,), daemon=True).start()


def records(file: Path) -> list[JsonObject]:
    """The answers that are there. Raises UserError for a damaged line."""
    return list(read_lines(file)) if file.exists() else []


def _cut_unfinished_line(file: Path) -> None:
    """Remove what a killed bench left of its last line, so that the next line does not continue it."""
    if file.exists():
        os.truncate(file, file.read_bytes().rfind(b"\n") + 1)
