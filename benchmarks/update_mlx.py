"""Memory, time and attention masks of an update on MLX, compared with mlx-lm's own operations.

    python benchmarks/update_mlx.py --out benchmarks/results/update_mlx.json

"mlx-lm" is the same update with attention and recurrences as mlx-lm computes them: all attention scores at once, and
the gated delta rule token by token. Memory is MLX's peak above what was allocated before; seconds are processor time.
Weights are random. The array masks are counted in the update of a batch of mixed lengths.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import mlx.core as mx
import numpy as np
from common import show, write
from hybrid_model import VOCABULARY, write_hybrid
from mlx_lm.models import gated_delta

from backends import registry
from backends.interface import Sequences, starts_of
from backends.mlx import attention, recurrence
from backends.mlx.attention import CausalAttention
from backends.settings import BackendSettings
from delta_cli.assets.random_model import write_qwen3


def objective(logp: Any, rows: Any) -> tuple[float, Any]:
    """The sum of the log-probabilities."""
    return float(logp.sum()), np.ones_like(logp)


def batch(sizes: list[int], prompts: list[int]) -> Sequences:
    """Responses of these sizes, divided evenly among prompts of the other sizes."""
    rng = np.random.default_rng(0)
    ids = [rng.integers(0, VOCABULARY, size) for size in prompts]
    given = tuple(ids[place * len(prompts) // len(sizes)] for place in range(len(sizes)))
    return Sequences(given, rng.integers(0, VOCABULARY, sum(sizes)), starts_of(sizes))


@contextmanager
def mlx_lm_operations() -> Iterator[None]:
    """Within the context, attention and recurrences are mlx-lm's."""

    def all_at_once(q: mx.array, k: mx.array, v: mx.array, scale: float) -> mx.array:
        return attention._mlx_attention(q, k, v, scale=scale, mask="causal")

    kept = attention.in_blocks, recurrence.in_chunks
    attention.in_blocks, recurrence.in_chunks = all_at_once, gated_delta.gated_delta_ops
    try:
        yield
    finally:
        attention.in_blocks, recurrence.in_chunks = kept


def update(engine: Any, given: Sequences) -> tuple[float, float]:
    """The peak in MiB and the processor seconds of one update."""
    engine.optimizer.gradient = {}
    mx.clear_cache()
    mx.reset_peak_memory()
    before, start = mx.get_active_memory(), time.process_time()
    engine.accumulate(given, objective)
    return (mx.get_peak_memory() - before) / 2**20, time.process_time() - start


def measure(name: str, folder: Path, given: Sequences, checkpointing: bool, rounds: int) -> dict[str, Any]:
    """Medians of rounds that alternate between the two, without the first."""
    engine = registry.create("mlx", BackendSettings.of(str(folder), gradient_checkpointing=checkpointing))
    found: dict[str, list[tuple[float, float]]] = {"delta": [], "mlx-lm": []}
    for _ in range(rounds + 1):
        found["delta"].append(update(engine, given))
        with mlx_lm_operations():
            found["mlx-lm"].append(update(engine, given))
    engine.close()
    row: dict[str, Any] = {"update": name, "checkpointing": checkpointing}
    for who, rows in found.items():
        row[f"{who}, MiB"], row[f"{who}, s"] = (statistics.median(each) for each in zip(*rows[1:], strict=True))
    return row


def array_masks(folder: Path) -> dict[str, int]:
    """Calls of attention with and without an array mask, in an update of mixed lengths."""
    counted = {"array": 0, "none": 0}
    attend = CausalAttention.__call__

    def watched(self: CausalAttention, *arrays: mx.array, mask: Any = None, **options: Any) -> mx.array:
        counted["array" if isinstance(mask, mx.array) else "none"] += 1
        return attend(self, *arrays, mask=mask, **options)

    engine = registry.create("mlx", BackendSettings.of(str(folder)))
    CausalAttention.__call__ = watched  # type: ignore[method-assign]
    try:
        engine.accumulate(batch([5, 9, 17, 30, 4, 12, 22, 31], [12, 20]), objective)
    finally:
        CausalAttention.__call__ = attend  # type: ignore[method-assign]
    return counted


def text(value: Any) -> str:
    """A value as a cell of the table."""
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def main() -> None:
    """Measure, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048, help="of the response to the plain causal model")
    parser.add_argument("--hybrid-tokens", type=int, default=512, help="of each of two responses to the hybrid model")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", help="where to write the JSON")
    args = parser.parse_args()
    with TemporaryDirectory() as scratch:
        plain, mixed = Path(scratch) / "plain", Path(scratch) / "hybrid"
        write_qwen3(plain, vocab_size=VOCABULARY, hidden=128, layers=4, heads=4, head_dim=32, intermediate=384)
        write_hybrid(mixed, for_mlx=True)
        long, two = batch([args.tokens], [16]), batch([args.hybrid_tokens] * 2, [16])
        rows = [
            measure(name, folder, given, checkpointing, args.rounds)
            for name, folder, given in (("causal", plain, long), ("hybrid", mixed, two))
            for checkpointing in (False, True)
        ]
        masks = array_masks(plain)
    show("an update on MLX", [{key: text(value) for key, value in row.items()} for row in rows])
    print(f"attention, mixed lengths: {masks['array']} calls with an array mask, {masks['none']} without")
    device = {"device": mx.device_info().get("device_name"), "metal": mx.metal.is_available()}
    settings = {name: value for name, value in vars(args).items() if name != "out"}
    write(args.out, {"benchmark": "update_mlx", **device, "settings": settings, "results": rows, "masks": masks})


if __name__ == "__main__":
    main()
