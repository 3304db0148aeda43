"""AdamW's update with its moments in float32 or 8 bits, on the device or at rest in host memory.

    python benchmarks/optimizer.py --parameters 50000000 --out benchmarks/results/optimizer.json
    python benchmarks/optimizer.py --device cuda --parameters 1000000000

Updates are taken in turns in one process, on the same gradient, and the table gives medians. The memory
is that of the stored moments, counted, and on CUDA the peak of an update beyond weights, gradient and
what is stored on the device.
"""

from __future__ import annotations

import argparse
import statistics
from functools import partial
from typing import Any

import torch
from common import interleaved, median_ratio, show, write
from torch import Tensor, nn

from backends.settings import Optimizer
from backends.torch.optimizer import TorchAdamW
from backends.torch.sharding import ALONE

WAYS = {
    "float32": Optimizer(),
    "float32, offloaded": Optimizer(offload=True),
    "int8": Optimizer(moments="int8"),
    "int8, offloaded": Optimizer(moments="int8", offload=True),
}


def make_weights(args: argparse.Namespace) -> dict[str, nn.Parameter]:
    """Matrices of a transformer's size, all zero."""
    shapes = [(args.hidden, args.hidden)] * max(1, args.parameters // args.hidden**2)
    return {f"weight {i}": nn.Parameter(torch.zeros(shape, device=args.device)) for i, shape in enumerate(shapes)}


def update(optimizer: Optimizer, gradients: dict[str, Tensor]) -> None:
    """One step, to its end."""
    for name, weight in optimizer.weights.items():
        weight.grad = gradients[name]
    optimizer.step(1e-6, 1.0)
    if weight.is_cuda:
        torch.cuda.synchronize()


def extra_peak(optimizer: Optimizer, gradients: dict[str, Tensor]) -> int | None:
    """Bytes on the device that an update takes beyond what was there before it; None on a CPU."""
    if not next(iter(gradients.values())).is_cuda:
        return None
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    update(optimizer, gradients)
    return torch.cuda.max_memory_allocated() - before


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Seconds and bytes of each way."""
    weights = make_weights(args)
    generator = torch.Generator(args.device).manual_seed(0)
    gradients = {
        name: torch.randn(weight.shape, generator=generator, device=args.device).mul_(1e-4)
        for name, weight in weights.items()
    }
    optimizers = {name: TorchAdamW(weights, settings, ALONE) for name, settings in WAYS.items()}
    ways = {name: partial(update, optimizer, gradients) for name, optimizer in optimizers.items()}
    seconds = interleaved(ways, args.rounds)
    return [
        {
            "moments": name,
            "seconds": statistics.median(seconds[name]),
            "seconds_ratio": median_ratio(seconds[name], seconds["float32"]),
            "rounds": seconds[name],
            "parameters": sum(weight.numel() for weight in weights.values()),
            "stored_bytes": optimizer.moments.bytes,
            "stored_on": "host" if WAYS[name].offload else "device",
            "extra_peak_bytes": extra_peak(optimizer, gradients),
        }
        for name, optimizer in optimizers.items()
    ]


def table(results: list[dict[str, Any]]) -> list[dict[str, str]]:
    """One row for each way."""
    return [
        {
            "moments": row["moments"],
            "seconds": f"{row['seconds']:.3f}",
            "of float32's": f"{row['seconds_ratio']:.2f}×",
            "bytes a number": f"{row['stored_bytes'] / row['parameters']:.2f}",
            "stored MB": f"{row['stored_bytes'] / 1e6:.0f}",
            "on the": row["stored_on"],
            "extra peak MB": "" if row["extra_peak_bytes"] is None else f"{row['extra_peak_bytes'] / 1e6:.0f}",
        }
        for row in results
    ]


def main() -> None:
    """Measure, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, default=50_000_000)
    parser.add_argument("--hidden", type=int, default=2048, help="rows and columns of the matrices they come in")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", help="where to write the JSON")
    args = parser.parse_args()
    results = measure(args)
    show(f"AdamW on {results[0]['parameters']:,} parameters, {args.device}", table(results))
    settings = {name: value for name, value in vars(args).items() if name != "out"}
    write(args.out, {"benchmark": "optimizer", "settings": settings, "results": results})


if __name__ == "__main__":
    main()
