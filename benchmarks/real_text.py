"""What the credit looks at in a language model's responses, early and late in a recorded run.

    python benchmarks/real_text.py studies/words/runs/delta-seed0 --out benchmarks/results/real_text

Writes OUT.json, the tables and the small extract that the picture is drawn from, OUT.txt, and OUT.png: the
responses to one prompt, each token on the colour of its coefficient, framed where a calculation goes wrong.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from analysis.real_text import agreements, findings, first_wrong, kind_rows
from common import write
from matplotlib.colors import TwoSlopeNorm
from matplotlib.patches import Rectangle
from rich import box
from rich.console import Console
from rich.table import Table

from delta_cli.reporting.inspection import most_mixed
from delta_cli.runs.records import RecordedResponse, RecordedRun

Record = dict[str, Any]
SHOWN = 8  # responses in the picture
LEFT = 9  # characters before them


def looked_at(run: RecordedRun, steps: Sequence[int]) -> Record:
    """The tables over some steps."""
    responses = [response for step in steps for response in run.responses(step)]
    return {
        "steps": list(steps),
        "responses": len(responses),
        "accuracy": float(np.mean([response.correct for response in responses])),
        "kinds": [asdict(row) for row in kind_rows(responses, run.tokenizer)],
        "agreement": [asdict(row) for row in agreements(responses, run.tokenizer)],
        "first_wrong": [_numbers(asdict(row)) for row in findings(responses, run.tokenizer)],
    }


def extract(run: RecordedRun, step: int) -> Record:
    """The different responses to the step's prompt with most of both sides: what the picture needs."""
    groups = [list(group) for _, group in groupby(run.responses(step), key=lambda response: response.group)]
    chosen = sorted(most_mixed(groups), key=lambda response: not response.correct)
    counts = Counter(response.text for response in chosen)
    different = list({response.text: response for response in chosen}.values())[:SHOWN]
    return {
        "step": step,
        "question": chosen[0].prompt.rpartition("Q: ")[2].partition("\n")[0],
        "answer": chosen[0].answer,
        "responses": [_shown(run, response) | {"times": counts[response.text]} for response in different],
    }


def _shown(run: RecordedRun, response: RecordedResponse) -> Record:
    pieces = run.tokenizer.pieces(response.tokens)
    return {
        "pieces": pieces,
        "coefficients": np.round(response.coefficients, 3).tolist(),
        "correct": response.correct,
        "first_wrong": first_wrong(pieces),
    }


def _numbers(found: Record) -> Record:
    return {name: None if value != value else value for name, value in found.items()}  # JSON has no NaN


def draw(shown: Record, file: Path) -> None:
    """The picture: a line for each response, a box of one inch's eighth for each character."""
    rows = shown["responses"]
    values = [value for row in rows for value in row["coefficients"]]
    norm, colours = TwoSlopeNorm(1.0, min([*values, 0.95]), max([*values, 1.05])), plt.get_cmap("RdBu_r")
    texts = [[piece.replace("\n", "⏎") for piece in row["pieces"]] for row in rows]
    title = f"{shown['question']}  answer {shown['answer']}, step {shown['step']}"
    width = max(LEFT + max(sum(map(len, each)) for each in texts), 0.72 * len(title)) + 2
    height = len(rows) + 1.2
    figure = plt.figure(figsize=(width / 8, 0.3 * height + 0.5))
    axes = figure.add_axes((0, 0.5 / (0.3 * height + 0.5), 1, 1 - 0.5 / (0.3 * height + 0.5)))
    axes.set(xlim=(0, width), ylim=(-len(rows) + 0.5, 1.7))
    axes.axis("off")
    axes.text(0.5, 1.1, title, va="center", fontsize=10)
    for line, (row, pieces) in enumerate(zip(rows, texts, strict=True)):
        label = f"{row['times']} × {'right' if row['correct'] else 'wrong'}"
        axes.text(0.5, -line, label, va="center", fontsize=10)
        place = LEFT
        for at, (piece, value) in enumerate(zip(pieces, row["coefficients"], strict=True)):
            wrong = at == row["first_wrong"]
            frame = {"edgecolor": "black", "linewidth": 2, "zorder": 3} if wrong else {"edgecolor": "white"}
            colour = colours(0.5 + 0.75 * (norm(value) - 0.5))  # text stays readable on it
            axes.add_patch(Rectangle((place, -line - 0.42), len(piece), 0.84, facecolor=colour, **frame))
            for character in piece:
                axes.text(place + 0.5, -line, character, ha="center", va="center", fontsize=10, zorder=4)
                place += 1
    bar = figure.add_axes((1.5 / width, 0.3 / (0.3 * height + 0.5), 12 / width, 0.1 / (0.3 * height + 0.5)))
    figure.colorbar(plt.cm.ScalarMappable(norm, colours), cax=bar, orientation="horizontal", format="%.2f")
    bar.set_xticks([norm.vmin, 1.0, norm.vmax])
    bar.tick_params(labelsize=8)
    figure.savefig(file, dpi=130)


def tables(parts: dict[str, Record]) -> list[Table]:
    """For people."""
    kinds = Table(title="mean coefficient, surprisal and entropy (nats) by kind of token", box=box.SIMPLE)
    for column in ("steps", "side", "kind", "share, %", "coefficient", "surprisal", "entropy"):
        kinds.add_column(column)
    agreement = Table(title="rank correlation of the coefficient", box=box.SIMPLE)
    for column in ("steps", "side", "with surprisal", "with entropy", "tokens"):
        agreement.add_column(column)
    wrong = Table(title="chance that the first wrong digit outweighs another token, another digit", box=box.SIMPLE)
    for column in ("steps", "weight", "another token", "another digit", "responses"):
        wrong.add_column(column)
    for name, part in parts.items():
        for row in part["kinds"]:
            means = (f"{row[key]:.3f}" for key in ("coefficient", "surprisal", "entropy"))
            kinds.add_row(name, row["side"], row["kind"], f"{100 * row['share']:.0f}", *means)
        for row in part["agreement"]:
            agreement.add_row(
                name, row["side"], f"{row['surprisal']:.2f}", f"{row['entropy']:.2f}", f"{row['tokens']:,}"
            )
        for row in part["first_wrong"]:
            chances = (("–" if row[key] is None else f"{row[key]:.3f}") for key in ("auc", "auc_digits"))
            wrong.add_row(name, row["weight"], *chances, str(row["responses"]))
    return [kinds, agreement, wrong]


def main() -> None:
    """Look at the first and the last quarter of the recorded steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--step", type=int, help="of the picture; without it, the last of the early ones")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    run = RecordedRun(given.run)
    quarter = max(1, len(run.steps) // 4)
    early, late = run.steps[:quarter], run.steps[-quarter:]
    parts = {f"{steps[0]}–{steps[-1]}": looked_at(run, steps) for steps in (early, late)}
    shown = extract(run, given.step or early[-1])
    write(given.out.with_suffix(".json"), {"run": given.run.name, "parts": parts, "extract": shown})
    draw(shown, given.out.with_suffix(".png"))
    with given.out.with_suffix(".txt").open("w", encoding="utf-8") as file:
        for console in (Console(width=110), Console(file=file, width=110)):
            for table in tables(parts):
                console.print(table)


if __name__ == "__main__":
    main()
