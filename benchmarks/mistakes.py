"""Does the credit find the mistake, on what do the coefficients lie, and how stable are they under wrong rewards?

    python benchmarks/mistakes.py --seeds 3 --out benchmarks/results/mistakes

Trains the quickstart and, before the updates of some of its steps, gives the step's fresh batch to
every credit. Writes OUT.json, OUT.txt and, of several steps, a figure, OUT.svg. ``--set`` changes
the recipe: with bases made by ``make_tiny_base``, ``--at 0`` shows the same for
responses with more formatting or sparser rewards.

    python benchmarks/mistakes.py --at 0 --set model.path=bases/filler12 --set data.filler=12 \\
        --set rollout.max_tokens=84 --out benchmarks/results/mistakes_filler12
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from analysis.mistakes import (
    KindMeans,
    Separation,
    kind_means,
    mark,
    separation,
    token_weights,
    updated_future_kl,
)
from analysis.noise import Stability, stability
from common import write
from rich import box
from rich.console import Console
from rich.table import Table

from backends.interface import Proxy
from delta_cli.credit import group_advantages
from delta_cli.data import prompt_order
from delta_cli.recipe import Recipe, load_recipe
from delta_cli.rollout.batch import RolloutBatch
from delta_cli.rollout.collect import sample_batch
from delta_cli.runs.observer import Observer
from delta_cli.seeds import derive
from delta_cli.study.summary import SeedInterval, over_seeds
from delta_cli.training.setup import open_trainer
from delta_cli.training.trainer import Trainer

QUICKSTART = Path(__file__).parents[1] / "recipes" / "quickstart.toml"
FLIPS = (0.1, 0.2, 0.3)
KINDS = ("delta", "delta, by group", "delta hidden_exact", "delta, within side")
DRAWN = ("delta", "delta, by group", "delta hidden_exact", "delta hidden_exact, by group", "delta, within side")
PLAIN = ("entropy (forking tokens)", "surprisal", "fipo, after the updates")
Record = dict[str, Any]


def measured_run(recipe: Recipe, steps: Sequence[int]) -> Iterator[Record]:
    """Train, and measure the batches of ``steps``, counted from 0."""
    seed = recipe.run.seed
    with TemporaryDirectory() as scratch, open_trainer(recipe, "cpu", Path(scratch) / "run", Observer()) as trainer:
        for step in range(max(steps) + 1):
            problems = prompt_order.batch(trainer.problems, step, recipe.rollout.prompts, seed)
            batch = sample_batch(
                trainer.worker, problems, trainer.recipe.rollout, derive(seed, step, "rollout 0")
            ).result()
            if step in steps:
                yield {"seed": seed, "step": step, "accuracy": float(batch.correct.mean())} | measure(
                    trainer, batch, step
                )
                continue
            updater = trainer.updater
            scored = updater.score(batch)
            updater.update(scored, updater.credit(scored, step), step)


def measure(trainer: Trainer, batch: RolloutBatch, step: int) -> Record:
    """All three questions on one batch, and the step's updates."""
    data, starts = trainer.recipe.data, batch.sequences.starts
    marks = mark(batch, data, trainer.worker.tokenizer)
    advantages = np.repeat(group_advantages(batch.rewards, batch.groups), batch.sequences.lengths)
    noise = noise_of(trainer, batch, step)
    weights = token_weights(trainer.learner, batch, step)
    weights["fipo, after the updates"] = updated_future_kl(trainer.updater, batch, step)
    return {
        "wrong": int((~batch.correct).sum()),
        "mistake_in_a_result": int(marks.results[marks.mistakes[marks.mistakes >= 0]].sum()),
        "separation": [_numbers(separation(name, values, marks, starts)) for name, values in weights.items()],
        "kinds": {name: _numbers(kind_means(weights[name], advantages, marks.digits)) for name in KINDS},
        "noise": noise,
    }


def noise_of(trainer: Trainer, batch: RolloutBatch, step: int) -> list[Record]:
    """The stability of DelTA's coefficients under flipped rewards."""
    features = trainer.learner.score(batch.sequences, Proxy("output_row")).features
    assert features is not None
    found = [
        {"scope": "group" if by_group else "batch"}
        | _numbers(
            stability(
                features,
                batch.rewards,
                batch.groups,
                batch.sequences.starts,
                share,
                np.random.default_rng([trainer.recipe.run.seed, step]),
                by_group=by_group,
            )
        )
        for by_group in (False, True)
        for share in FLIPS
    ]
    features.close()
    return found


def _numbers(found: Separation | KindMeans | Stability) -> Record:
    """The fields, with None where there was nothing to measure: JSON has no NaN."""
    return {name: None if value != value else value for name, value in asdict(found).items()}


class Summary:
    """Every number by step, table and row, with its interval over seeds."""

    def __init__(self, records: Sequence[Record]) -> None:
        self.steps = sorted({record["step"] for record in records})
        self.seeds = len({record["seed"] for record in records})
        values: dict[tuple[int, str, str, str], list[float]] = defaultdict(list)
        for record in records:
            parts = [("batch", "", {"accuracy": record["accuracy"]})]
            parts += [("separation", part["weight"], part) for part in record["separation"]]
            parts += [("kinds", name, part) for name, part in record["kinds"].items()]
            parts += [("noise", f"{part['scope']} {part['share']:.0%}", part) for part in record["noise"]]
            for table, row, part in parts:
                for number, value in part.items():
                    if isinstance(value, float):
                        values[record["step"], table, row, number].append(value)
        self._intervals = {place: over_seeds(found) for place, found in values.items()}

    def rows(self, table: str) -> list[str]:
        """Names of a table's rows, in order."""
        return list(dict.fromkeys(row for _, found, row, _ in self._intervals if found == table))

    def interval(self, step: int, table: str, row: str, number: str) -> SeedInterval | None:
        """Mean and interval of one number; None where no seed has it."""
        return self._intervals.get((step, table, row, number))

    def text(self, step: int, table: str, row: str, number: str) -> str:
        """The same for a table: mean ± half the interval."""
        found = self.interval(step, table, row, number)
        return "" if found is None else f"{found.mean:.3f} ±{found.high - found.mean:.3f}"


def tables(summary: Summary) -> Iterator[Table]:
    """Cells are means with half of the 95 % interval over seeds."""
    yield from separation_tables(summary)
    yield long_table(
        summary,
        "kinds",
        "mean coefficient of formatting and of digits, in responses with A > 0 and with A < 0",
        ("formatting_share", "formatting_positive", "digits_positive", "formatting_negative", "digits_negative"),
    )
    yield long_table(
        summary,
        "noise",
        "delta's coefficients under flipped rewards; kept: tokens whose own response was not flipped",
        ("rank_correlation", "change", "rank_correlation_kept", "change_kept"),
    )


def separation_tables(summary: Summary) -> Iterator[Table]:
    """A row for each weight, a column for each step with the batch's accuracy."""
    labels = [f"step {step} ({_percent(summary.interval(step, 'batch', '', 'accuracy'))})" for step in summary.steps]
    cells: Sequence[tuple[str, Callable[[int, str], str]]] = (
        (
            "AUC of the first wrong token against the other tokens of its response",
            lambda step, row: summary.text(step, "separation", row, "auc"),
        ),
        (
            "AUC of a wrong result against the other results of its response",
            lambda step, row: summary.text(step, "separation", row, "auc_results"),
        ),
        ("mean weight of the first wrong token / of the others", lambda step, row: _pair(summary, step, row)),
    )
    for title, cell in cells:
        rows = [[row, *(cell(step, row) for step in summary.steps)] for row in summary.rows("separation")]
        yield _table(title, ["weight", *labels], rows)


def long_table(summary: Summary, table: str, title: str, numbers: Sequence[str]) -> Table:
    """A row for each of the table's rows and each step, a column for each number."""
    rows = [
        [row, str(step), *(summary.text(step, table, row, number) for number in numbers)]
        for row in summary.rows(table)
        for step in summary.steps
    ]
    return _table(title, ["", "step", *(number.replace("_", " ") for number in numbers)], rows)


def _percent(found: SeedInterval | None) -> str:
    return "" if found is None else f"{found.mean:.0%}"


def _pair(summary: Summary, step: int, name: str) -> str:
    pair = [summary.interval(step, "separation", name, number) for number in ("there", "elsewhere")]
    return " / ".join("" if value is None else f"{value.mean:.3f}" for value in pair)


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, min_width=len(title))
    for column in columns:
        table.add_column(column, justify="left" if column == columns[0] else "right")
    for row in rows:
        table.add_row(*row)
    return table


def draw(summary: Summary, out: Path) -> None:
    """AUC over training for some of the weights, both comparisons side by side."""
    from matplotlib.figure import Figure

    drawing = Figure(figsize=(9, 3.8), layout="constrained")
    both = drawing.subplots(1, 2, sharey=True)
    for axes, number, title in zip(
        both, ("auc", "auc_results"), ("against all other tokens", "against the other results"), strict=True
    ):
        axes.set(xlabel="step", title=title)
        axes.axhline(0.5, color="#666666", linewidth=0.8)
        for name in (*DRAWN, *PLAIN):
            found = [(step, summary.interval(step, "separation", name, number)) for step in summary.steps]
            points = [(step, value.mean, value.low, value.high) for step, value in found if value is not None]
            steps, means, lows, highs = zip(*points, strict=True)
            style = ":" if name in PLAIN else "--" if "group" in name else "-"
            (line,) = axes.plot(steps, means, style, marker="o", markersize=3, label=name)
            axes.fill_between(steps, np.clip(lows, 0, 1), np.clip(highs, 0, 1), color=line.get_color(), alpha=0.1, lw=0)
        axes.grid(alpha=0.3)
    both[0].set(ylabel="AUC of the first wrong token", ylim=(-0.02, 1.02))
    drawing.legend(*both[0].get_legend_handles_labels(), loc="outside right center", frameon=False, fontsize="small")
    drawing.savefig(out.with_suffix(".svg"))


def main() -> None:
    """Measure every seed, then write and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--at", type=int, nargs="+", default=[0, 5, 10, 20, 30], help="steps to measure, from 0")
    parser.add_argument("--set", action="append", default=[], help="section.key=value, as for delta train")
    parser.add_argument("--out", type=Path, help="path of the files without their suffixes")
    given = parser.parse_args()
    records: list[Record] = []
    for seed in range(given.seeds):
        recipe = load_recipe(QUICKSTART, [*given.set, f"run.seed={seed}"])
        for record in measured_run(recipe, given.at):
            records.append(record)
            print(f"seed {seed}, step {record['step']}: accuracy {record['accuracy']:.1%}", flush=True)
    summary = Summary(records)
    consoles = [Console(width=140)]
    if given.out:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        file = given.out.with_suffix(".txt").open("w", encoding="utf-8")
        consoles.append(Console(file=file, width=140))
        write(given.out.with_suffix(".json"), {"overrides": given.set, "records": records})
        if len(summary.steps) > 1:
            draw(summary, given.out)
    for console in consoles:
        console.print(*tables(summary), f"{summary.seeds} seeds; ±: half of the 95 % interval, Student's t", sep="\n")


if __name__ == "__main__":
    main()
