"""What a curriculum by pass rates gains on the embedded task if some of the problems are too hard.

    python benchmarks/curriculum.py --out benchmarks/results/curriculum.json

The base that ships with the package solves some sums of two digits and none of three. Of 600 problems, half are of
either kind, and a quarter are held out. Each arm has the same steps and draws as many responses. Each run is written to
the file when it ends, and the same command continues with the missing ones.
"""

from __future__ import annotations

import argparse
import json
import statistics
from functools import partial
from pathlib import Path
from typing import Any

from common import kept_runs, show

from delta_cli.data import arithmetic
from delta_cli.recipe import load_recipe
from delta_cli.recipe.data import Arithmetic
from delta_cli.recipe.shipped import FOLDER
from delta_cli.runs.folder import RunFolder, read_lines
from delta_cli.runs.observer import Observer
from delta_cli.training.setup import open_trainer

EACH = 300  # problems of each number of digits
KEYS: dict[str, Any] = {
    "run.steps": 40,
    "run.threads": 1,
    "data.held_out": 0.25,
    "data.template": "chat",
    "rollout.prompts": 16,
    "rollout.responses": 8,
    "rollout.max_tokens": 48,
    "update.mini_batches": 2,
    "evaluation.every": 20,
    "evaluation.problems": 150,
    "evaluation.samples": 2,
    "checkpoint.every": 40,
    "checkpoint.rollouts_every": 0,
}
ARMS: dict[str, dict[str, Any]] = {
    "shuffled epochs": {},
    "by pass rate": {"data.curriculum": "pass_rate"},
    "by pass rate, half explored": {"data.curriculum": "pass_rate", "data.curriculum_exploration": 0.5},
}


def write_problems(file: Path) -> None:
    """Sums of two and three digits in turns."""
    kinds = [arithmetic.problems(Arithmetic(digits=digits), EACH, 0) for digits in (2, 3)]
    rows = [{"question": each.question, "answer": each.answer} for pair in zip(*kinds, strict=True) for each in pair]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def learn(changes: dict[str, Any], seed: int, folder: Path) -> dict[str, Any]:
    """Held-out accuracy of each evaluation, and what was drawn."""
    data = folder / "sums.jsonl"
    write_problems(data)
    keys = KEYS | {"run.seed": seed, "data.source": str(data)} | changes
    recipe = load_recipe(FOLDER / "quickstart.toml", [f"{key}={json.dumps(value)}" for key, value in keys.items()])
    with open_trainer(recipe, "cpu", folder / "run", Observer()) as trainer:
        trainer.run()
    run = RunFolder(folder / "run")
    records, evaluations = (list(read_lines(file)) for file in (run.metrics, run.evaluations))
    return {
        "accuracy": [record["accuracy"] for record in evaluations],
        "low": evaluations[-1]["low"],
        "high": evaluations[-1]["high"],
        "zero_variance_groups": statistics.mean(record["zero_variance_groups"] for record in records),
        "reward_mean": statistics.mean(record["reward_mean"] for record in records),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON file of results, which is continued")
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    seeds = range(options.seeds)
    parts = {f"{arm}, seed {seed}": partial(learn, ARMS[arm], seed) for seed in seeds for arm in ARMS}
    runs = kept_runs(options.out, parts, settings=KEYS, arms=ARMS)
    rows = []
    for arm in ARMS:
        found = [runs[f"{arm}, seed {seed}"] for seed in range(options.seeds)]
        rows.append({"arm": arm} | {f"seed {s}": f"{run['accuracy'][-1]:.1%}" for s, run in enumerate(found)})
    show("Held-out accuracy at the end", rows)


if __name__ == "__main__":
    main()
