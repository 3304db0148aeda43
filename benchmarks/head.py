"""The language-model head in chunks against the plain way, forward and backward, at a real vocabulary.

    python benchmarks/head.py --out benchmarks/results/head.json
    python benchmarks/head.py --device cuda --dtype bfloat16 --tokens 16384

Plain is what one writes first: ``log_softmax(h @ W.T)``, gather, ``backward``. Times are taken in
turns in one process, the table gives medians, and ratios are to the plain way on the same kind of
head. Extra peak memory is that of one forward and backward beyond weights and inputs, the
gradients of both included, each variant in a process of its own: on a CPU the growth of the
resident set, on CUDA that of the allocator.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from common import in_fresh_process, interleaved, median_ratio, peak_memory, show, write
from torch import Tensor

from backends.interface import Proxy
from backends.torch.head import TorchHead

Inputs = tuple[Tensor, Tensor, Tensor, Tensor]  # hidden states [n, H], head [V, H], targets [n], dloss/dlogp [n]
KINDS = ("trained", "frozen")  # heads: with and without a gradient of their own


def make_inputs(args: argparse.Namespace) -> Inputs:
    """The same numbers every time."""
    generator = torch.Generator(args.device).manual_seed(0)
    options: dict[str, Any] = {"generator": generator, "device": args.device}
    dtype = getattr(torch, args.dtype)
    hidden = torch.randn(args.tokens, args.hidden, **options).to(dtype)
    weight = torch.randn(args.vocabulary, args.hidden, **options).mul_(0.02).to(dtype)
    targets = torch.randint(args.vocabulary, (args.tokens,), **options)
    return hidden, weight, targets, torch.randn(args.tokens, **options)


def plain(frozen: bool, hidden: Tensor, weight: Tensor, targets: Tensor, slopes: Tensor) -> Tensor:
    """Whole logits and autograd; the gradients stay on the tensors. Returns the log-probabilities."""
    hidden, weight = hidden.detach().requires_grad_(), weight.detach().requires_grad_(not frozen)
    logprobs = (hidden @ weight.T).float().log_softmax(1).gather(1, targets[:, None])[:, 0]
    logprobs.backward(slopes)
    return logprobs.detach()


def chunked(chunk: int, frozen: bool, hidden: Tensor, weight: Tensor, targets: Tensor, slopes: Tensor) -> Tensor:
    """The backend's head, as ``accumulate`` calls it. Returns the log-probabilities."""
    head = TorchHead(weight, chunk)
    found = head.statistics(hidden, targets, 1.0, entropies=False, proxy=Proxy("hidden_exact"))
    if not frozen:
        gradient = torch.zeros_like(weight, dtype=torch.float32)
        head.add_weight_gradient(gradient, hidden, targets, found.logsumexp, slopes, 1.0)
    assert found.hidden_gradients is not None
    found.hidden_gradients.mul_(slopes[:, None])
    return found.logprobs


def variant(chunk: int, kind: str) -> Callable[..., Tensor]:
    """One forward and backward on inputs; chunk 0 computes all logits at once."""
    return partial(chunked, chunk, kind == "frozen") if chunk else partial(plain, kind == "frozen")


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Seconds, and how far the log-probabilities are from the plain ones, of every variant."""
    inputs = make_inputs(args)
    synchronise = torch.cuda.synchronize if args.device == "cuda" else lambda: None

    def run(chunk: int, kind: str) -> None:
        variant(chunk, kind)(*inputs)
        synchronise()

    cases = [(chunk, kind) for kind in KINDS for chunk in (0, *args.chunks)]
    ways = {f"{chunk} {kind}": partial(run, chunk, kind) for chunk, kind in cases}
    seconds = interleaved(ways, args.rounds)
    expected = plain(True, *inputs)
    return [
        {
            "head": kind,
            "chunk": chunk,  # tokens; 0: plain
            "seconds": statistics.median(seconds[f"{chunk} {kind}"]),
            "seconds_ratio": median_ratio(seconds[f"{chunk} {kind}"], seconds[f"0 {kind}"]),
            "rounds": seconds[f"{chunk} {kind}"],
            "largest_logprob_difference": float((variant(chunk, kind)(*inputs) - expected).abs().max()),
        }
        for chunk, kind in cases
    ]


def add_memory(results: list[dict[str, Any]], args: argparse.Namespace) -> None:
    """Measure the extra peak of each variant in a process of its own."""
    sizes = [f"--{name}={getattr(args, name)}" for name in ("tokens", "hidden", "vocabulary", "dtype", "device")]
    for result in results:
        case = ("--memory", str(result["chunk"]), result["head"])
        result["extra_peak_bytes"] = in_fresh_process(__file__, *sizes, *case)
        base = next(other for other in results if other["head"] == result["head"] and not other["chunk"])
        result["extra_peak_ratio"] = result["extra_peak_bytes"] / base["extra_peak_bytes"]


def extra_peak(args: argparse.Namespace) -> int:
    """Bytes that one forward and backward needs beyond what was there before it."""
    chunk, kind = args.memory
    run, inputs = variant(int(chunk), kind), make_inputs(args)
    peak = torch.cuda.max_memory_allocated if args.device == "cuda" else peak_memory
    # Libraries set up their threads and workspaces with the first product: not what is measured.
    hidden, weight, targets, slopes = inputs
    run(hidden[:64], weight[:64], targets[:64] % 64, slopes[:64])
    if args.device == "cuda":
        torch.cuda.reset_peak_memory_stats()  # making the inputs took more than they take
    before = peak()
    run(*inputs)
    return peak() - before


def table(results: list[dict[str, Any]]) -> list[dict[str, str]]:
    """One row for each variant."""
    return [
        {
            "head": row["head"],
            "variant": f"chunks of {row['chunk']}" if row["chunk"] else "plain",
            "seconds": f"{row['seconds']:.3f}",
            "time of plain's": f"{row['seconds_ratio']:.2f}×",
            "extra peak MB": f"{row['extra_peak_bytes'] / 1e6:.0f}",
            "memory of plain's": f"{row['extra_peak_ratio']:.1%}",
            "log-prob difference": f"{row['largest_logprob_difference']:.0e}",
        }
        for row in results
    ]


def main() -> None:
    """Measure, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--chunks", type=int, nargs="+", default=[256, 512, 1024])
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", help="where to write the JSON")
    parser.add_argument("--memory", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.memory:
        print(json.dumps(extra_peak(args)))
        return
    results = measure(args)
    add_memory(results, args)
    show(
        f"head: {args.tokens} tokens, H {args.hidden}, V {args.vocabulary}, {args.dtype}, {args.device}", table(results)
    )
    settings = {name: value for name, value in vars(args).items() if name not in ("out", "memory")}
    write(args.out, {"benchmark": "head", "settings": settings, "results": results})


if __name__ == "__main__":
    main()
