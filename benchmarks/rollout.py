"""Rollout throughput of the torch backend against transformers' ``generate`` on padded static batches.

    python benchmarks/rollout.py --out benchmarks/results/rollout.json

The same model, prompts, responses per prompt, temperature, threads and lengths (see ``lengths.py``):
all equal, or spread evenly in the logarithm over a factor of 16, in no order. Both hold the same
number of responses at a time, and only tokens of responses count. The backend also returns the
log-probability of every token; ``generate`` is not asked for it.
"""

from __future__ import annotations

import argparse
import statistics
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from common import interleaved, median_ratio, show, write
from lengths import schedule, scheduled_generate, scheduled_rollout
from transformers import AutoModelForCausalLM
from workload import Workload

from backends.interface import Backend, BackendSettings, Ids, Sampling
from backends.torch import create

SPREADS = (1, 16)  # the longest response has so many times the tokens of the shortest


def ours(backend: Backend, prompts: list[Ids], samples: int, lengths: Ids, stop: int) -> None:
    """One rollout through the backend."""
    sampling = Sampling(max_tokens=int(lengths.max()), stop_ids=(stop,), samples=samples)
    with scheduled_rollout(lengths):
        done = backend.rollout(prompts, sampling)
    assert np.array_equal(np.diff(done.starts), lengths)


@torch.no_grad()
def padded(model: Any, prompts: list[Ids], samples: int, lengths: Ids, stop: int, slots: int) -> None:
    """One rollout through ``generate``, ``slots`` responses at a time, each batch until its longest is done."""
    rows = torch.from_numpy(np.repeat(np.stack(prompts), samples, axis=0))
    for part, wanted in zip(rows.split(slots), np.split(lengths, range(slots, len(lengths), slots)), strict=True):
        generate = scheduled_generate(model.generate, wanted, stop)
        done = generate(
            part,
            attention_mask=torch.ones_like(part),
            do_sample=True,
            top_k=0,
            max_new_tokens=int(wanted.max()),
            eos_token_id=stop + 1,
            pad_token_id=0,
        )
        assert done.shape[1] == part.shape[1] + wanted.max()


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Tokens per second of both ways for equal and for ragged lengths."""
    workload = Workload(hidden=args.hidden, layers=args.layers, response=args.response, prompt=args.prompt)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(workload.vocabulary, size=args.prompt) for _ in range(args.prompts)]
    with TemporaryDirectory() as scratch:
        folder = workload.write(Path(scratch))
        backend = create(BackendSettings(model=str(folder), rollout_batch=args.slots), "cpu")
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    results = []
    for spread in SPREADS:
        lengths = schedule(args.prompts * args.samples, args.response, spread)
        both = (prompts, args.samples, lengths, workload.stop)
        ways = {
            "ours": partial(ours, backend, *both),
            "generate": partial(padded, model, *both, args.slots),
        }
        seconds = interleaved(ways, args.rounds)
        results.append(
            {
                "spread": spread,
                "tokens": int(lengths.sum()),
                "tokens_per_second": {way: lengths.sum() / statistics.median(seconds[way]) for way in ways},
                "faster": median_ratio(seconds["generate"], seconds["ours"]),
                "seconds": seconds,
            }
        )
    return results


def table(results: list[dict[str, Any]]) -> list[dict[str, str]]:
    """One row for each kind of lengths."""
    return [
        {
            "lengths": "equal" if row["spread"] == 1 else f"spread over {row['spread']}×",
            "tokens": f"{row['tokens']:,}",
            "generate, tokens/s": f"{row['tokens_per_second']['generate']:.0f}",
            "ours, tokens/s": f"{row['tokens_per_second']['ours']:.0f}",
            "faster": f"{row['faster']:.2f}×",
        }
        for row in results
    ]


def main() -> None:
    """Measure, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=Workload.hidden)
    parser.add_argument("--layers", type=int, default=Workload.layers)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--samples", type=int, default=8, help="responses per prompt")
    parser.add_argument("--slots", type=int, default=32, help="responses at a time")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("--response", type=int, default=256, help="tokens of the longest response")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", help="where to write the JSON")
    args = parser.parse_args()
    results = measure(args)
    show(f"rollout, {args.slots} responses at a time, at most {args.response} tokens", table(results))
    settings = {name: value for name, value in vars(args).items() if name != "out"}
    write(args.out, {"benchmark": "rollout", "settings": settings, "results": results})


if __name__ == "__main__":
    main()
