"""What an update and a rollout need not do, before and after, in milliseconds of the processor.

    python benchmarks/savings.py --out benchmarks/results/savings.json

- The gradient of the embedding: a matrix for the whole vocabulary, most of it zeros, added to that of the output
  matrix, or rows for the ids that were read. Of one micro-batch.
- Room for the keys and values of responses to a long prompt: that of the prompt and then more, to which everything
  moves, or at once half as much again. From the prompts to the second token of every response, all layers.

The ways take turns.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from common import show, write

from backends.torch.cache import Prefix, SlotCache

Way = Callable[[], object]


def embedding(args: argparse.Namespace, sparse: bool) -> Way:
    """The backward of an embedding into a gradient that is there."""
    weight = torch.nn.Parameter(torch.randn(args.vocabulary, args.hidden))
    weight.grad = torch.zeros_like(weight)
    ids = torch.randint(args.vocabulary, (1, args.tokens))
    slope = torch.randn(1, args.tokens, args.hidden)
    return lambda: torch.nn.functional.embedding(ids, weight, sparse=sparse).backward(slope)


def room(args: argparse.Namespace, most: int) -> Way:
    """Responses enter and take two tokens, with ``most`` columns for each at first."""
    states = torch.randn(args.prompt, args.heads, 64)
    prefix = Prefix(args.prompt, torch.zeros(1), [(states, states)] * args.layers)

    def run() -> None:
        cache = SlotCache(args.responses, most, torch.float32, {"full_attention": 0})
        for _ in range(args.responses // 8):
            cache.admit(prefix, 8)
        cache._most = 2 * args.prompt
        for length in (args.prompt, args.prompt + 1):
            cache.step(torch.full((args.responses,), length), length + 1)

    return run


def measure(before: Way, after: Way, rounds: int) -> dict[str, Any]:
    """Median milliseconds of both."""
    taken: dict[str, list[float]] = {"before": [], "after": []}
    for _ in range(rounds + 1):
        for name, way in (("before", before), ("after", after)):
            start = time.process_time()
            way()
            taken[name].append(1000 * (time.process_time() - start))
    return {name: statistics.median(values[1:]) for name, values in taken.items()}


def main() -> None:
    """Measure, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabulary", type=int, default=49152)
    parser.add_argument("--hidden", type=int, default=576)
    parser.add_argument("--tokens", type=int, default=1740, help="of a micro-batch")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--heads", type=int, default=3, help="of keys and values, 64 numbers each")
    parser.add_argument("--prompt", type=int, default=107, help="tokens")
    parser.add_argument("--responses", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", help="where to write the JSON")
    args = parser.parse_args()
    pairs = {
        "gradient of the embedding": (embedding(args, sparse=False), embedding(args, sparse=True)),
        "room for keys and values": (room(args, args.prompt + 1), room(args, 2 * args.prompt)),
    }
    results = {name: measure(*pair, args.rounds) for name, pair in pairs.items()}
    rows = [{"": name, **{when: f"{value:.1f}" for when, value in found.items()}} for name, found in results.items()]
    show("milliseconds", rows)
    settings = {name: value for name, value in vars(args).items() if name != "out"}
    write(args.out, {"benchmark": "savings", "settings": settings, "milliseconds": results})


if __name__ == "__main__":
    main()
