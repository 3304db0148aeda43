"""`make real` with several seeds: held-out accuracy before, half-way and after, time of training, peak memory.

    make models/smollm2-135m/config.json
    python benchmarks/real_seeds.py --out benchmarks/results/real_seeds.json

Each seed is ``delta train recipes/smollm2_135m.toml`` in a process of its own, of which only the records are kept, in
``--keep``; what is done is not done again. The time is that of the training steps with the evaluations between and
after them, without the evaluation before them and the start of the program.
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

RECIPE = Path(__file__).parents[1] / "recipes" / "smollm2_135m.toml"


def train(model: str, seed: int, folder: Path) -> None:
    """Run a seed from its beginning, unless it has ended before."""
    ended = folder / "ended"
    if ended.exists():
        return
    shutil.rmtree(folder, ignore_errors=True)
    changes = ("--set", f"model.path={model}", "--set", f"run.seed={seed}")
    subprocess.run(
        [sys.executable, "-m", "delta_cli", "train", str(RECIPE), *changes, "--run-dir", str(folder)], check=True
    )
    for part in (RunFolder(folder).checkpoints, RunFolder(folder).model):  # gigabytes
        shutil.rmtree(part)
    ended.touch()


def numbers(seed: int, folder: Path) -> dict[str, Any]:
    """What a run's own records say."""
    run = RunFolder(folder)
    steps, evaluations = list(read_lines(run.metrics)), list(read_lines(run.evaluations))
    # The first record's time begins before the evaluation at the start.
    seconds = sum(record["seconds"] for record in steps) - steps[0]["seconds_evaluate"]
    return {
        "seed": seed,
        "accuracy": [{name: each[name] for name in ("step", "accuracy", "low", "high")} for each in evaluations],
        "gain": evaluations[-1]["accuracy"] - evaluations[0]["accuracy"],
        "seconds": seconds,
        "seconds_of_steps": [record["seconds"] - record["seconds_evaluate"] for record in steps],
        "peak_bytes": max(record["peak_memory"] for record in steps),
    }


def main() -> None:
    """Run the seeds one after the other and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="models/smollm2-135m")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--keep", type=Path, default=Path("build/real_seeds"), help="folder for the runs' records")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = []
    for seed in range(args.seeds):
        folder = args.keep / f"seed{seed}"
        train(args.model, seed, folder)
        rows.append(numbers(seed, folder))
    show("make real", [_shown(row) for row in rows])
    write(args.out, {"benchmark": "real_seeds", "rows": rows})


def _shown(row: dict[str, Any]) -> dict[str, str]:
    return {
        "seed": str(row["seed"]),
        **{f"after {each['step']}": f"{each['accuracy']:.1%}" for each in row["accuracy"]},
        "points": f"{100 * row['gain']:+.1f}",
        "training (min)": f"{row['seconds'] / 60:.1f}",
        "peak (GB)": f"{row['peak_bytes'] / 1e9:.1f}",
    }


if __name__ == "__main__":
    main()
