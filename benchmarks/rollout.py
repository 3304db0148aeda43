"""Rollout throughput of the torch backend against transformers: padded static batches, continuous batching.

    python benchmarks/rollout.py --out benchmarks/results/rollout.json

The same model, prompts, responses per prompt, temperature, threads and lengths (see ``lengths.py``):
all equal, or spread evenly in the logarithm over a factor of 16, in no order. All draw for the same
number of responses at a time, and only tokens of responses count. The backend and continuous
batching compute each prompt once for all its responses and return the log-probability of every
token; ``generate`` does neither. Continuous batching needs transformers 5.17, and its manager is set
up outside the time taken.
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
from lengths import schedule, scheduled_fork, scheduled_generate, scheduled_rollout
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching.requests import RequestState
from workload import Workload

from backends.interface import Engine, Ids, RolloutRequest, Sampling
from backends.settings import BackendSettings
from backends.torch import create

SPREADS = (1, 16)  # the longest response has so many times the tokens of the shortest
PAGE = 16  # tokens of a page of the paged cache: faster here than the 256 it has by default


def ours(backend: Engine, prompts: list[Ids], samples: int, lengths: Ids, stop: int) -> None:
    """One rollout through the backend."""
    sampling = Sampling(max_tokens=int(lengths.max()), stop_ids=(stop,), samples=samples)
    with scheduled_rollout(lengths):
        done = backend.rollout(RolloutRequest(tuple(prompts), sampling))
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


def requests(model: Any, args: argparse.Namespace) -> Any:
    """A context with a running manager of continuous batching, and a paged cache that holds every response."""
    pages = -(-(args.prompt + args.response) // PAGE)
    return model.continuous_batching_context_manager(
        generation_config=GenerationConfig(do_sample=True, top_k=0, eos_token_id=-1, num_return_sequences=args.samples),
        continuous_batching_config=ContinuousBatchingConfig(
            page_size=PAGE,
            num_blocks=pages * args.prompts * args.samples,
            max_batch_tokens=args.slots * args.prompt,
            max_requests_per_batch=args.slots,
            allow_block_sharing=False,  # blocks kept from the round before would be stale in training
            auto_switch_to_flash=False,  # a CPU has none
            return_logprobs=True,
        ),
        warmup=False,
    )


def continuous(manager: Any, prompts: list[Ids], samples: int, lengths: Ids) -> None:
    """One rollout through the manager: a request for each prompt, which forks."""
    with patch.object(RequestState, "fork", scheduled_fork(RequestState.fork, lengths, samples)):
        for number, (prompt, first) in enumerate(zip(prompts, lengths[::samples].tolist(), strict=True)):
            manager.add_request(prompt.tolist(), request_id=str(number), max_new_tokens=first)
        done = [manager.get_result() for _ in lengths]
    assert sorted(len(result.generated_tokens) for result in done) == sorted(lengths)


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Tokens per second of each way for equal and for ragged lengths."""
    workload = Workload(hidden=args.hidden, layers=args.layers, response=args.response, prompt=args.prompt)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(workload.vocabulary, size=args.prompt) for _ in range(args.prompts)]
    with TemporaryDirectory() as scratch:
        folder = workload.write(Path(scratch))
        backend = create(BackendSettings.of(str(folder), rollout_batch=args.slots), "cpu")
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    results = []
    for spread in SPREADS:
        lengths = schedule(args.prompts * args.samples, args.response, spread)
        with requests(model, args) as manager:
            ways = {
                "ours": partial(ours, backend, prompts, args.samples, lengths, workload.stop),
                "generate": partial(padded, model, prompts, args.samples, lengths, workload.stop, args.slots),
                "continuous": partial(continuous, manager, prompts, args.samples, lengths),
            }
            seconds = interleaved(ways, args.rounds)
        results.append(
            {
                "spread": spread,
                "tokens": int(lengths.sum()),
                "tokens_per_second": {way: lengths.sum() / statistics.median(seconds[way]) for way in ways},
                "faster_than": {way: median_ratio(seconds[way], seconds["ours"]) for way in ways if way != "ours"},
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
            **{f"{way}, tokens/s": f"{speed:.0f}" for way, speed in row["tokens_per_second"].items()},
            **{f"faster than {way}": f"{ratio:.2f}×" for way, ratio in row["faster_than"].items()},
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
