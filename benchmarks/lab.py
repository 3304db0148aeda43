"""The lab: many short runs of the embedded task, to choose a variant of the credit and then to test it.

    python benchmarks/lab.py explore                      # every arm on seeds 0-7, and a sweep of learning rates
    python benchmarks/lab.py confirm                      # what benchmarks/lab_hypothesis.toml says, on seeds 100-115
    python benchmarks/lab.py explore --summary            # the table of what is there

A run is 24 steps of 16 prompts with 8 responses, about ten seconds on one core; all runs of a seed see the same
problems in the same order. Runs are kept in OUT/runs.jsonl, one line each, so that a call goes on where an
earlier one stopped. Differences are paired by seed: mean with a 95 % interval (Student's t), and the
one-sided Wilcoxon signed-rank test that the arm is above its reference.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from common import write
from rich.console import Console
from rich.table import Table
from scipy import stats

from delta_cli.recipe import load_recipe
from delta_cli.runs.folder import RunFolder, read_lines
from delta_cli.runs.observer import Observer
from delta_cli.study.summary import over_seeds
from delta_cli.training.setup import open_trainer

HERE = Path(__file__).parent
QUICKSTART = HERE.parent / "recipes" / "quickstart.toml"
HYPOTHESIS = HERE / "lab_hypothesis.toml"
RESULTS = HERE / "results" / "lab"
SHORT = (
    "run.steps=24",
    "rollout.prompts=16",
    "rollout.responses=8",
    "reward.workers=1",
    "evaluation.every=0",
    "evaluation.at_start=false",
    "evaluation.samples=2",
    "checkpoint.every=1000",
    "checkpoint.rollouts_every=0",
)
DELTA = ("method.preset=delta",)
FILLER = ("model.path=bases/filler4", "data.filler=4", "rollout.max_tokens=60")  # formatting in every response
RATES = (2e-4, 1e-3, 2e-3)
EXPLORED, SWEPT, CONFIRMED = range(8), range(4), range(100, 116)
Record = dict[str, Any]


@dataclass(frozen=True)
class Arm:
    """What a run changes in the recipe; ``against`` is the arm that it is compared with."""

    name: str
    changes: tuple[str, ...]
    seeds: Sequence[int] = EXPLORED
    against: str = "dapo"


ARMS = (
    Arm("dapo", ("method.preset=dapo",)),
    Arm("delta", DELTA),
    Arm("topk", (*DELTA, "delta.proxy=hidden_topk")),
    Arm("exact", (*DELTA, "delta.proxy=hidden_exact")),
    Arm("group", (*DELTA, "delta.scope=group")),
    Arm("topk_group", (*DELTA, "delta.proxy=hidden_topk", "delta.scope=group")),
    Arm("exact_group", (*DELTA, "delta.proxy=hidden_exact", "delta.scope=group")),
    Arm("k0", (*DELTA, "delta.refinements=0")),
    Arm("k2", (*DELTA, "delta.refinements=2")),
    Arm("wide", (*DELTA, "delta.lambda_min=0.5", "delta.lambda_max=1.5")),
    Arm("wide_group", (*DELTA, "delta.scope=group", "delta.lambda_min=0.2", "delta.lambda_max=1.8")),
    Arm("first_gamma", (*DELTA, "delta.temperature=first")),
    Arm("equations", ("method.preset=dapo", "method.blame=equations")),
    Arm("equations_delta", (*DELTA, "method.blame=equations")),
)
SWEEP = tuple(
    Arm(f"{preset}_{rate:g}", (f"method.preset={preset}", f"update.learning_rate={rate}"), SWEPT, f"dapo_{rate:g}")
    for rate in RATES
    for preset in ("dapo", "delta")
)
FORMATTING = (
    Arm("dapo_filler", ("method.preset=dapo", *FILLER), SWEPT, "dapo_filler"),
    Arm("delta_filler", (*DELTA, *FILLER), SWEPT, "dapo_filler"),
    Arm("group_filler", (*DELTA, "delta.scope=group", *FILLER), SWEPT, "dapo_filler"),
    Arm("equations_filler", ("method.preset=dapo", "method.blame=equations", *FILLER), SWEPT, "dapo_filler"),
)


def wanted(arms: Sequence[Arm]) -> Iterator[tuple[Arm, int]]:
    """Seed by seed, so that what is cut short has compared all arms on the same seeds."""
    for seed in sorted({seed for arm in arms for seed in arm.seeds}):
        yield from ((arm, seed) for arm in arms if seed in arm.seeds)


def one(arm: Arm, seed: int) -> Record:
    """Train once; the numbers of the run."""
    recipe = load_recipe(QUICKSTART, [*SHORT, *arm.changes, f"run.seed={seed}"])
    start = time.perf_counter()
    with TemporaryDirectory() as scratch:
        with open_trainer(recipe, "cpu", Path(scratch) / "run", Observer()) as trainer:
            trainer.run()
        run = RunFolder(Path(scratch) / "run")
        steps, evaluations = list(read_lines(run.metrics)), list(read_lines(run.evaluations))
    gc.collect()
    curve = [record["accuracy"] for record in steps]
    return {
        "arm": arm.name,
        "seed": seed,
        "area": float(np.mean(curve)),
        "final": evaluations[-1]["accuracy"],
        "curve": [round(value, 4) for value in curve],
        "tokens": sum(record["tokens"] for record in steps),
        "seconds": round(time.perf_counter() - start, 1),
    }


def fill(arms: Sequence[Arm], file: Path) -> None:
    """Do the runs that are not in the file yet."""
    done = {(record["arm"], record["seed"]) for record in read(file)}
    todo = [(arm, seed) for arm, seed in wanted(arms) if (arm.name, seed) not in done]
    for number, (arm, seed) in enumerate(todo, start=1):
        record = one(arm, seed)
        with file.open("a", encoding="utf-8") as out:
            out.write(json.dumps(record) + "\n")
        numbers = f"area {record['area']:.3f}  final {record['final']:.3f}  {record['seconds']} s"
        print(f"{number}/{len(todo)}  {arm.name} seed {seed}  {numbers}", flush=True)


def read(file: Path) -> list[Record]:
    """The runs that are there."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []


def rows(arms: Sequence[Arm], runs: Sequence[Record]) -> Iterator[Record]:
    """Of every arm with runs: means with intervals, and differences from its reference paired by seed."""
    found = {name: {r["seed"]: r for r in runs if r["arm"] == name} for name in {r["arm"] for r in runs}}
    for arm in (arm for arm in arms if arm.name in found):
        own, other = found[arm.name], found.get(arm.against, {})
        seeds = sorted(own.keys() & other.keys())
        row: Record = {"arm": arm.name, "against": arm.against, "runs": len(own)}
        for number in ("area", "final"):
            row[number] = over_seeds([record[number] for record in own.values()])
            differences = np.array([own[seed][number] - other[seed][number] for seed in seeds])
            if arm.name != arm.against and len(seeds) > 1:
                row[f"{number} difference"] = over_seeds(differences.tolist())
                row[f"{number} p"] = (
                    float(stats.wilcoxon(differences, alternative="greater").pvalue) if differences.any() else 1.0
                )
        yield row


def table(title: str, found: Sequence[Record]) -> Table:
    """For people: percent."""
    shown = Table(title=title, box=None, padding=(0, 2, 0, 0))
    for column in ("arm", "runs", "area, %", "− reference", "p", "final, %", "− reference", "p"):
        shown.add_column(column, justify="left" if column == "arm" else "right")
    for row in found:
        cells = [row["arm"], str(row["runs"])]
        for number in ("area", "final"):
            cells.append(f"{100 * row[number].mean:.1f}")
            if (difference := row.get(f"{number} difference")) is None:
                cells += ["", ""]
                continue
            low, high = 100 * difference.low, 100 * difference.high
            cells += [f"{100 * difference.mean:+.1f} [{low:+.1f}, {high:+.1f}]", f"{row[f'{number} p']:.3f}"]
        shown.add_row(*cells)
    return shown


def _plain(found: Sequence[Record]) -> list[Record]:
    """The rows for JSON."""
    return [{name: asdict(v) if is_dataclass(v) else v for name, v in row.items()} for row in found]


def hypothesis() -> tuple[Record, tuple[Arm, ...]]:
    """What was written down before the confirmation, and its two arms."""
    if not HYPOTHESIS.is_file():
        raise SystemExit(f"{HYPOTHESIS}: write the hypothesis down first")
    said = tomllib.loads(HYPOTHESIS.read_text(encoding="utf-8"))
    reference = Arm(said["reference"]["name"], tuple(said["reference"]["set"]), CONFIRMED, said["reference"]["name"])
    return said, (reference, Arm(said["variant"]["name"], tuple(said["variant"]["set"]), CONFIRMED, reference.name))


def main() -> None:
    """Do what is missing, then sum up."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("explore", "confirm"))
    parser.add_argument("--summary", action="store_true", help="run nothing")
    parser.add_argument("--formatting", action="store_true", help="also the arms that need bases/filler4")
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    file = given.out / f"{given.part}.jsonl"
    said: Record = {}
    if given.part == "confirm":
        said, arms = hypothesis()
    else:
        arms = (*ARMS, *SWEEP, *(FORMATTING if given.formatting else ()))
    if not given.summary:
        fill(arms, file)
    runs = read(file)
    found = list(rows(arms, runs))
    title = f"{given.part}: {len(runs)} runs" + (f"; {said['hypothesis']}" if said else "")
    shown = table(title, found)
    Console(width=150).print(shown)
    with (given.out / f"{given.part}.txt").open("w", encoding="utf-8") as out:
        Console(file=out, width=150).print(shown)
    write(given.out / f"{given.part}.json", {"runs": len(runs), "hypothesis": said, "rows": _plain(found)})


if __name__ == "__main__":
    main()
