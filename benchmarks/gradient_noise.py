"""Does the credit lower the variance of the gradient? Mini-batches of one batch against the batch's own gradient.

    python benchmarks/gradient_noise.py --seeds 3 --out benchmarks/results/gradient_noise.json

A batch of 64 prompts with 8 responses of the quickstart is drawn once, without any update. For each method the
gradient of the whole batch, of squared norm ``signal``, and those of 16 mini-batches: ``noise`` is the mean of
their squared norms less the signal, the trace of their covariance. What decides about a learning rate is noise
over signal, which no common factor of the weights changes.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from common import show, write

from backends import registry
from backends.interface import Learner
from delta_cli.credit import TokenCoefficients
from delta_cli.data import prompt_order
from delta_cli.recipe import Recipe, load_recipe
from delta_cli.recipe.backend_settings import backend_settings
from delta_cli.rollout.batch import RolloutBatch
from delta_cli.rollout.collect import sample_batch
from delta_cli.rollout.worker import RolloutWorker
from delta_cli.seeds import derive
from delta_cli.study.summary import over_seeds
from delta_cli.training.setup import load_data, load_tokenizer, make_grader
from delta_cli.training.update import ScoredBatch, Updater

QUICKSTART = Path(__file__).parents[1] / "recipes" / "quickstart.toml"
PROMPTS, MINI_BATCHES = 64, 16
METHODS = {
    "dapo": ("method.preset=dapo",),
    "delta": ("method.preset=delta",),
    "delta, random": ("method.preset=delta", "delta.score=random"),
    "delta, exact by group": ("method.preset=delta", "delta.proxy=hidden_exact", "delta.scope=group"),
    "delta, 0.2 to 1.8": ("method.preset=delta", "delta.lambda_min=0.2", "delta.lambda_max=1.8"),
    "false equations": ("method.preset=dapo", "method.blame=equations"),
}


def recipe_of(seed: int, changes: tuple[str, ...] = ()) -> Recipe:
    """The quickstart on so many prompts, without what moves weights beside the gradient."""
    fixed = (f"run.seed={seed}", f"rollout.prompts={PROMPTS}", "rollout.responses=8", "reward.workers=1")
    return load_recipe(QUICKSTART, [*fixed, f"update.mini_batches={MINI_BATCHES}", *changes])


def squared_norm(updater: Updater, batch: ScoredBatch, coefficients: TokenCoefficients, groups: Any) -> float:
    """Of the gradient of these prompts' mean; an update at the rate 0 tells it and moves nothing."""
    surrogate = updater.surrogate(batch, coefficients, groups)
    if not surrogate.has_gradient:
        return 0.0
    updater.accumulate(batch.rollout, groups, surrogate)
    return updater.learner.step(0.0, surrogate.scale) ** 2


def noise_of(recipe: Recipe, learner: Learner, batch: RolloutBatch) -> dict[str, float]:
    """Signal and noise of one method on a batch."""
    updater = Updater(recipe, learner)
    scored = updater.score(batch)
    coefficients = updater.credit(scored, 0)
    everything = np.arange(len(batch.problems))
    signal = squared_norm(updater, scored, coefficients, everything)
    parts = [squared_norm(updater, scored, coefficients, part) for part in np.array_split(everything, MINI_BATCHES)]
    noise = float(np.mean(parts)) - signal
    return {"signal": signal, "noise": noise, "ratio": noise / signal}


def measure(seed: int) -> dict[str, dict[str, float]]:
    """All methods on the first batch of a seed."""
    recipe = recipe_of(seed)
    tokenizer = load_tokenizer(recipe)
    problems = prompt_order.batch(load_data(recipe, tokenizer).problems, 0, PROMPTS, seed)
    learner = registry.create("cpu", backend_settings(recipe))
    try:
        with make_grader(recipe) as grader:
            worker = RolloutWorker(learner, tokenizer, grader, recipe.data.prompt_template)
            batch = sample_batch(worker, problems, recipe.rollout, derive(seed, 0, "rollout 0")).result()
        return {name: noise_of(recipe_of(seed, changes), learner, batch) for name, changes in METHODS.items()}
    finally:
        learner.close()


def main() -> None:
    """Measure every seed, print the means."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out")
    args = parser.parse_args()
    found = [measure(seed) for seed in range(args.seeds)]
    rows = []
    for name in METHODS:
        ratio = over_seeds([each[name]["ratio"] for each in found])
        relative = over_seeds([each[name]["ratio"] / each["dapo"]["ratio"] for each in found])
        rows.append(
            {
                "weights": name,
                "noise / signal": f"{ratio.mean:.2f}",
                "relative to dapo": f"{relative.mean:.3f} [{relative.low:.3f}, {relative.high:.3f}]",
            }
        )
    show(f"the gradient's noise over {MINI_BATCHES} mini-batches of a batch", rows)
    write(args.out, {"benchmark": "gradient_noise", "seeds": args.seeds, "results": found})


if __name__ == "__main__":
    main()
