"""Ranks over gloo on this machine, started once for all tests and all workers of pytest-xdist."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from backends.launch import torch_ranks
from delta_cli.assets.random_model import write_qwen3
from tests.families.families import FAMILIES, build

from . import cases

ROOT = Path(__file__).parents[2]


def start(processes: int, arguments: list[str]) -> None:
    """Run ``python arguments`` on several ranks; fail with the output of every rank that failed."""
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    command = [sys.executable, *arguments]
    started = [
        subprocess.Popen(command, env=env | rank, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        for rank in torch_ranks(processes)
    ]
    outputs = [child.communicate(timeout=600)[0].decode() for child in started]
    failed = [
        f"rank {rank} ended with {child.returncode}:\n{output[-3000:]}"
        for rank, (child, output) in enumerate(zip(started, outputs, strict=True))
        if child.returncode
    ]
    assert not failed, "\n\n".join(failed)  # the rank that failed first is rarely the first of them


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the three models, which the workers of pytest-xdist share."""
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "ranks"
    folder.mkdir(exist_ok=True)
    with FileLock(folder / "lock"):
        if not (folder / "untied").exists():
            [hybrid] = [family for family in FAMILIES if family.kind == "qwen3_5_text"]
            build(
                replace(hybrid, config=hybrid.config | {"vocab_size": cases.VOCABULARY, "initializer_range": 0.1}),
                folder / "hybrid",
            )
            shape = {"vocab_size": cases.VOCABULARY, "hidden": 16, "layers": 2, "heads": 4, "kv_heads": 2}
            for name in ("tied", "untied"):
                write_qwen3(folder / name, **shape, head_dim=8, intermediate=24, tie=name == "tied", scale=0.3)
    return folder


@pytest.fixture(scope="session")
def found(request: pytest.FixtureRequest, shared: Path) -> list[dict[str, Any]]:
    """The results of each rank by case; the parameter holds the number of ranks and one of ``cases.TIERS``."""
    processes, tier = request.param
    files = [shared / f"found-{tier}-{processes}-{rank}.pkl" for rank in range(processes)]
    with FileLock(shared / "lock"):
        if not all(file.exists() for file in files):
            arguments = ["-m", "tests.parallel.worker", str(shared), tier]
            try:
                start(processes, arguments)
            except AssertionError as error:
                if "by peer" not in str(error):
                    raise
                # Seen once in many runs on a busy machine: gloo lost a connection. A fault of ours comes again.
                print(f"the ranks are started again after: {error}")
                start(processes, arguments)
    return [pickle.loads(file.read_bytes()) for file in files]


@pytest.fixture(scope="session")
def models(shared: Path) -> dict[str, Path]:
    return {name: shared / name for name in ("tied", "untied", "hybrid")}
