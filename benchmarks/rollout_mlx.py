"""Rollout throughput of the mlx backend against mlx-lm's own batch generator on the same prompts.

    python benchmarks/rollout_mlx.py --out benchmarks/results/rollout_mlx.json
    python benchmarks/rollout_mlx.py --model mlx-community/Qwen3-1.7B-bf16 --dtype bfloat16 --batch 64

Both run in one process, in turns; the table gives the medians over the rounds. mlx-lm's generator is
called directly, in the way ``mlx_lm.batch_generate`` calls it: every response as a prompt of its
own, ``make_sampler``, tokens collected as they come; once without and once with the log-probability
of each token, which the backend always returns. Without ``--model`` a Qwen3 with random weights is
written to a temporary folder.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import mlx.core as mx
import numpy as np
from common import interleaved, show, write
from mlx_lm.generate import BatchGenerator
from mlx_lm.sample_utils import make_sampler

from backends.interface import Ids, RolloutRequest, Sampling
from backends.mlx import create
from backends.mlx.backend import MlxEngine
from backends.settings import BackendSettings
from delta_cli.assets.random_model import write_qwen3

STOPS = tuple(range(8))  # of random weights: long and short responses, so that rows leave and enter
SEED = 0


def ours(backend: MlxEngine, prompts: list[Ids], args: argparse.Namespace, samples: int) -> int:
    """One rollout through the backend. Returns the number of tokens."""
    sampling = Sampling(max_tokens=args.max_tokens, stop_ids=STOPS, samples=samples, seed=SEED)
    return len(backend.rollout(RolloutRequest(tuple(prompts), sampling)).tokens)


def direct(logprobs: bool, backend: MlxEngine, prompts: list[Ids], args: argparse.Namespace, samples: int) -> int:
    """One rollout through mlx-lm's generator. Returns the number of tokens."""
    mx.random.seed(SEED)
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


WAYS: dict[str, Callable[..., int]] = {
    "backend": ours,
    "direct": partial(direct, False),
    "direct with log-probabilities": partial(direct, True),
}


def measure(backend: MlxEngine, prompts: list[Ids], args: argparse.Namespace, samples: int) -> dict[str, Any]:
    """Tokens per second of the three ways; the ratios are those of one round, their median is given."""
    ways = {name: partial(way, backend, prompts, args, samples) for name, way in WAYS.items()}
    tokens = {name: way() for name, way in ways.items()}  # the same in every round: the seed is
    seconds = interleaved(ways, args.rounds)
    rates = {name: [tokens[name] / taken for taken in seconds[name]] for name in ways}
    ratios = [mine / theirs for mine, theirs in zip(rates["backend"], rates["direct"], strict=True)]
    medians = {name: statistics.median(values) for name, values in rates.items()}
    return {"samples": samples, "tokens": tokens, **medians, "ratio": statistics.median(ratios)}


def random_model(folder: Path) -> str:
    """A small Qwen3 with random weights."""
    write_qwen3(folder, vocab_size=1024, hidden=128, layers=2, heads=4, head_dim=32, intermediate=384)
    return str(folder)


def random_prompts(count: int, length: int) -> list[Ids]:
    """Prompts of half to one and a half times ``length`` ids."""
    rng = np.random.default_rng(0)
    return [rng.integers(8, 1024, rng.integers(length // 2, length + length // 2)) for _ in range(count)]


def table(results: list[dict[str, Any]]) -> list[dict[str, str]]:
    """One row for each number of responses per prompt."""
    return [
        {
            "responses per prompt": str(row["samples"]),
            **{f"{name}, tokens/s": f"{row[name]:.0f}" for name in WAYS},
            "backend / direct": f"{row['ratio']:.2f}",
        }
        for row in results
    ]


def main() -> None:
    """Measure, print the table, write the JSON."""
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
    args = parser.parse_args()
    with TemporaryDirectory() as scratch:
        model = args.model or random_model(Path(scratch) / "model")
        backend = create(BackendSettings.of(model, dtype=args.dtype, rollout_batch=args.batch), "mlx")
        assert isinstance(backend, MlxEngine)
        prompts = random_prompts(args.prompts, args.prompt_length)
        results = [measure(backend, prompts, args, samples) for samples in args.samples]
    show("rollout with mlx, medians", table(results))
    settings = {name: value for name, value in vars(args).items() if name != "out"}
    device = {"device": mx.device_info().get("device_name"), "metal": mx.metal.is_available()}
    write(args.out, {"benchmark": "rollout_mlx", **device, "settings": settings, "results": results})


if __name__ == "__main__":
    main()
