"""The recurrence of hybrid models and the head on MLX, each alone with its gradient, beside what MLX and mlx-lm have.

    python benchmarks/pieces_mlx.py --out benchmarks/results/pieces_mlx.json

The gated delta rule by chunks is compared with mlx-lm's operations token by token, and the head's gradient with that
through ``mx.fast.cross_entropy``. "operations" counts the primitives in the graph of value and gradient, which do not
depend on the machine; on a GPU most of them are a kernel. Seconds are processor time; memory is MLX's peak above what
was allocated before, results included.
"""

from __future__ import annotations

import argparse
import io
import statistics
import time
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
from common import show, write
from mlx_lm.models import gated_delta

from backends.mlx.head import MlxHead, pick, pullback
from backends.mlx.recurrence import in_chunks

ROWS, TOKENS, HEADS, WIDTH = 2, 512, 4, 32  # of the recurrence
POSITIONS, HIDDEN, VOCABULARY = 256, 128, 32768  # of the head


def operations(arrays: list[mx.array]) -> int:
    """Primitives in the graph of these arrays, which are not computed yet."""
    text = io.StringIO()
    mx.export_to_dot(text, *arrays)
    return text.getvalue().count("shape=rectangle")


def measured(compute: Callable[[], list[mx.array]], rounds: int) -> dict[str, float]:
    """Medians of memory and time, the first round left out."""
    rows = []
    for _ in range(rounds + 1):
        mx.clear_cache()
        mx.reset_peak_memory()
        before, start = mx.get_active_memory(), time.process_time()
        found = compute()
        mx.eval(found)
        rows.append(((mx.get_peak_memory() - before) / 2**20, time.process_time() - start))
        del found
    memory, seconds = (statistics.median(each) for each in zip(*rows[1:], strict=True))
    return {"MiB": memory, "s": seconds}


def recurrence(rounds: int) -> list[dict[str, Any]]:
    """By chunks, and token by token."""
    keys = mx.random.split(mx.random.key(0), 6)
    q, k, v, slopes = (mx.random.normal((ROWS, TOKENS, HEADS, WIDTH), key=key) * WIDTH**-0.5 for key in keys[:4])
    g, beta = (mx.random.uniform(0.5, 1, (ROWS, TOKENS, HEADS), key=key) for key in keys[4:])
    state = mx.zeros((ROWS, HEADS, WIDTH, WIDTH))
    mx.eval(q, k, v, slopes, g, beta, state)

    def both(rule: Callable[..., Any]) -> list[mx.array]:
        values, gradients = mx.vjp(lambda *arrays: [rule(*arrays, state)[0]], [q, k, v, g, beta], [slopes])
        return [*values, *gradients]

    return [
        {
            "piece": "recurrence",
            "way": name,
            **measured(lambda rule=rule: both(rule), rounds),  # type: ignore[misc]
            "operations": operations(both(rule)),
        }
        for name, rule in (("chunks", in_chunks), ("token by token", gated_delta.gated_delta_ops))
    ]


def head(rounds: int) -> list[dict[str, Any]]:
    """The gradient of a weighted sum of log-probabilities, and its largest error against float64."""
    keys = mx.random.split(mx.random.key(1), 3)
    hidden = mx.random.normal((POSITIONS, HIDDEN), key=keys[0])
    weight = 0.3 * mx.random.normal((VOCABULARY, HIDDEN), key=keys[1])
    targets = mx.random.randint(0, VOCABULARY, (POSITIONS,), key=keys[2])
    slopes = np.random.default_rng(0).normal(size=POSITIONS).astype(np.float32)
    mx.eval(hidden, weight, targets)
    ours = MlxHead("weight", weight, None, False)

    def written_out() -> list[mx.array]:
        of_weight: list[mx.array] = []
        of_hidden = pullback(ours, hidden, targets, lambda _: slopes, 1.0, POSITIONS, of_weight.append)
        return [of_hidden, *of_weight]

    def through_loss() -> list[mx.array]:
        def loss(hidden: mx.array, weight: mx.array) -> mx.array:
            return -mx.sum(mx.array(slopes) * mx.fast.cross_entropy(hidden @ weight.T, targets))

        return list(mx.grad(loss, argnums=(0, 1))(hidden, weight))

    exact = log_probabilities(hidden, weight, targets)
    values = {
        "delta": pick(ours.log_softmax(hidden, 1.0), targets),
        "mx.fast.cross_entropy": -mx.fast.cross_entropy(hidden @ weight.T, targets),
    }
    return [
        {
            "piece": "head",
            "way": name,
            **measured(compute, rounds),
            "error": float(np.abs(np.array(values[name]) - exact).max()),
        }
        for name, compute in (("delta", written_out), ("mx.fast.cross_entropy", through_loss))
    ]


def log_probabilities(hidden: mx.array, weight: mx.array, targets: mx.array) -> Any:
    """In float64, [n]."""
    logits = np.array(hidden, np.float64) @ np.array(weight, np.float64).T
    logits -= logits.max(axis=1, keepdims=True)
    return logits[np.arange(len(logits)), np.array(targets)] - np.log(np.exp(logits).sum(axis=1))


def main() -> None:
    """Measure, print the tables, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", help="where to write the JSON")
    args = parser.parse_args()
    rows = [recurrence(args.rounds), head(args.rounds)]
    for piece in rows:
        show(
            piece[0]["piece"],
            [{key: f"{v:.3g}" if isinstance(v, float) else str(v) for key, v in row.items()} for row in piece],
        )
    write(args.out, {"benchmark": "pieces_mlx", "rounds": args.rounds, "results": [*rows[0], *rows[1]]})


if __name__ == "__main__":
    main()
