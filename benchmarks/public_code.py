"""How much the public code's choices change: coefficients and the factor of each token, on one batch.

    OMP_NUM_THREADS=1 python benchmarks/public_code.py --out benchmarks/results/public_code.json

A batch of the quickstart is drawn and scored once; each option is then computed on it. What is compared
are token weights, which multiply the token's gradient; the micro-batch mean is a factor of its own.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from common import show, write

from delta_cli.cli.options import quickstart
from delta_cli.credit import group_advantages, token_coefficients
from delta_cli.recipe import load_recipe
from delta_cli.runs.observer import Observer
from delta_cli.training.setup import open_trainer


def compare(name: str, found: np.ndarray, ours: np.ndarray) -> dict[str, Any]:
    """Range of the quotient, and how the two sets of weights go together."""
    quotient = found / ours
    low, high = np.quantile(quotient, [0.01, 0.99])
    correlation = float(np.corrcoef(found, ours)[0, 1]) if found.std() and ours.std() else None
    return {
        "option": name,
        "least": float(quotient.min()),
        "1 %": float(low),
        "99 %": float(high),
        "most": float(quotient.max()),
        "correlation": correlation,
    }


def packed(lengths: np.ndarray, limit: int) -> np.ndarray:
    """The factor of each token under the mean by micro-batch: responses in order, up to ``limit`` tokens each."""
    batches: list[list[int]] = [[]]
    for row, length in enumerate(lengths):
        if batches[-1] and sum(lengths[batches[-1]]) + length > limit:
            batches.append([])
        batches[-1].append(row)
    factors = np.empty(len(lengths))
    for rows in batches:
        factors[rows] = lengths.mean() * len(rows) / lengths[rows].sum()
    return np.repeat(factors, lengths)


def main() -> None:
    """Draw, score, compare, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--out", help="where to write the JSON")
    args = parser.parse_args()
    recipe = load_recipe(quickstart(), [f"rollout.prompts={args.prompts}"])
    with (
        tempfile.TemporaryDirectory() as folder,
        open_trainer(recipe, args.backend, Path(folder) / "run", Observer()) as trainer,
    ):
        batch, _ = trainer._collect(0)
        features = trainer.learner.score(batch.sequences, trainer.updater.proxy).features
        assert features is not None
        advantages = group_advantages(batch.rewards, batch.groups)
        starts, lengths = batch.sequences.starts, batch.sequences.lengths
        ours = token_coefficients(features, advantages, starts).weights
        shards = {n: token_coefficients(features, advantages, starts, shards=n).weights for n in (2, 4, 8)}
        median = token_coefficients(features, advantages, starts, centroid="median").weights
        right = np.abs(advantages)
        one_sided = token_coefficients(features, right, starts, one_sided="zero").weights
        features.close()
    rows = [compare(f"delta.shards = {n}", weights, ours) for n, weights in shards.items()]
    rows.append(compare('delta.centroid = "median"', median, ours))
    rows.append(compare('delta.one_sided = "zero", all right', one_sided, np.ones_like(ours)))
    tokens = len(ours)
    for count in (4, 16):
        name = f"micro_batch_mean, about {count} micro-batches"
        rows.append(compare(name, packed(lengths, tokens // count), np.ones_like(ours)))
    table = [{k: f"{v:.3f}" if isinstance(v, float) else v or "" for k, v in row.items()} for row in rows]
    show("the public code's choices", table)
    settings = {"prompts": args.prompts, "responses": recipe.rollout.responses, "tokens": tokens}
    write(args.out, {"benchmark": "public_code", "settings": settings, "results": rows})


if __name__ == "__main__":
    main()
