"""Several processes against one: the time of a step, and the memory of split weights, gradients and moments.

    python benchmarks/parallel.py --out benchmarks/results/parallel.json

Time: two processes with one thread each against one process with two threads, on the same batch and a model of
twelve million parameters; the ways take turns, and the ratio is the median over rounds of the ratios within one.
Memory: what each of two processes keeps for training a model of a hundred million parameters, in bytes of its
tensors and as resident memory beyond what the imports hold, against one process. The C library is asked first to
give back what was freed: it keeps gigabytes of the activations for the next step.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from common import resident, show, write

from backends.collective import SOLO
from backends.interface import Collective, Proxy, RolloutRequest, Sampling, Sequences, starts_of
from backends.launch import torch_ranks
from backends.process import rank_and_size
from backends.settings import BackendSettings, Sharding
from delta_cli.assets.random_model import write_qwen3

SHAPES = {
    "time": {"vocab_size": 4096, "hidden": 320, "layers": 8, "heads": 5, "kv_heads": 5, "head_dim": 64},
    "memory": {"vocab_size": 8192, "hidden": 768, "layers": 13, "heads": 12, "kv_heads": 12, "head_dim": 64},
}
PROMPTS, RESPONSES, LENGTH = 16, 8, 48


def batch(vocabulary: int) -> Sequences:
    """Prompts of 32 tokens with responses of half to all of LENGTH."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(LENGTH // 2, LENGTH + 1, size=PROMPTS * RESPONSES)
    prompts = [rng.integers(1, vocabulary, size=32) for _ in range(PROMPTS)]
    each = tuple(prompt for prompt in prompts for _ in range(RESPONSES))
    return Sequences(each, rng.integers(1, vocabulary, size=lengths.sum()), starts_of(lengths))


def step(engine: Any, ranks: Collective, everything: Sequences) -> float:
    """Seconds of drawing, scoring, two reductions and an update, this rank's share of it."""
    mine = np.arange(ranks.rank, PROMPTS, ranks.size)
    rows = (mine[:, None] * RESPONSES + np.arange(RESPONSES)).ravel()
    own = everything.select(rows)
    ranks.barrier()
    start = time.perf_counter()
    prompts = own.prompts[::RESPONSES]
    engine.rollout(RolloutRequest(prompts, Sampling(LENGTH, (0,), samples=RESPONSES, seed=1), rows))
    scores = engine.score(own, Proxy())
    ranks.sum(scores.features.weighted_sum(np.ones((2, len(own.tokens)))))
    scores.features.close()
    slope = 1e-3 / len(everything.tokens)
    engine.accumulate(own, lambda logp, rows: (float(logp.sum()) * slope, np.full(len(logp), slope)))
    engine.step(1e-5)
    ranks.barrier()
    return time.perf_counter() - start


def work(model: Path, sharding: Sharding, threads: int, steps: int) -> None:
    """What a rank does: prints the seconds of its steps and its memory as a line of JSON."""
    import torch

    from backends.registry import join
    from backends.torch import create
    from backends.torch.sharding import local

    torch.set_num_threads(threads)
    imports = resident()
    ranks = join("cpu") if rank_and_size()[1] > 1 else SOLO
    engine: Any = create(BackendSettings.of(str(model), sharding=sharding, micro_batch_tokens=2048), "cpu", ranks)
    everything = batch(engine.vocabulary)
    seconds = [step(engine, ranks, everything) for _ in range(steps)]
    gc.collect()
    if sys.platform == "linux":
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    weights = [local(weight) for _, weight in engine._policy.trained()]
    moments = engine._optimizer.state.bytes
    kept = 2 * sum(weight.nbytes for weight in weights) + moments  # a gradient is as large as its weight
    found = {"seconds": seconds, "kept": kept, "resident": resident() - imports, "parameters": engine.parameters}
    print(json.dumps(found), flush=True)
    engine.close()
    ranks.close()


def start(model: Path, processes: int, sharding: str, threads: int, steps: int) -> list[dict[str, Any]]:
    """Run the ranks; what each printed."""
    command = [sys.executable, __file__, "--work", str(model), sharding, str(threads), str(steps)]
    env = os.environ | {"OMP_NUM_THREADS": str(threads)}
    ranks = torch_ranks(processes) if processes > 1 else [{}]
    children = [subprocess.Popen(command, env=env | rank, stdout=subprocess.PIPE, text=True) for rank in ranks]
    return [json.loads(child.communicate()[0].strip().splitlines()[-1]) for child in children]


def measure(rounds: int) -> dict[str, Any]:
    """Both parts; every round starts both ways afresh and drops their first step."""
    result: dict[str, Any] = {}
    with TemporaryDirectory() as scratch:
        for name, shape in SHAPES.items():
            write_qwen3(Path(scratch) / name, **shape, intermediate=3 * shape["hidden"], tie=False, scale=0.05)
        model = Path(scratch) / "time"
        ratios: dict[str, list[float]] = {"none": [], "full": []}
        for _ in range(rounds):
            alone = statistics.median(start(model, 1, "none", 2, 4)[0]["seconds"][1:])
            for sharding, found in ratios.items():
                several = start(model, 2, sharding, 1, 4)
                slowest = [max(pair) for pair in zip(*(each["seconds"][1:] for each in several), strict=True)]
                found.append(statistics.median(slowest) / alone)
        result["time"] = {sharding: {"ratio": statistics.median(r), "rounds": r} for sharding, r in ratios.items()}
        result["time"]["seconds_alone"] = alone
        model = Path(scratch) / "memory"
        alone_memory = start(model, 1, "none", 2, 1)[0]
        result["memory"] = {"parameters": alone_memory["parameters"], "alone": alone_memory}
        for sharding in ("none", "optimizer", "full"):
            several = start(model, 2, sharding, 1, 1)
            result["memory"][sharding] = {
                "kept": max(each["kept"] for each in several) / alone_memory["kept"],
                "resident": max(each["resident"] for each in several) / alone_memory["resident"],
            }
    return result


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="JSON with the results and the machine")
    parser.add_argument("--work", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        model, sharding, threads, steps = options.work
        work(Path(model), sharding, int(threads), int(steps))
        return
    found = measure(options.rounds)
    time_rows = [
        {"two processes": sharding, "step against one process": f"{found['time'][sharding]['ratio']:.2f}"}
        for sharding in ("none", "full")
    ]
    show("time", time_rows)
    memory = found["memory"]
    rows = [
        {"two processes": way, "kept": f"{memory[way]['kept']:.2f}", "resident": f"{memory[way]['resident']:.2f}"}
        for way in ("none", "optimizer", "full")
    ]
    show(f"memory of each, {memory['parameters']:,} parameters, against one process", rows)
    write(options.out, {"parallel": found})


if __name__ == "__main__":
    main()
