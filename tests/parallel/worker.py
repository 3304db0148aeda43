"""Runs the cases of a tier on several ranks, each of which writes its results to a file. Started by conftest.py."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import sys
from pathlib import Path

import peft  # noqa: F401 (so that the ranks need not import it)
import torch

from backends.launch import torch_ranks
from backends.registry import join
from tests.parallel import cases


def main(folder: Path, tier: str, processes: int) -> int:
    """Return the number of ranks that failed. Where ranks may be forked, they share the imports, most of their time."""
    torch.set_num_threads(1)
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    ranks = [context.Process(target=run_rank, args=(folder, tier, own)) for own in torch_ranks(processes)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    return sum(rank.exitcode != 0 for rank in ranks)


def run_rank(folder: Path, tier: str, environment: dict[str, str]) -> None:
    os.environ |= environment
    if environment["WORLD_SIZE"] == "4":
        os.environ["LOCAL_WORLD_SIZE"] = "2"  # as on two machines
    torch.set_num_threads(1)
    ranks = join("cpu")
    models = {name: folder / name for name in ("tied", "untied", "hybrid")}
    found = {name: cases.run(cases.CASES[name], models, ranks) for name in cases.TIERS[tier]}
    shardings = cases.shardings(ranks.size)
    found |= {f"gradient-{sharding}": cases.gradient(sharding, models, ranks) for sharding in shardings}
    found |= {f"bfloat16-{sharding}": cases.bfloat16_update(sharding, models, ranks) for sharding in shardings}
    found["gradient-hybrid-full"] = cases.gradient("full", models, ranks, hybrid=True)
    found["exchanged"] = cases.exchanged(ranks)
    found["counted"] = cases.counted(ranks)
    found["read"] = cases.read_whole(models, ranks)
    (folder / f"found-{tier}-{ranks.size}-{ranks.rank}.pkl").write_bytes(pickle.dumps(found))
    ranks.barrier()
    ranks.close()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])))
