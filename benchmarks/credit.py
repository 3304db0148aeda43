"""DelTA's coefficients on ready features: this project's arithmetic against the literal procedure.

    python benchmarks/credit.py --out credit.json
    python benchmarks/credit.py --sizes 10000x4096 100000x1024 --rounds 7

The literal procedure is that of the method's public code, in float32 on micro-batches of tokens:
one pass over the data for the centroids, one for the temperatures, one for each refinement, one
for the final score; each makes v = (1 − p)·h anew, and margins are differences of two squared
distances. The public code runs a model forward for each pass on top, which is not counted here.

Times are taken in turns in one process; peak memory is what a fresh process needs beyond the
hidden states; errors are against the literal procedure in float64. The hidden states have a few
dimensions of large mean and spread, as post-norm hidden states of language models do.

``on N alone`` is what is left of our time where both reductions over [N, H] cost nothing: the part
that numpy does on the host wherever the features lie.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
from common import in_fresh_process, interleaved, median_ratio, peak_memory, show, write
from numpy.typing import ArrayLike

from delta_cli.credit import output_row_features, token_coefficients
from delta_cli.credit.features import FeatureReductions

SIZES = ("10000x256", "10000x1024", "10000x4096", "100000x256", "100000x1024", "100000x4096", "1000000x256")
RESPONSE = 250  # tokens
MICRO_BATCH = 16384  # tokens of one pass of the literal procedure


class Batch:
    """Float32 hidden states [N, H] with outlier dimensions, log-probabilities, advantages of both signs and 0."""

    def __init__(self, tokens: int, width: int) -> None:
        rng = np.random.default_rng(0)
        self.logp = np.log(rng.uniform(0.02, 0.99, tokens))
        self.starts = np.append(np.arange(0, tokens, RESPONSE), tokens)
        self.advantages = rng.choice([1.2, 0.4, 0.0, -0.4, -1.2], len(self.starts) - 1)
        self.per_token = np.repeat(self.advantages, np.diff(self.starts))  # [N]
        contrast = (rng.normal(size=width) / np.sqrt(width)).astype(np.float32)  # between the sides, about 1 long
        self.hidden = np.empty((tokens, width), np.float32)
        for first in range(0, tokens, 1024):  # small pieces: the peak before the measurement stays that of hidden
            part = slice(first, min(first + 1024, tokens))
            rng.standard_normal(out=self.hidden[part], dtype=np.float32)
            self.hidden[part] += np.sign(self.per_token[part, None]).astype(np.float32) * contrast
            self.hidden[part, :4] = self.hidden[part, :4] * 8 + 50


def ours(batch: Batch) -> tuple[np.ndarray, np.ndarray]:
    """Weights and margins of ``token_coefficients``."""
    features = output_row_features(batch.hidden, batch.logp)
    result = token_coefficients(features, batch.advantages, batch.starts)
    return result.weights, result.margins


@np.errstate(over="ignore")  # a saturated sigmoid: exp is inf and the score 0, as it should be
def literal(batch: Batch, dtype: type[np.floating] = np.float32) -> tuple[np.ndarray, np.ndarray]:
    """The same, for one refinement, in four passes over v, everything in ``dtype``."""
    A = batch.per_token.astype(dtype)
    positive, negative = A > 0, A < 0
    masses = [np.where(positive, A, 0), np.where(negative, -A, 0)]

    def proxies() -> Iterator[tuple[slice, np.ndarray]]:
        p = np.exp(batch.logp.astype(dtype))
        for first in range(0, len(p), MICRO_BATCH):
            part = slice(first, min(first + MICRO_BATCH, len(p)))
            yield part, (1 - p[part])[:, None] * batch.hidden[part].astype(dtype, copy=False)

    def centroids(sums: list[np.ndarray], totals: list[np.floating]) -> list[np.ndarray]:
        return [total / max(mass, dtype(1e-8)) for total, mass in zip(sums, totals, strict=True)]

    def margins(v: np.ndarray, mu: list[np.ndarray], part: slice) -> np.ndarray:
        D = np.square(v - mu[1]).sum(axis=1) - np.square(v - mu[0]).sum(axis=1)
        return np.where(positive[part], D, np.where(negative[part], -D, 0))

    def temperatures(D: np.ndarray) -> np.ndarray:
        plus, minus = (np.sqrt(max(D[side].var(), dtype(1e-8))) for side in (positive, negative))
        return np.where(positive, plus, minus)

    width = batch.hidden.shape[1]
    D, alpha = np.empty_like(A), np.empty_like(A)
    sums = [np.zeros(width, dtype) for _ in masses]
    for part, v in proxies():  # the centroids
        sums = [total + mass[part] @ v for total, mass in zip(sums, masses, strict=True)]
    mu = centroids(sums, [mass.sum() for mass in masses])
    for part, v in proxies():  # the temperatures
        D[part] = margins(v, mu, part)
    gamma = temperatures(D)
    sums = [np.zeros(width, dtype) for _ in masses]
    for part, v in proxies():  # the refinement; it stores the next temperatures, from the same margins
        D[part] = margins(v, mu, part)
        alpha[part] = 1 / (1 + np.exp(-D[part] / gamma[part]))
        sums = [total + (mass[part] * alpha[part]) @ v for total, mass in zip(sums, masses, strict=True)]
    gamma = temperatures(D)
    mu = centroids(sums, [(mass * alpha).sum() for mass in masses])
    for part, v in proxies():  # the final score
        D[part] = margins(v, mu, part)
    weights = np.where(A == 0, dtype(0.8), dtype(0.8) + dtype(0.4) / (1 + np.exp(-D / gamma)))
    return weights * (len(weights) / weights.sum()), D


class Replayed:
    """Features whose reductions are answered from memory, in the order in which a first run asked for them."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.answers: list[np.ndarray] = []
        self._features: FeatureReductions | None = output_row_features(batch.hidden, batch.logp)
        self._next: Iterator[np.ndarray] = iter(())
        self.coefficients()
        self._features = None

    def coefficients(self) -> None:
        """The coefficients once: at first with the reductions, later without."""
        self._next = iter(self.answers)
        token_coefficients(self, self.batch.advantages, self.batch.starts)

    def weighted_sum(self, weights: ArrayLike) -> np.ndarray:
        """Σ_t weights[s, t]·v_t, [S, H]."""
        return self._answer("weighted_sum", weights)

    def project(self, direction: ArrayLike) -> np.ndarray:
        """⟨v_t, direction⟩ for every token, [N]."""
        return self._answer("project", direction)

    def _answer(self, reduction: str, argument: ArrayLike) -> np.ndarray:
        if self._features is None:
            return next(self._next)
        self.answers.append(getattr(self._features, reduction)(argument))
        return self.answers[-1]


WAYS = {"ours": ours, "literal": literal}


def measure(size: str, rounds: int) -> dict[str, Any]:
    """Time, peak memory and error of both ways at one size."""
    tokens, width = map(int, size.split("x"))
    batch = Batch(tokens, width)
    ways = {name: partial(way, batch) for name, way in WAYS.items()}
    seconds = interleaved(ways | {"on N alone": Replayed(batch).coefficients}, rounds)
    weights, margins = literal(batch, np.float64)
    row: dict[str, Any] = {
        "tokens": tokens,
        "hidden": width,
        "speedup": median_ratio(seconds["literal"], seconds["ours"]),
        "seconds_on_n_alone": statistics.median(seconds["on N alone"]),
    }
    for name, way in WAYS.items():
        found_weights, found_margins = way(batch)
        row[name] = {
            "seconds": statistics.median(seconds[name]),
            "weight_error": float(np.abs(found_weights - weights).max()),
            "margin_error": float(np.abs(found_margins - margins).max() / margins.std()),  # of their spread
        }
    del batch
    for name in WAYS:
        row[name]["peak_bytes"] = in_fresh_process(__file__, "--sizes", size, "--memory", name)
    return row


def memory(name: str, size: str) -> None:
    """Print the bytes that one way needs beyond its input; run in a process of its own."""
    WAYS[name](Batch(RESPONSE * 10, 64))  # the libraries' own buffers
    batch = Batch(*map(int, size.split("x")))
    before = peak_memory()
    WAYS[name](batch)
    print(json.dumps(peak_memory() - before))


def table(rows: list[dict[str, Any]]) -> list[dict[str, str]]:
    """The rows as the table prints them: literal → ours, and what is gained."""
    return [
        {
            "N": f"{row['tokens']:,}",
            "H": f"{row['hidden']:,}",
            "seconds": f"{row['literal']['seconds']:.2f} → {row['ours']['seconds']:.2f}",
            "faster": f"{row['speedup']:.1f}×",
            "on N alone": f"{row['seconds_on_n_alone']:.3f}",
            "peak MB": f"{row['literal']['peak_bytes'] / 1e6:.0f} → {row['ours']['peak_bytes'] / 1e6:.0f}",
            "error of weights": f"{row['literal']['weight_error']:.0e} → {row['ours']['weight_error']:.0e}",
        }
        for row in rows
    ]


def main() -> None:
    """Measure, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=SIZES, metavar="NxH", help="tokens x hidden size")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--max-gb", type=float, default=8.0, help="leave out sizes that would need more memory")
    parser.add_argument("--out", help="where to write the JSON")
    parser.add_argument("--memory", choices=WAYS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.memory:
        memory(args.memory, args.sizes[0])
        return
    rows = []
    for size in args.sizes:
        tokens, width = map(int, size.split("x"))
        need = 4 * width * (tokens + 6 * MICRO_BATCH)  # hidden, and float64 micro-batches of the reference
        if need > args.max_gb * 1e9:
            print(f"{size} left out: it needs {need / 1e9:.1f} GB (--max-gb {args.max_gb:g})")
            continue
        rows.append(measure(size, args.rounds))
    show("DelTA coefficients on ready features: literal → ours", table(rows))
    write(args.out, {"benchmark": "credit", "rounds": args.rounds, "results": rows})


if __name__ == "__main__":
    main()
