"""One rank of the tests: runs the cases of a tier and writes the results to a file. Started by conftest.py."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

import torch

from backends.registry import join
from tests.parallel import cases


def main(folder: Path, tier: str) -> None:
    torch.set_num_threads(1)
    ranks = join("cpu")
    models = {name: folder / name for name in ("tied", "untied", "hybrid")}
    found = {name: cases.run(cases.CASES[name], models, ranks) for name in cases.TIERS[tier]}
    found |= {f"gradient-{sharding}": cases.gradient(sharding, models, ranks) for sharding in cases.SHARDINGS}
    found |= {f"bfloat16-{sharding}": cases.bfloat16_update(sharding, models, ranks) for sharding in cases.SHARDINGS}
    found["gradient-hybrid-full"] = cases.gradient("full", models, ranks, hybrid=True)
    found["exchanged"] = cases.exchanged(ranks)
    found["counted"] = cases.counted(ranks)
    found["read"] = cases.read_whole(models, ranks)
    (folder / f"found-{tier}-{ranks.size}-{ranks.rank}.pkl").write_bytes(pickle.dumps(found))
    ranks.barrier()
    ranks.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
