"""Rollout throughput of the torch backend against transformers' ``generate`` on padded static batches.

    python benchmarks/rollout.py --out benchmarks/results/rollout.json

The same model, prompts, responses per prompt, temperature, threads and lengths. A schedule says how
long each response is: all the same, or spread evenly in the logarithm over a factor of 16, in no
order. ``generate`` gets the schedule as a stopping criterion for each row and takes the responses
batch by batch, each until its longest is done. The backend gets it through the sampling noise: a
value next to 1 draws the last id of the vocabulary, which is the stop. Both hold the same number of
responses at a time, and only tokens of responses count. The backend also returns the
log-probability of every token; ``generate`` is not asked for it.
"""

from __future__ import annotations

import argparse
import statistics
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from common import interleaved, median_ratio, show, write
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, StoppingCriteria
from workload import Workload

from backends import batching
from backends.interface import Backend, BackendSettings, Ids, Sampling
from backends.torch import create

SPREAD = 16  # the longest response is so many times the shortest
LENGTHS = ("equal", "ragged")


def schedule(kind: str, count: int, longest: int) -> Ids:
    """Tokens of each response."""
    if kind == "equal":
        return np.full(count, longest, np.int64)
    lengths = np.geomspace(longest / SPREAD, longest, count).round().astype(np.int64)
    return np.random.default_rng(0).permutation(lengths)


def ours(backend: Backend, prompts: list[Ids], samples: int, lengths: Ids, stop: int) -> None:
    """One rollout through the backend."""

    def noise(seed: int, row: int, count: int) -> NDArray[np.floating]:
        values = batching.uniforms(seed, row, count) * 0.99  # never the last id by chance
        values[lengths[row] - 1] = 1 - 1e-9
        return values

    sampling = Sampling(max_tokens=int(lengths.max()) + 1, stop_ids=(stop,), samples=samples)
    with patch("backends.torch.rollout.uniforms", noise):
        done = backend.rollout(prompts, sampling)
    assert np.array_equal(np.diff(done.starts), lengths)


class Schedule(StoppingCriteria):  # type: ignore[misc]
    """Each row is done once it has its number of tokens."""

    def __init__(self, prompt: int, lengths: Ids) -> None:
        self._end = prompt + torch.from_numpy(lengths)

    def __call__(self, input_ids: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
        return input_ids.shape[1] >= self._end


@torch.no_grad()
def padded(model: Any, prompts: list[Ids], samples: int, lengths: Ids, slots: int) -> None:
    """One rollout through ``generate``, ``slots`` responses at a time."""
    rows = [prompt for prompt in prompts for _ in range(samples)]
    for first in range(0, len(rows), slots):
        part, wanted = rows[first : first + slots], lengths[first : first + slots]
        width = max(map(len, part))
        ids = torch.zeros(len(part), width, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for i, prompt in enumerate(part):
            ids[i, width - len(prompt) :] = torch.from_numpy(prompt)
            mask[i, width - len(prompt) :] = 1
        done = model.generate(
            ids,
            attention_mask=mask,
            do_sample=True,
            top_k=0,
            max_new_tokens=int(wanted.max()),
            eos_token_id=model.config.vocab_size,  # never drawn
            pad_token_id=0,
            stopping_criteria=[Schedule(width, wanted)],
        )
        assert done.shape[1] == width + wanted.max()


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Tokens per second of both ways for equal and for ragged lengths."""
    workload = Workload(hidden=args.hidden, layers=args.layers, response=args.response + 1, prompt=args.prompt)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(workload.vocabulary, size=args.prompt) for _ in range(args.prompts)]
    with TemporaryDirectory() as scratch:
        folder = workload.write(Path(scratch))
        backend = create(BackendSettings(model=str(folder), rollout_batch=args.slots), "cpu")
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    results = []
    for kind in LENGTHS:
        lengths = schedule(kind, args.prompts * args.samples, args.response)
        ways = {
            "ours": partial(ours, backend, prompts, args.samples, lengths, workload.vocabulary - 1),
            "generate": partial(padded, model, prompts, args.samples, lengths, args.slots),
        }
        seconds = interleaved(ways, args.rounds)
        results.append(
            {
                "lengths": kind,
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
            "lengths": row["lengths"],
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
