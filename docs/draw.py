"""Draw the pictures of the documents.

    python docs/draw.py method             docs/images/method.png: coefficients of made-up tokens
    python docs/draw.py credit RUN STEP    docs/images/credit.svg: coefficients of the step's first group

The committed credit.svg is of ``delta train --set run.steps=10``, step 10.
"""

from __future__ import annotations

import gzip
import json
import sys
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from delta_cli.assets import model_path
from delta_cli.credit import DenseFeatures, token_coefficients
from delta_cli.data.tokenizer import Tokenizer
from delta_cli.rewards.equations import find_equations

IMAGES = Path(__file__).parent / "images"
TOKENS = 60  # of each kind
SIDES = {
    "right responses": ("#0072b2", "o"),
    "wrong responses": ("#d55e00", "X"),
}  # shapes too, for colour-blind readers


def method() -> None:
    """Tokens as points: shared tokens in the middle, tokens of one side only at that side."""
    rng = np.random.default_rng(0)
    centres = np.repeat([[0.0, 0.0], [1.0, 0.6], [0.0, 0.0], [-1.0, 0.6]], TOKENS, axis=0)
    points = centres + rng.normal(scale=0.3, size=centres.shape)
    credit = token_coefficients(DenseFeatures(points), [1.0, -1.0], [0, 2 * TOKENS, 4 * TOKENS])
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for index, (name, (colour, marker)) in enumerate(SIDES.items()):
        own = slice(index * 2 * TOKENS, (index + 1) * 2 * TOKENS)
        mean = points[own].mean(axis=0)
        sizes = 250 * (credit.weights[own] - 0.75)
        left.scatter(*points[own].T, s=sizes, c=colour, marker=marker, alpha=0.5, label=name)
        left.plot(*mean, marker="P", markersize=14, color=colour, markeredgecolor="white", linestyle="none")
        right.scatter(credit.margins[own], credit.weights[own], s=18, c=colour, marker=marker, alpha=0.5, label=name)
    left.set(title="tokens; size: coefficient, plus: centroid of a side", xticks=[], yticks=[], ylim=(-1.4, 1.9))
    right.set(title="nearer to its own side: counts more", xlabel="margin D", ylabel="coefficient")
    right.axhline(1, color="grey", linewidth=0.8)
    left.legend(loc="upper center", fontsize=8)
    figure.savefig(IMAGES / "method.png", dpi=120)


STYLE = """<style>
  .card { fill: #ffffff; stroke: #d0d7de }
  text { font: 15px system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; fill: #1f2328 }
  .token { font: 19px ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace; fill: #1f2328 }
  .note { fill: #59636e }
  .false { fill: none; stroke: #cf222e; stroke-width: 2 }
  @media (prefers-color-scheme: dark) {
    .card { fill: #0d1117; stroke: #3d444d }
    text { fill: #f0f6fc }
    .token { fill: #1f2328 }
    .note { fill: #9198a1 }
    .false { stroke: #f85149 }
  }
</style>"""
BLUE, ORANGE = np.array([88, 153, 255]), np.array([255, 150, 42])
CELL, ROW, TOP, LEFT, WIDTH = 14, 42, 70, 136, 720  # pixels
LARGEST = 0.25  # distance from 1 at which a colour is full


def credit(run: Path, step: int) -> None:
    """A row for each different response to the step's first prompt, right ones first."""
    with gzip.open(run / "rollouts" / f"step-{step:06d}.jsonl.gz", "rt", encoding="utf-8") as file:
        group = [row for line in file if (row := json.loads(line))["group"] == 0]
    ordered = sorted(group, key=lambda row: (not row["correct"], row["response"]))
    same = [list(rows) for _, rows in groupby(ordered, key=lambda row: row["tokens"])]
    same.sort(key=lambda rows: (not rows[0]["correct"], -len(rows)))
    height = TOP + ROW * len(same) + 52
    title = f"{group[0]['prompt'].strip()}  The right answer is {group[0]['answer']}. Step {step} of the quickstart."
    rows = [line for place, row in enumerate(same) for line in _row(row, TOP + ROW * place)]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
        f"<title>{escape(title)}</title>",
        STYLE,
        f'<rect class="card" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="10"/>',
        f'<text x="24" y="40">{escape(title)}</text>',
        *rows,
        *_legend(height - 24),
    ]
    (IMAGES / "credit.svg").write_text("\n".join([*parts, "</svg>", ""]), encoding="utf-8")


def _row(responses: list[dict[str, Any]], top: int) -> list[str]:
    """One response, how often it was drawn, and which of its written equations are false."""
    first, tokenizer = responses[0], Tokenizer.load(model_path("tiny-base"))
    verdict = "✓ right" if first["correct"] else "✗ wrong"
    lines = [f'<text x="24" y="{top + 17}">{verdict} × {len(responses)}</text>']
    left, ends = LEFT, [LEFT]
    for index, token in enumerate(first["tokens"]):
        text = tokenizer.decode([token]) if index < len(first["tokens"]) - 1 else " end "
        coefficient = np.mean([row["coefficients"][index] for row in responses])
        lines.append(_cell(left, top, CELL * len(text), float(coefficient)))
        lines += [f'<text class="token" x="{left + CELL * place + 1}" y="{top + 19}">{c}</text>'
                  for place, c in enumerate(text) if c != " "]  # fmt: skip
        ends += [left + CELL * (place + 1) for place in range(len(text))]
        left += CELL * len(text)
    wrong = [equation for equation in find_equations(first["response"]) if not equation.holds]
    lines += [f'<path class="false" d="M{ends[each.start]} {top + 28}H{ends[each.stop]}"/>' for each in wrong]
    return lines


def _cell(left: int, top: int, width: int, coefficient: float) -> str:
    share = min(abs(coefficient - 1) / LARGEST, 1)
    red, green, blue = (255 + share * ((ORANGE if coefficient > 1 else BLUE) - 255)).astype(int)
    return f'<rect x="{left}" y="{top}" width="{width}" height="25" fill="#{red:02x}{green:02x}{blue:02x}"/>'


def _legend(y: int) -> list[str]:
    values = np.linspace(1 - LARGEST, 1 + LARGEST, 11)
    cells = [_cell(LEFT + 20 * place, y - 18, 20, float(value)) for place, value in enumerate(values)]
    texts = [
        f'<text class="note" x="24" y="{y}">{1 - LARGEST:.2f} damped</text>',
        f'<text class="note" x="{LEFT + 230}" y="{y}">amplified {1 + LARGEST:.2f}</text>',
        f'<path class="false" d="M{WIDTH - 158} {y - 5}h24"/>',
        f'<text class="note" x="{WIDTH - 124}" y="{y}">false equation</text>',
    ]
    return [*cells, *texts]


if __name__ == "__main__":
    if sys.argv[1] == "method":
        method()
    else:
        credit(Path(sys.argv[2]), int(sys.argv[3]))
