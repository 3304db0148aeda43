"""The language-model head in chunks against the plain way, forward and backward, at a real vocabulary.

    python benchmarks/head.py --out head.json
    python benchmarks/head.py --device cuda --dtype bfloat16 --tokens 16384

Plain is what one writes first: ``log_softmax(h @ W.T)``, gather, ``backward``. Times are taken in one
process, the variants in turns, and the table gives the median; ratios are to the plain way on the
same kind of head. Extra peak memory is that of one forward and backward beyond weights and inputs,
the gradients of both included, each variant in a process of its own: on a CPU the growth of the
resident set, on CUDA that of the allocator.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from backends.interface import Proxy
from backends.torch.head import Head

Variant = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def main() -> None:
    """Measure, print the table, write the JSON."""
    args = arguments()
    if args.memory_of:
        print(json.dumps(extra_peak(args)))
        return
    inputs = make_inputs(args)
    results = time_in_turns(args, inputs)
    del inputs
    for result in results:
        result["extra_peak_bytes"] = in_fresh_process(result["name"], result["head"])
    for result in results:
        plain = next(other for other in results if other["name"] == "plain" and other["head"] == result["head"])
        for key in ("seconds", "extra_peak_bytes"):
            result[f"{key}_ratio"] = result[key] / plain[key]
    report = {"machine": machine(args), "settings": vars(args), "results": results}
    show(report)
    if args.out:
        Path(args.out).write_text(json.dumps(report, indent=2) + "\n")


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--chunks", type=int, nargs="+", default=[256, 512, 1024])
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", help="where to write the JSON")
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)  # the call of itself in a fresh process
    parser.add_argument("--frozen", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def make_inputs(args: argparse.Namespace) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states [n, H], head [V, H], targets [n] and dloss/dlogp [n]."""
    generator = torch.Generator(args.device).manual_seed(0)
    options: dict[str, Any] = {"generator": generator, "device": args.device}
    dtype = getattr(torch, args.dtype)
    hidden = torch.randn(args.tokens, args.hidden, **options).to(dtype)
    weight = torch.randn(args.vocabulary, args.hidden, **options).mul_(0.02).to(dtype)
    targets = torch.randint(args.vocabulary, (args.tokens,), **options)
    return hidden, weight, targets, torch.randn(args.tokens, **options)


def plain(frozen: bool) -> Variant:
    """Whole logits and autograd; the gradients stay on the tensors."""

    def run(hidden: Tensor, weight: Tensor, targets: Tensor, slopes: Tensor) -> Tensor:
        hidden, weight = hidden.detach().requires_grad_(), weight.detach().requires_grad_(not frozen)
        logprobs = (hidden @ weight.T).float().log_softmax(1).gather(1, targets[:, None])[:, 0]
        logprobs.backward(slopes)
        return logprobs.detach()

    return run


def chunked(chunk: int, frozen: bool) -> Variant:
    """The backend's head, as ``accumulate`` calls it."""

    def run(hidden: Tensor, weight: Tensor, targets: Tensor, slopes: Tensor) -> Tensor:
        head = Head(weight, chunk)
        found = head.statistics(hidden, targets, 1.0, entropies=False, proxy=Proxy("hidden_exact"))
        if not frozen:
            gradient = torch.zeros_like(weight, dtype=torch.float32)
            head.add_weight_gradient(gradient, hidden, targets, found.logsumexp, slopes, 1.0)
        assert found.directions is not None
        found.directions.mul_(slopes[:, None])
        return found.logprobs

    return run


def variant(name: str, frozen: bool) -> Variant:
    return plain(frozen) if name == "plain" else chunked(int(name.removeprefix("chunks of ")), frozen)


def time_in_turns(args: argparse.Namespace, inputs: tuple[Tensor, ...]) -> list[dict[str, Any]]:
    """Median seconds of every variant, and how far its log-probabilities are from the plain ones."""
    names = ["plain", *(f"chunks of {chunk}" for chunk in args.chunks)]
    cases = [(name, frozen) for frozen in (False, True) for name in names]
    seconds: dict[tuple[str, bool], list[float]] = {case: [] for case in cases}
    expected = variant("plain", True)(*inputs)
    errors = {}
    for _ in range(args.rounds + 1):  # the first round warms up
        for case in cases:
            synchronise(args)
            begin = time.perf_counter()
            found = variant(*case)(*inputs)
            synchronise(args)
            seconds[case].append(time.perf_counter() - begin)
            errors[case] = float((found - expected).abs().max())
    return [
        {
            "name": name,
            "head": "frozen" if frozen else "trained",
            "seconds": statistics.median(seconds[name, frozen][1:]),
            "rounds": seconds[name, frozen][1:],
            "largest_logprob_difference": errors[name, frozen],
        }
        for name, frozen in cases
    ]


def in_fresh_process(name: str, head: str) -> int:
    """Bytes that one forward and backward of a variant adds to the peak."""
    command = [sys.executable, *sys.argv, "--memory-of", name, *(["--frozen"] if head == "frozen" else [])]
    return int(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))


def extra_peak(args: argparse.Namespace) -> int:
    """Peak of one forward and backward beyond what was there before it."""
    inputs = make_inputs(args)
    if args.device == "cpu":
        # Libraries set up their threads and workspaces with the first product: not what is measured.
        variant(args.memory_of, args.frozen)(*(part[:64] for part in inputs[:2]), inputs[2][:64] % 64, inputs[3][:64])
    if args.device == "cuda":
        torch.cuda.reset_peak_memory_stats()  # making the inputs took more than they take
    before = peak(args)
    variant(args.memory_of, args.frozen)(*inputs)
    return peak(args) - before


def peak(args: argparse.Namespace) -> int:
    if args.device == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def synchronise(args: argparse.Namespace) -> None:
    if args.device == "cuda":
        torch.cuda.synchronize()


def machine(args: argparse.Namespace) -> dict[str, Any]:
    """What the numbers were measured on."""
    return {
        "platform": platform.platform(),
        "processor": processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if args.device == "cuda" else None,
        "torch": torch.__version__,
    }


def processor() -> str:
    """The processor's model name, where the system tells it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())


def show(report: dict[str, Any]) -> None:
    """Print the results."""
    settings = report["settings"]
    table = Table(title="head: {tokens} tokens, H {hidden}, V {vocabulary}, {dtype}, {device}".format(**settings))
    for column in ("head", "variant", "seconds", "of plain", "extra peak MiB", "of plain", "log-prob difference"):
        table.add_column(column, justify="left" if column in ("head", "variant") else "right")
    for result in report["results"]:
        table.add_row(
            result["head"],
            result["name"],
            f"{result['seconds']:.3f}",
            f"{result['seconds_ratio']:.2f}×",
            f"{result['extra_peak_bytes'] / 2**20:.0f}",
            f"{100 * result['extra_peak_bytes_ratio']:.1f} %",
            f"{result['largest_logprob_difference']:.1e}",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
