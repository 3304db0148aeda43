"""Draw the picture of docs/method.md, with the real coefficients of made-up tokens: ``python docs/draw.py``."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from delta_cli.credit import DenseFeatures, token_coefficients

TOKENS = 60  # of each kind
SIDES = {"right responses": ("#0072b2", "o"), "wrong responses": ("#d55e00", "X")}  # differ for the colour-blind too


def main() -> None:
    """Tokens as points: shared ones in the middle, those of one side only at its end."""
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
    figure.savefig(Path(__file__).parent / "images" / "method.png", dpi=120)


if __name__ == "__main__":
    main()
