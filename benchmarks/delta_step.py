"""What DelTA adds to a step: its time against DAPO's, and the model's forwards counted.

    OMP_NUM_THREADS=2 python benchmarks/delta_step.py --out benchmarks/results/delta_step_two_threads.json

Both presets train a copy of one model of more than ten million parameters, on the same prompts with
the same seeds; every response has the same length. Steps are taken in turns, the first of the two
changing from round to round, and the ratio is the median over rounds of the ratios within one.
DelTA adds the features kept while scoring and the credit phase; its share of the step is given too,
from within DelTA's own steps, where the machine's noise does not drown it.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from common import show, write
from workload import PHASES, Steps, Workload, steps

PRESETS = ("dapo", "delta")


@contextmanager
def counted_forwards() -> Iterator[list[int]]:
    """A list with one entry, the number of forwards of any transformer trunk since the block began."""
    from torch.nn.modules import module as modules  # not above: processes that grade import this file, too

    count = [0]

    def note(module: object, *_: object) -> None:
        count[0] += type(module).__name__ == "Qwen3Model"

    handle = modules.register_module_forward_pre_hook(note)
    try:
        yield count
    finally:
        handle.remove()


def forwards(step: Steps) -> int:
    """Forwards of the model in one step."""
    with counted_forwards() as count:
        step()
    return count[0]


def measure(workload: Workload, rounds: int) -> dict[str, Any]:
    """Seconds of the phases of both presets, the ratio of their steps with its quartiles, and the forwards."""
    with TemporaryDirectory() as scratch, ExitStack() as stack:
        model = workload.write(Path(scratch))
        ways = {preset: stack.enter_context(steps(workload, model, preset)) for preset in PRESETS}
        result: dict[str, Any] = {"parameters": ways["delta"].learner.parameters}
        counts = {preset: forwards(step) for preset, step in ways.items()}  # warms up, too
        for number in range(rounds):
            for preset in PRESETS[:: -1 if number % 2 else 1]:
                ways[preset]()
    taken = {preset: step.seconds[1:] for preset, step in ways.items()}
    wholes = {preset: [sum(row.values()) for row in rows] for preset, rows in taken.items()}
    ratios = [delta / dapo for delta, dapo in zip(wholes["delta"], wholes["dapo"], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return result | {
        "ratio": {"median": middle, "quartiles": [low, high]},
        "credit_share": statistics.median(
            row["credit"] / whole for row, whole in zip(taken["delta"], wholes["delta"], strict=True)
        ),
        "forwards": counts,
        "seconds": {
            preset: {phase: statistics.median(row[phase] for row in rows) for phase in PHASES}
            for preset, rows in taken.items()
        },
        "step": {preset: statistics.median(rows) for preset, rows in wholes.items()},
        "rounds": wholes,
    }


def table(result: dict[str, Any]) -> list[dict[str, str]]:
    """One row for each preset."""
    low, high = result["ratio"]["quartiles"]
    ratio = f"{result['ratio']['median']:.4f} ({low:.4f} to {high:.4f})"
    return [
        {
            "preset": preset,
            **{phase: f"{result['seconds'][preset][phase]:.3f}" for phase in PHASES},
            "step (s)": f"{result['step'][preset]:.3f}",
            "of DAPO's": ratio if preset == "delta" else "1",
            "forwards": str(result["forwards"][preset]),
        }
        for preset in PRESETS
    ]


def main() -> None:
    """Measure, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--out", help="where to write the JSON")
    workload, args = Workload.from_arguments(parser)
    result = measure(workload, args.rounds)
    show(
        f"DelTA's step against DAPO's, {result['parameters'] / 1e6:.1f} million parameters "
        f"(median and quartiles over {args.rounds} rounds)",
        table(result),
    )
    print(f"the credit phase is {result['credit_share']:.2%} of DelTA's step")
    write(args.out, {"benchmark": "delta_step", "workload": asdict(workload), "results": result})


if __name__ == "__main__":
    main()
