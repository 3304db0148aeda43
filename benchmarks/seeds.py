"""A recipe with several seeds: held-out accuracy over the run, time of training, peak memory.

    python benchmarks/seeds.py --seeds 5 --target 0.8 --out benchmarks/results/quickstart.json
    make models/smollm2-135m/config.json
    python benchmarks/seeds.py recipes/smollm2_135m.toml --set model.path=models/smollm2-135m \\
        --out benchmarks/results/real_seeds.json

Each seed is ``delta train`` in a process of its own; without a recipe it is the quickstart. Only the records of a
finished run are kept, in ``--keep``, and a finished run is not repeated. The time covers the training steps and the
evaluations between and after them, but not the evaluation before them and the start of the program.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from common import show, write

from delta_cli.runs.folder import RunFolder, read_lines


def train(recipe: list[str], changes: list[str], seed: int, folder: Path) -> None:
    """Run a seed from its beginning, unless it finished before."""
    finished = folder / "finished"
    if finished.exists():
        return
    shutil.rmtree(folder, ignore_errors=True)
    options = [f"--set={change}" for change in (*changes, f"run.seed={seed}")]
    command = [sys.executable, "-m", "delta_cli", "train", *recipe, *options, "--run-dir", str(folder)]
    subprocess.run(command, check=True)
    for part in (RunFolder(folder).checkpoints, RunFolder(folder).model):  # may be gigabytes
        shutil.rmtree(part)
    finished.touch()


def numbers(seed: int, folder: Path, target: float | None) -> dict[str, Any]:
    """What the run recorded."""
    run = RunFolder(folder)
    steps, evaluations = list(read_lines(run.metrics)), list(read_lines(run.evaluations))
    seconds = [record["seconds"] for record in steps]
    seconds[0] -= steps[0]["seconds_evaluate"]  # the first record's time begins before the first evaluation
    reached = next((each["step"] for each in evaluations if target and each["accuracy"] >= target), None)
    return {
        "seed": seed,
        "accuracy": [{name: each[name] for name in ("step", "accuracy", "low", "high")} for each in evaluations],
        "steps": len(steps),
        "seconds": sum(seconds),
        "seconds_to_target": None if reached is None else sum(seconds[:reached]),
        "seconds_of_steps": [record["seconds"] - record["seconds_evaluate"] for record in steps],
        "peak_bytes": max(record["peak_memory"] for record in steps),
    }


def main() -> None:
    """Run the seeds one after the other and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="*", metavar="RECIPE", help="without it, the quickstart")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--set", action="append", default=[], help="section.key=value, as for delta train")
    parser.add_argument("--target", type=float, help="accuracy whose time is given")
    parser.add_argument("--keep", type=Path, default=Path("build/seeds"), help="folder for the runs' records")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = []
    for seed in range(args.seeds):
        folder = args.keep / f"{Path(args.recipe[0]).stem if args.recipe else 'quickstart'}-seed{seed}"
        train(args.recipe, args.set, seed, folder)
        rows.append(numbers(seed, folder, args.target))
    show(f"{' '.join(args.recipe) or 'quickstart'}, {args.seeds} seeds", [_shown(row) for row in rows])
    write(args.out, {"benchmark": "seeds", "recipe": args.recipe, "overrides": args.set, "rows": rows})


def _shown(row: dict[str, Any]) -> dict[str, str]:
    reached = row["seconds_to_target"]
    return {
        "seed": str(row["seed"]),
        **{f"after {each['step']}": f"{each['accuracy']:.1%}" for each in row["accuracy"]},
        "training (min)": f"{row['seconds'] / 60:.1f}",
        "to the target (s)": "–" if reached is None else f"{reached:.0f}",
        "peak (GB)": f"{row['peak_bytes'] / 1e9:.1f}",
    }


if __name__ == "__main__":
    main()
