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

from delta_cli.assets.random_model import write_qwen3
from tests.families.families import FAMILIES, build

from . import cases

ROOT = Path(__file__).parents[2]


def start(*arguments: str) -> None:
    """Run worker.py; fail with what the ranks wrote if one of them fails."""
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "tests.parallel.worker", *arguments]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    done = subprocess.run(command, env=env, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=600)
    assert not done.returncode, f"{done.returncode} ranks failed:\n{done.stdout.decode()[-9000:]}"


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
            arguments = (str(shared), tier, str(processes))
            try:
                start(*arguments)
            except AssertionError as error:
                if "by peer" not in str(error):
                    raise
                # Seen once in many runs on a busy machine: gloo lost a connection. A fault of ours comes again.
                print(f"the ranks are started again after: {error}")
                start(*arguments)
    return [pickle.loads(file.read_bytes()) for file in files]


@pytest.fixture(scope="session")
def models(shared: Path) -> dict[str, Path]:
    return {name: shared / name for name in ("tied", "untied", "hybrid")}
