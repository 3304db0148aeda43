"""The update of a hybrid model on packed rows, against the same update with a prompt for each response.

    python benchmarks/hybrid_update.py --out benchmarks/results/hybrid_update.json

The model is a Qwen3.5 with random weights on the torch backend, three layers of four with the gated delta rule. Both
updates alternate; seconds are processor time, medians without the first round.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from common import show, write
from hybrid_model import HYBRID, VOCABULARY, write_hybrid

from backends import registry
from backends.interface import Sequences, starts_of
from backends.settings import BackendSettings


def objective(logp: Any, rows: Any) -> tuple[float, Any]:
    """The sum of the log-probabilities."""
    return float(logp.sum()), np.ones_like(logp)


def batch(args: argparse.Namespace, shared: bool) -> Sequences:
    """The same responses, whose prompts are one array for each group if ``shared``, and otherwise copies."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, VOCABULARY, args.prompt) for _ in range(args.prompts)]
    given = [prompt if shared else prompt.copy() for prompt in prompts for _ in range(args.responses)]
    sizes = rng.integers(args.tokens // 2, args.tokens + 1, len(given))
    return Sequences(tuple(given), rng.integers(0, VOCABULARY, sizes.sum()), starts_of(sizes))


def seconds(engine: Any, given: Sequences) -> float:
    """Processor seconds of one update."""
    start = time.process_time()
    engine.accumulate(given, objective)
    return time.process_time() - start


def main() -> None:
    """Measure, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("--responses", type=int, default=8, help="to each prompt")
    parser.add_argument("--prompt", type=int, default=256, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=128, help="of the longest response, twice the shortest")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", help="where to write the JSON")
    args = parser.parse_args()
    ways = {"packed": batch(args, shared=True), "a prompt for each response": batch(args, shared=False)}
    found: dict[str, list[float]] = {way: [] for way in ways}
    with TemporaryDirectory() as scratch:
        write_hybrid(Path(scratch))
        engine = registry.create("cpu", BackendSettings.of(scratch))
        for _ in range(args.rounds + 1):
            for way, given in ways.items():
                found[way].append(seconds(engine, given))
        engine.close()
    results = {way: statistics.median(times[1:]) for way, times in found.items()}
    ratio = results["packed"] / results["a prompt for each response"]
    show("an update of a hybrid model", [{"update": way, "s": f"{each:.2f}"} for way, each in results.items()])
    print(f"the packed update takes {ratio:.2f} of the time")
    settings = {name: value for name, value in vars(args).items() if name != "out"}
    write(
        args.out,
        {"benchmark": "hybrid_update", "settings": settings, "model": HYBRID, "seconds": results, "ratio": ratio},
    )


if __name__ == "__main__":
    main()
