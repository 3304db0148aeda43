"""Does GRPO with DelTA learn as well in TRL as in ``delta train``? The embedded task, several seeds, equal settings.

    python benchmarks/trl_learning.py --seeds 3
    python benchmarks/trl_learning.py --way "TRL with DelTA" --out learning.json

A step is 32 prompts × 16 responses and four updates on them. Both start from the tiny model, with the
quickstart's settings; TRL's loss is dapo with both clips (``delta=10`` is its dual clip). They draw
different problems and responses, so only what they reach is compared: the mean reward of the last quarter
of the steps, and the accuracy on 256 held-out problems with four samples each, before and after.

One thing differs: TRL shuffles a batch's responses before it splits them into updates, while
``delta train`` keeps the responses of a prompt together. The third way is TRL without that shuffle.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from common import show, write

from delta_cli.runs.folder import RunFolder, read_lines
from delta_cli.study.summary import over_seeds

EXAMPLE = Path(__file__).parents[1] / "examples" / "trl_delta.py"
MINI_BATCHES = 4
UNSHUFFLED = f"""
import runpy, trl.trainer.grpo_trainer as module
module.shuffle_sequence_dict = lambda batch: batch
runpy.run_path({str(EXAMPLE)!r}, run_name="__main__")
"""


def run(*command: str) -> None:
    """A command in a process of its own."""
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr}")


def with_delta_train(seed: int, steps: int, folder: Path) -> tuple[Path, Path]:
    """``delta train``: its folder and its model."""
    settings = [f"run.seed={seed}", f"run.steps={steps}", "evaluation.every=0", "evaluation.problems=8"]
    run("-m", "delta_cli", "train", "--quiet", "--run-dir", str(folder), *(f"--set={each}" for each in settings))
    return folder, folder / "model"


def with_trl(seed: int, steps: int, folder: Path, shuffle: bool = True) -> tuple[Path, Path]:
    """The example script: its folder for delta and its model."""
    arguments = [f"--output_dir={folder}", f"--seed={seed}", f"--max_steps={steps * MINI_BATCHES}"]
    arguments += ["--weight_decay=0", "--delta=10", "--delta_rollouts_every=1"]
    run(*([str(EXAMPLE)] if shuffle else ["-c", UNSHUFFLED]), *arguments)
    return folder / "delta", folder


WAYS = {
    "delta train": with_delta_train,
    "TRL with DelTA": with_trl,
    "TRL, prompts together": partial(with_trl, shuffle=False),
}


def accuracy(model: str, out: Path) -> float:
    """Share of right responses to the held-out problems."""
    run("-m", "delta_cli", "eval", model, "--suite=arithmetic", "--quiet", f"--out={out}")
    return float(json.loads((out / "evaluation.json").read_text())["average"]["avg"]["mean"])


def one(way: str, seed: int, steps: int, scratch: Path) -> dict[str, Any]:
    """A run, and what its records and its model say."""
    records, model = WAYS[way](seed, steps, scratch / f"{way} {seed}")
    rewards = [record["reward_mean"] for record in read_lines(RunFolder(records).metrics)]
    if len(rewards) != steps:
        raise SystemExit(f"{way}, seed {seed}: {len(rewards)} steps are recorded, not {steps}")
    return {
        "way": way,
        "seed": seed,
        "rewards": rewards,
        "last quarter": statistics.fmean(rewards[-steps // 4 :]),
        "after": accuracy(str(model), scratch / f"{way} {seed} evaluated"),
    }


def main() -> None:
    """Run the seeds, the ways in turns, and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--way", action="append", choices=WAYS, help="only this; may be given several times")
    parser.add_argument("--out")
    given = parser.parse_args()
    rows = []
    with TemporaryDirectory() as scratch:
        before = accuracy("tiny-base", Path(scratch) / "before")
        for seed in range(given.seeds):
            for way in given.way or WAYS:
                rows.append(one(way, seed, given.steps, Path(scratch)))
                print(rows[-1], flush=True)
    found = {
        way: {name: over_seeds([row[name] for row in rows if row["way"] == way]) for name in ("last quarter", "after")}
        for way in given.way or WAYS
    }
    show(
        f"{given.steps} steps, {given.seeds} seeds; accuracy before: {before:.3f}",
        [{"": way, **{name: value.text(".3f") for name, value in values.items()}} for way, values in found.items()],
    )
    means = {
        way: {name: [value.mean, value.low, value.high] for name, value in each.items()} for way, each in found.items()
    }
    write(given.out, {"benchmark": "trl_learning", "steps": given.steps, "before": before, "mean": means, "runs": rows})


if __name__ == "__main__":
    main()
