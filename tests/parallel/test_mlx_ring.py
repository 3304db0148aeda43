"""MLX on several processes, joined by its ring over the loopback, computes what one process does, to rounding."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from backends import registry
from backends.interface import BackendError
from backends.launch import mlx_ranks
from backends.settings import BackendSettings
from tests.conformance.tiny_model import write_model
from tests.families.families import FAMILIES, build
from tests.parallel import mlx_ring_worker

pytest.importorskip("mlx.core", reason="backend 'mlx' needs mlx")

ROOT = Path(__file__).parents[2]
RINGS = [(2, "lora"), *(pytest.param(3, trained, marks=pytest.mark.long) for trained in ("full", "hybrid"))]
Outcome = tuple[int, str]  # exit code, standard error


def on_ring(size: int, arguments: list[str], scratch: Path, limit: float = 300.0) -> list[Outcome]:
    """Run the worker on several ranks."""
    common = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.parallel.mlx_ring_worker", *arguments]
    started = [
        subprocess.Popen(command, cwd=ROOT, env=common | own, stderr=subprocess.PIPE, text=True)
        for own in mlx_ranks(size, scratch)
    ]
    ends, deadline = [], time.monotonic() + limit
    try:
        for process in started:
            _, errors = process.communicate(timeout=max(1.0, deadline - time.monotonic()))
            ends.append((process.returncode, errors))
    finally:
        for process in started:
            if process.poll() is None:
                process.kill()
                process.wait()
    return ends


def hybrid(folder: Path) -> None:
    """A model of the shape of Qwen3-Next, with experts."""
    build(next(family for family in FAMILIES if family.kind == "qwen3_next"), folder)


Run = Callable[[int, str], tuple[dict[str, Any], Path]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Return the results and the folder of a run. Each run is done once; a single rank runs in this process."""
    plain = write_model(tmp_path_factory.mktemp("model"), tie=True)
    done: dict[tuple[int, str], tuple[dict[str, Any], Path]] = {}

    def once(size: int, trained: str) -> tuple[dict[str, Any], Path]:
        if (size, trained) not in done:
            out, model = tmp_path_factory.mktemp(f"{trained}-{size}"), plain
            if trained == "hybrid":
                hybrid(model := out / "hybrid")
            if size == 1:
                mlx_ring_worker.main(1, trained, model, out)
            else:
                for code, errors in on_ring(size, [str(size), trained, str(model), str(out)], out):
                    assert code == 0, errors
            done[size, trained] = pickle.loads((out / "results.pickle").read_bytes()), out
        return done[size, trained]

    return once


@pytest.mark.parametrize(("size", "trained"), RINGS)
def test_ranks_compute_what_one_process_does(run: Run, size: int, trained: str) -> None:
    """One rank has a single short response; a third one has none."""
    (found, folder), (expected, alone) = run(size, trained), run(1, trained)
    assert found["rollout"].keys() == expected["rollout"].keys() == set(range(6))
    for row, (tokens, logprobs) in expected["rollout"].items():
        assert found["rollout"][row][0] == tokens
        np.testing.assert_allclose(found["rollout"][row][1], logprobs, rtol=0, atol=2e-6)
    np.testing.assert_allclose(found["logp"], expected["logp"], rtol=0, atol=2e-6)
    np.testing.assert_allclose(found["weights"], expected["weights"], rtol=0, atol=1e-6)
    assert np.ptp(expected["weights"]) > 0.1
    relative = 2e-6 if trained == "hybrid" else 0  # its loss is several times as large
    np.testing.assert_allclose(found["losses"], expected["losses"], rtol=relative, atol=1e-6)
    for step, (norms, (norm,)) in enumerate(zip(found["norms"], expected["norms"], strict=True)):
        assert len(set(norms)) == 1, "the same on every rank"
        assert norms[0] == pytest.approx(norm, rel=1e-5 if step else 1e-6)  # weights differ after the first update
    assert expected["norms"][0][0] > 0.5, "clipped, so that a norm of this rank alone would be seen"
    ours, theirs = (load_file(each / "model" / "model.safetensors") for each in (folder, alone))
    assert ours.keys() == theirs.keys()
    for name, weight in theirs.items():
        np.testing.assert_allclose(ours[name], weight, rtol=0, atol=2e-5)


@pytest.mark.parametrize(("size", "trained"), RINGS)
def test_collective(run: Run, size: int, trained: str) -> None:
    """Sums are in float64 and equal bit for bit on every rank; gathered items arrive in the order of ranks."""
    found = run(size, trained)[0]["collective"]
    assert [item["rank"] for item in found["items"]] == [0, 1, 2][:size]
    assert [len(item["long"]) for item in found["items"]] == [0, 1000, 2000][:size]
    assert [item["array"].tolist() for item in found["items"]] == [[], [0], [0, 1]][:size]
    small = {2: 3e-12, 3: 6e-12}[size]
    np.testing.assert_allclose(found["total"], [[size, small], [size + small, -size * 1e300]], rtol=1e-15)
    assert found["nothing"].shape == (0, 3)
    assert found["same"]


@pytest.mark.parametrize(("size", "trained"), RINGS)
def test_all_ranks_resume_from_the_files_of_the_first(run: Run, size: int, trained: str) -> None:
    """Other machines may not share its disk. Later updates are equal bit for bit on every rank."""
    resumed = run(size, trained)[0]["resumed"]
    assert len({logprobs for once in resumed for logprobs in once}) == 1


@pytest.mark.long
def test_a_checkpoint_of_several_ranks_opens_on_one(run: Run, tmp_path: Path) -> None:
    """One process loads what three ranks saved and exports the same weights, bit for bit."""
    out = run(3, "full")[1]
    engine = registry.create("mlx", mlx_ring_worker.settings(out / "model", "full"))
    engine.load(out / "checkpoint")
    assert engine.step(0.1) == 0.0
    engine.export(tmp_path / "model")
    engine.close()
    ours, theirs = (load_file(each / "model" / "model.safetensors") for each in (tmp_path, out))
    for name, weight in theirs.items():
        np.testing.assert_array_equal(ours[name], weight)


@pytest.mark.long
def test_the_other_ranks_notice_a_rank_that_exits(tmp_path: Path) -> None:
    """A sum fails instead of waiting for it for ever."""
    (told, reason), (gone, _) = on_ring(2, ["die"], tmp_path, limit=100.0)
    assert (told, gone) == (2, 9)
    assert "LostPeerError: rank 0 lost its connection to the other processes of this run" in reason


def test_sharded_weights_are_refused(tmp_path: Path) -> None:
    ranks: Any = SimpleNamespace(rank=0, size=2)
    model = write_model(tmp_path, tie=True)
    with pytest.raises(BackendError, match=r'parallel.sharding = "full".* set it to "none"'):
        registry.create("mlx", BackendSettings.of(str(model), sharding="full"), ranks)
