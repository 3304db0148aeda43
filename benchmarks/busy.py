"""A step of a recipe beside other programs: how OpenMP's threads wait, and how many there are.

Runs a few steps with each setting, first as the machine is and then beside busy processes. The load average is that of
the moment before each run: on a machine that others use, the first half is not idle.

    python benchmarks/busy.py --busy 8
    python benchmarks/busy.py --recipe recipes/smollm2_135m.toml --set model.path=FOLDER --limit 120
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from common import write

SPIN = "while True: pass"
SETTINGS: dict[str, dict[str, str]] = {
    "two threads that spin while they wait": {"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "ACTIVE"},
    "two threads, OpenMP's default": {"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": " "},
    "two threads that sleep while they wait": {"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "PASSIVE"},
    "one thread": {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"},
}


@contextmanager
def busy(count: int) -> Iterator[None]:
    """Keep ``count`` processes busy."""
    running = [subprocess.Popen([sys.executable, "-c", SPIN]) for _ in range(count)]
    try:
        yield
    finally:
        for each in running:
            each.kill()
            each.wait()


def steps(recipe: list[str], variables: dict[str, str], count: int, limit: float) -> list[float]:
    """Seconds of each step after the first; fewer than asked for if ``limit`` seconds are over.

    ``recipe``: what ``delta train`` is given beside the settings of this benchmark.
    """
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        command = [sys.executable, "-m", "delta_cli", "train", *recipe, "--backend", "cpu", "--quiet"]
        command += ["--run-dir", str(run), "--set", f"run.steps={count}", "--set", "evaluation.every=never"]
        started = subprocess.Popen(command, env={**os.environ, **variables}, stderr=subprocess.DEVNULL)
        try:
            started.wait(limit)
        except subprocess.TimeoutExpired:
            started.kill()
            started.wait()
        file = run / "metrics.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        return [json.loads(line)["seconds"] for line in lines][1:]


def measure(recipe: list[str], loads: list[int], count: int, limit: float) -> Iterator[dict[str, Any]]:
    """A row for each load and setting."""
    for load in loads:
        for name, variables in SETTINGS.items():
            before = os.getloadavg()[0]
            begun = time.perf_counter()
            with busy(load):
                found = steps(recipe, variables, count, limit)
            yield {
                "busy_processes": load,
                "setting": name,
                "seconds_of_a_step": median(found) if found else None,
                "steps": found,
                "load_average_before": before,
                "wall_seconds": time.perf_counter() - begun,
            }


def main() -> None:
    """Print a line for each run, and write them as JSON to --out."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--recipe", help="its file or name; the quickstart if it is left out")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="as with delta train")
    parser.add_argument("--busy", type=int, default=8, help="busy processes beside the second half")
    parser.add_argument("--steps", type=int, default=5, help="steps of a run")
    parser.add_argument("--limit", type=float, default=28.0, help="most seconds of a run")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    recipe = [options.recipe] if options.recipe else ["--set", "rollout.prompts=32"]
    recipe += [word for setting in options.set for word in ("--set", setting)]
    rows = []
    for row in measure(recipe, sorted({0, options.busy}), options.steps, options.limit):
        rows.append(row)
        step = row["seconds_of_a_step"]
        said = "none within the limit" if step is None else f"{step:6.2f} s a step"
        print(f"{row['busy_processes']} busy, load {row['load_average_before']:4.1f}: {row['setting']:<40} {said}")
    write(options.out, {"recipe": options.recipe or "quickstart", "rows": rows})


if __name__ == "__main__":
    main()
