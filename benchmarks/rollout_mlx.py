"""Rollout throughput of the mlx backend against mlx-lm's own batch generator on the same prompts.

    python benchmarks/rollout_mlx.py --out rollout_mlx.json
    python benchmarks/rollout_mlx.py --model mlx-community/Qwen3-1.7B-bf16 --dtype bfloat16 --batch 64

Both run in one process, in turns, after one warm-up of each; the table gives the median over the
rounds. mlx-lm's generator is called directly, in the way ``mlx_lm.batch_generate`` calls it: every
response as a prompt of its own, ``make_sampler``, tokens collected as they come; once without and
once with the log-probability of each token, which the backend always returns. Without ``--model``
a Qwen3 with random weights is written to a temporary folder.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx_lm.generate import BatchGenerator
from mlx_lm.sample_utils import make_sampler
from rich.console import Console
from rich.table import Table

from backends.interface import BackendSettings, Ids, Sampling
from backends.mlx import create
from backends.mlx.backend import MlxBackend
from delta_cli.assets.random_model import write_qwen3


def main() -> None:
    """Measure, print the table, write the JSON."""
    args = arguments()
    with tempfile.TemporaryDirectory() as scratch:
        model = args.model or random_model(Path(scratch) / "model")
        backend = create(BackendSettings(model=model, dtype=args.dtype, rollout_batch=args.batch), "mlx")
        assert isinstance(backend, MlxBackend)
        prompts = random_prompts(args.prompts, args.prompt_length)
        results = [measure(backend, prompts, args, samples) for samples in args.samples]
    report = {"machine": machine(), "settings": vars(args) | {"model": args.model or "random"}, "results": results}
    show(report)
    if args.out:
        Path(args.out).write_text(json.dumps(report, indent=2) + "\n")


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a model folder or hub name")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--prompt-length", type=int, default=64, help="tokens, on average")
    parser.add_argument("--samples", type=int, nargs="+", default=[1, 8], help="responses per prompt")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--batch", type=int, default=32, help="responses at a time")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", help="where to write the JSON")
    return parser.parse_args()


def measure(backend: MlxBackend, prompts: list[Ids], args: argparse.Namespace, samples: int) -> dict[str, float]:
    """Tokens per second of the three ways, in turns; the ratios are those of one round, their median is given."""
    ways: dict[str, Callable[[int], int]] = {
        "backend": lambda seed: ours(backend, prompts, args, samples, seed),
        "direct": lambda seed: direct(backend, prompts, args, samples, seed, logprobs=False),
        "direct with log-probabilities": lambda seed: direct(backend, prompts, args, samples, seed, logprobs=True),
    }
    rates: dict[str, list[float]] = {way: [] for way in ways}
    for seed in range(args.rounds + 1):
        for way, run in ways.items():
            start = time.perf_counter()
            tokens = run(seed)
            rates[way].append(tokens / (time.perf_counter() - start))
    rates = {way: values[1:] for way, values in rates.items()}  # the first round is the warm-up
    ratios = [mine / theirs for mine, theirs in zip(rates["backend"], rates["direct"], strict=True)]
    medians = {way: statistics.median(values) for way, values in rates.items()}
    return {"samples": samples, **medians, "ratio": statistics.median(ratios)}


STOPS = tuple(range(8))  # of random weights: long and short responses, so that rows leave and enter


def ours(backend: MlxBackend, prompts: list[Ids], args: argparse.Namespace, samples: int, seed: int) -> int:
    """One rollout through the backend. Returns the number of tokens."""
    sampling = Sampling(max_tokens=args.max_tokens, stop_ids=STOPS, samples=samples, seed=seed)
    return len(backend.rollout(prompts, sampling).tokens)


def direct(
    backend: MlxBackend, prompts: list[Ids], args: argparse.Namespace, samples: int, seed: int, *, logprobs: bool
) -> int:
    """One rollout through mlx-lm's generator. Returns the number of tokens."""
    mx.random.seed(seed)
    generator = BatchGenerator(
        backend.model,
        max_tokens=args.max_tokens,
        stop_tokens=[[token] for token in STOPS],
        sampler=make_sampler(temp=1.0),
        completion_batch_size=args.batch,
    )
    rows = generator.insert([prompt.tolist() for prompt in prompts for _ in range(samples)])
    tokens: dict[int, list[int]] = {row: [] for row in rows}
    values: dict[int, list[float]] = {row: [] for row in rows}
    while responses := generator.next_generated():
        for response in responses:
            tokens[response.uid].append(response.token)
            if logprobs:
                values[response.uid].append(response.logprobs[response.token].item())
    generator.close()
    return sum(len(row) for row in tokens.values())


def random_model(folder: Path) -> str:
    """A small Qwen3 with random weights."""
    write_qwen3(folder, vocab_size=1024, hidden=128, layers=2, heads=4, head_dim=32, intermediate=384)
    return str(folder)


def random_prompts(count: int, length: int) -> list[Ids]:
    """Prompts of half to one and a half times ``length`` ids."""
    rng = np.random.default_rng(0)
    return [rng.integers(8, 1024, rng.integers(length // 2, length + length // 2)) for _ in range(count)]


def machine() -> dict[str, str]:
    """What the numbers depend on."""
    return {
        "system": platform.platform(),
        "device": str(mx.device_info().get("device_name", platform.processor())),
        "metal": str(mx.metal.is_available()),
        "cores": str(os.cpu_count()),
        "python": platform.python_version(),
        "mlx": version("mlx"),
        "mlx-lm": version("mlx-lm"),
    }


def show(report: dict) -> None:
    """The table."""
    table = Table(title="rollout, tokens per second (median)")
    for column in ("responses per prompt", "backend", "direct", "direct with log-probabilities", "backend / direct"):
        table.add_column(column, justify="right")
    for row in report["results"]:
        rates = [f"{row[way]:.0f}" for way in ("backend", "direct", "direct with log-probabilities")]
        table.add_row(str(row["samples"]), *rates, f"{row['ratio']:.2f}")
    Console().print(table)
    print(", ".join(f"{key} {value}" for key, value in report["machine"].items()))


if __name__ == "__main__":
    main()
