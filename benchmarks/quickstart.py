"""The quickstart over several seeds: held-out accuracy before and after, time of training, peak memory.

    python benchmarks/quickstart.py --seeds 5 --out benchmarks/results/quickstart.json

Each seed is ``delta train`` in a process of its own. The time is that of the training steps, without
the evaluation before them and the start of the program.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from common import show, write

from delta_cli.runs.folder import RunFolder, read_lines

TARGET, SECONDS = 0.8, 120.0


def one(seed: int, folder: Path, overrides: list[str]) -> dict[str, Any]:
    """Train with a seed; what the run's own records say."""
    command = [sys.executable, "-m", "delta_cli", "train", "--quiet", "--run-dir", str(folder)]
    for override in (f"run.seed={seed}", *overrides):
        command += ["--set", override]
    subprocess.run(command, check=True)
    run = RunFolder(folder)
    steps, evaluations = list(read_lines(run.metrics)), list(read_lines(run.evaluations))
    # The first record's time begins before the evaluation at the start.
    seconds = [record["seconds"] for record in steps]
    seconds[0] -= steps[0]["seconds_evaluate"]
    reached = next((e["step"] for e in evaluations if e["accuracy"] >= TARGET), None)
    return {
        "seed": seed,
        "before": evaluations[0]["accuracy"],
        "after": evaluations[-1]["accuracy"],
        "steps": len(steps),
        "seconds": sum(seconds),
        "seconds to 80 %": None if reached is None else sum(seconds[:reached]),
        "peak MB": max(record["peak_memory"] for record in steps) / 1e6,
    }


def main() -> None:
    """Run the seeds one after the other and say how many got there in time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--set", action="append", default=[], help="section.key=value, as for delta train")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    rows = []
    with TemporaryDirectory() as scratch:
        for seed in range(given.seeds):
            rows.append(one(seed, Path(scratch) / str(seed), given.set))
            print(rows[-1], flush=True)
    show("quickstart", [{name: _text(value) for name, value in row.items()} for row in rows])
    in_time = [row for row in rows if row["seconds to 80 %"] is not None and row["seconds to 80 %"] <= SECONDS]
    print(f"{len(in_time)} of {len(rows)} seeds at {TARGET:.0%} within {SECONDS:.0f} s of training")
    if given.out:
        write(given.out, {"overrides": given.set, "rows": rows})


def _text(value: float | None) -> str:
    return "never" if value is None else f"{value:.3g}"


if __name__ == "__main__":
    main()
