"""What follows the product with the output matrix where a token is drawn for each response: passes over the vocabulary.

    python benchmarks/drawing.py --out benchmarks/results/drawing.json

Plain is what one writes first: log-probabilities, probabilities, their cumulative sum in float64, an entropy, each in
memory of its own. The backend writes into two buffers that last as long as the rollout and cumulates blocks of tokens.
The product alone stands beside them. Milliseconds of the processor, the ways in turns, with the same noise; both choose
the same tokens.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from common import show, write
from torch import Tensor

from backends.interface import Sampling
from backends.torch.head import TorchHead
from backends.torch.sampling import draw

SAMPLING = Sampling(1, (), temperature=0.6)


def plain(head: TorchHead, hidden: Tensor, noise: Tensor) -> Tensor:
    """Token ids [n]; their log-probabilities and entropies are computed too."""
    logprobs = head.logits(hidden, SAMPLING.temperature).log_softmax(1)
    probabilities = logprobs.exp()
    cumulative = probabilities.cumsum(1, dtype=torch.float64)
    ids = torch.searchsorted(cumulative, noise[:, None] * cumulative[:, -1:], right=True)
    _ = logprobs.gather(1, ids), -torch.linalg.vecdot(probabilities, logprobs)
    return ids[:, 0]


def ours(head: TorchHead, buffers: list[Tensor], hidden: Tensor, noise: Tensor) -> Tensor:
    """The same as the backend's rollout does it."""
    logits = head.logits(hidden, SAMPLING.temperature, buffers[0])
    ids, total = draw(logits, noise, SAMPLING, buffers[1])
    _ = logits.gather(1, ids[:, None])[:, 0] - total.log(), total.log() - logits.mul_(buffers[1]).sum(1) / total
    return ids


@torch.no_grad()
def measure(args: argparse.Namespace, responses: int) -> dict[str, Any]:
    """Median milliseconds of each way for so many responses."""
    generator = torch.Generator().manual_seed(0)
    head = TorchHead(torch.randn(args.vocabulary, args.hidden, generator=generator).mul_(0.1), responses)
    hidden = torch.randn(responses, args.hidden, generator=generator)
    noise = torch.rand(responses, dtype=torch.float64, generator=generator)
    buffers = head.buffers(responses, 2)
    ways: dict[str, Callable[[], Tensor]] = {
        "product": lambda: head.logits(hidden, SAMPLING.temperature, buffers[0]),
        "plain": lambda: plain(head, hidden, noise),
        "ours": lambda: ours(head, buffers, hidden, noise),
    }
    assert torch.equal(ways["plain"](), ways["ours"]())
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(args.rounds):
        for name, way in ways.items():
            start = time.process_time()
            way()
            taken[name].append(1000 * (time.process_time() - start))
    found = {name: statistics.median(values) for name, values in taken.items()}
    return {"responses": responses, "milliseconds": found, "faster": found["plain"] / found["ours"]}


def main() -> None:
    """Measure, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabulary", type=int, default=49152)
    parser.add_argument("--hidden", type=int, default=576)
    parser.add_argument("--responses", type=int, nargs="+", default=[32, 96])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", help="where to write the JSON")
    args = parser.parse_args()
    results = [measure(args, responses) for responses in args.responses]
    rows = [
        {
            "responses": str(row["responses"]),
            **{f"{way} (ms)": f"{value:.1f}" for way, value in row["milliseconds"].items()},
            "faster": f"{row['faster']:.2f}×",
        }
        for row in results
    ]
    show(f"a token for each response, {args.vocabulary:,} tokens to choose from", rows)
    settings = {name: value for name, value in vars(args).items() if name != "out"}
    write(args.out, {"benchmark": "drawing", "settings": settings, "results": results})


if __name__ == "__main__":
    main()
