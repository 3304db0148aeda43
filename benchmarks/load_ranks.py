"""The host memory that loading takes on each rank, if weights are split: read by the first rank, and by every rank.

    python benchmarks/load_ranks.py --out benchmarks/results/load_ranks.json

Every rank reads the whole model if it trains adapters or the model has recurrent layers. The memory is the most that a
process held resident while it made the engine, beyond what it held after its imports.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

from common import show, write

from backends.launch import torch_ranks
from backends.process import peak_resident
from backends.settings import BackendSettings
from delta_cli.assets.random_model import write_qwen3

SHAPE = {"vocab_size": 8192, "hidden": 768, "layers": 13, "heads": 12, "kv_heads": 12, "head_dim": 64}


def work(model: str, way: str, dtype: str) -> None:
    """What a rank does: prints its memory as a line of JSON."""
    import torch

    from backends.registry import join
    from backends.torch import backend, create, loading

    ranks = join("cpu")
    settings = BackendSettings.of(model, sharding="full", dtype=dtype)
    before = peak_resident()
    whole = patch.object(backend, "load_for_rank", lambda *_: loading.load_policy(settings, torch.device("cpu")))
    if way == "first":
        engine = create(settings, "cpu", ranks)
    else:
        with whole:
            engine = create(settings, "cpu", ranks)
    print(json.dumps({"bytes": peak_resident() - before, "parameters": engine.parameters}), flush=True)
    ranks.barrier()
    ranks.close()


def start(model: Path, way: str, dtype: str, processes: int) -> list[dict[str, Any]]:
    """Run the ranks; what each printed."""
    command = [sys.executable, __file__, "--work", str(model), way, dtype]
    children = [
        subprocess.Popen(command, env=os.environ | rank, stdout=subprocess.PIPE, text=True)
        for rank in torch_ranks(processes)
    ]
    return [json.loads(child.communicate()[0].strip().splitlines()[-1]) for child in children]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--out", type=Path, help="JSON with the results and the machine")
    parser.add_argument("--work", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(*options.work)
        return
    with TemporaryDirectory() as scratch:
        model = Path(scratch) / "model"
        write_qwen3(model, **SHAPE, intermediate=3 * SHAPE["hidden"], tie=False, scale=0.05)
        found = {way: start(model, way, options.dtype, options.ranks) for way in ("every", "first")}
    size = found["first"][0]["parameters"] * (4 if options.dtype == "float32" else 2)
    memory = {way: [each["bytes"] / size for each in ranks] for way, ranks in found.items()}
    rows = [
        {"read by": way, **{f"rank {rank}": f"{share:.2f}" for rank, share in enumerate(shares)}}
        for way, shares in memory.items()
    ]
    show(f"peak of each rank, times the model's {size / 1e6:.0f} MB", rows)
    write(options.out, {"ranks": options.ranks, "dtype": options.dtype, "model_bytes": size, "memory": memory})


if __name__ == "__main__":
    main()
