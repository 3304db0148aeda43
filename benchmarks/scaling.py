"""How each phase of a step grows with tokens, responses, hidden size and vocabulary.

    python benchmarks/scaling.py --out benchmarks/results/scaling.json

One size changes, the others stay; the steps of the different sizes are taken in turns. The exponent
is the slope of log seconds over log size, fitted to the medians: 1 is linear, 0 does not depend.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from common import show, write
from workload import Workload, steps

PHASES = ("rollout", "score", "credit", "update")  # grading goes on beside the rollout
BASE = Workload(vocabulary=2048, hidden=256, layers=2, prompts=4, responses=8, prompt=16, response=64)
AXES = {
    "response": (32, 64, 128, 256),
    "responses": (4, 8, 16, 32),
    "hidden": (128, 256, 512),
    "vocabulary": (2048, 8192, 32768),
}


def measure(axis: str, values: Sequence[int], rounds: int) -> dict[str, Any]:
    """Median seconds of every phase at each value of ``axis``, and the fitted exponents."""
    with TemporaryDirectory() as scratch, ExitStack() as stack:
        ways = []
        for value in values:
            workload = replace(BASE, **{axis: value})
            model = workload.write(Path(scratch) / str(value))
            ways.append(stack.enter_context(steps(workload, model, "delta")))
        for _ in range(rounds + 1):
            for step in ways:
                step()
        seconds = {
            phase: [statistics.median(row[phase] for row in step.seconds[1:]) for step in ways] for phase in PHASES
        }
    seconds["step"] = np.sum(list(seconds.values()), axis=0).tolist()
    exponents = {phase: exponent(values, taken) for phase, taken in seconds.items()}
    return {"axis": axis, "values": list(values), "seconds": seconds, "exponents": exponents}


def exponent(sizes: Sequence[int], seconds: Sequence[float]) -> float:
    """The slope of log seconds over log size."""
    return float(np.polyfit(np.log(sizes), np.log(seconds), 1)[0])


def table(results: list[dict[str, Any]]) -> list[dict[str, str]]:
    """One row for each size, then the exponents."""
    rows = []
    for result in results:
        for i, value in enumerate(result["values"]):
            row = {phase: f"{taken[i]:.3f}" for phase, taken in result["seconds"].items()}
            rows.append({"size": result["axis"], "value": f"{value:,}", **row})
        slopes = {phase: f"{slope:.2f}" for phase, slope in result["exponents"].items()}
        rows.append({"size": "", "value": "exponent", **slopes})
    return rows


def main() -> None:
    """Measure, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--axes", nargs="+", choices=AXES, default=list(AXES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", help="where to write the JSON")
    args = parser.parse_args()
    results = [measure(axis, AXES[axis], args.rounds) for axis in args.axes]
    show("seconds of the phases of one step", table(results))
    write(args.out, {"benchmark": "scaling", "workload": asdict(BASE), "rounds": args.rounds, "results": results})


if __name__ == "__main__":
    main()
