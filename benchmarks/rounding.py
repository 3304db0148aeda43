"""What rounding in the language-model head does to log-probabilities, from bfloat16 hidden states and weights.

    python benchmarks/rounding.py --out benchmarks/results/rounding.json

Kernels that fuse the head with the loss differ in what they round: the logits, to bfloat16 or float16, or
the log-probability at the end. Each is imitated; the error is the largest of the drawn tokens, in nats,
against float64. No kernel is run.
"""

from __future__ import annotations

import argparse

import torch
from common import show, write
from torch import Tensor

from backends.torch.head import TorchHead


def log_probability(logits: Tensor, targets: Tensor) -> Tensor:
    """Of the targets [n], from logits [n, V]."""
    return logits.log_softmax(1).gather(1, targets[:, None])[:, 0]


def errors(tokens: int, vocabulary: int, hidden: int) -> dict[str, float]:
    """The largest error of each way, in nats."""
    torch.manual_seed(0)
    states = torch.randn(tokens, hidden).bfloat16()
    weight = (torch.randn(vocabulary, hidden) * 4 / hidden**0.5).bfloat16()
    exact = states.double() @ weight.double().T
    targets = exact.softmax(1).multinomial(1)[:, 0]
    expected = log_probability(exact, targets)
    logits = states.float() @ weight.float().T
    ways = {
        "bfloat16 logits": log_probability(logits.bfloat16().float(), targets),
        "float16 logits": log_probability(logits.half().float(), targets),
        "bfloat16 at the end": log_probability(logits, targets).bfloat16(),
        "ours": TorchHead(weight.float(), 64).statistics(states, targets, 1.0, entropies=False).logprobs,
    }
    return {name: float((found.double() - expected).abs().max()) for name, found in ways.items()}


def main() -> None:
    """Compute, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--vocabulary", type=int, default=32_000)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--out", help="where to write the JSON")
    args = parser.parse_args()
    found = errors(args.tokens, args.vocabulary, args.hidden)
    show("log-probabilities", [{"rounded": name, "error, nats": f"{error:.0e}"} for name, error in found.items()])
    settings = {name: value for name, value in vars(args).items() if name != "out"}
    write(args.out, {"benchmark": "rounding", "settings": settings, "results": found})


if __name__ == "__main__":
    main()
