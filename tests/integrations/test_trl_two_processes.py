"""Two processes: bit-equal to TRL's own two at weights 1, and credited as one process would the joined batch."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from delta_cli.runs.records import RecordedRun
from tests.integrations.credited import Seen, slow
from tests.integrations.tiny import model
from tests.integrations.two import CREDIT, PARITY

ROOT = Path(__file__).parents[2]


def launch(script: Path, *arguments: str) -> None:
    """Run a script on two processes of a thread each."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(port)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "ACCELERATE_USE_CPU": "true"}
    done = subprocess.run(
        [*command, str(script), *arguments], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the two processes left."""
    path = tmp_path_factory.mktemp("two")
    launch(Path(__file__).with_name("two.py"), str(path))
    return path


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[str, Any]]:
    return [torch.load(folder / f"rank-{rank}.pt", weights_only=False) for rank in (0, 1)]


@pytest.mark.long
@pytest.mark.parametrize("name", PARITY)
def test_weights_1_are_trl_bit_for_bit(name: str, ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        (losses, weights), (ours, our_weights) = rank["parity"][name]
        assert ours == losses
        assert any(losses)
        assert all(torch.equal(value, our_weights[key]) for key, value in weights.items())


def joined(name: str, ranks: list[dict[str, Any]]) -> Seen:
    """The batch of both processes as one would have it."""
    batches = [rank["credit"][name][0] for rank in ranks]
    width = {key: max(batch[key].shape[1] for batch in batches) for key in ("prompt_ids", "completion_ids")}
    whole: dict[str, Any] = {"advantages": torch.cat([batch["advantages"] for batch in batches])}
    for key, size in (
        ("prompt_ids", "prompt_ids"),
        ("prompt_mask", "prompt_ids"),
        ("completion_ids", "completion_ids"),
        ("completion_mask", "completion_ids"),
    ):
        whole[key] = torch.cat([pad(batch[key], width[size], key.startswith("prompt")) for batch in batches])
    given = torch.cat([pad(rank["credit"][name][1], width["completion_ids"], False) for rank in ranks])
    return Seen(whole, given, model())


def pad(values: torch.Tensor, width: int, left: bool) -> torch.Tensor:
    missing = width - values.shape[1]
    return torch.nn.functional.pad(values, (missing, 0) if left else (0, missing))


OPTIONS: dict[str, dict[str, Any]] = {
    "exact": {"proxy": "hidden_exact", "drawn_at": 0.8},
    "top": {"weighting": "top", "share": 0.3},
}


@pytest.mark.long
@pytest.mark.parametrize("name", CREDIT)
def test_coefficients_are_those_of_one_process(name: str, ranks: list[dict[str, Any]]) -> None:
    found = joined(name, ranks)
    assert all(rank["credit"][name][0]["advantages"].count_nonzero() for rank in ranks)
    groups = {"groups": np.arange(len(found.weights)) // 4} if name.startswith("groups") else {}
    expected = slow(found, **OPTIONS.get(name, {}), **groups)
    np.testing.assert_allclose(found.flat, expected, rtol=0, atol=1e-5 if name == "exact" else 2e-6)
    assert found.flat.std() > 0.01
    if name not in ("groups", "top"):
        alone = slow(half(found), **OPTIONS.get(name, {}))
        assert np.abs(alone - found.flat[: len(alone)]).max() > 1e-3  # a process by itself would say otherwise


def half(found: Seen) -> Seen:
    """What the first process has."""
    rows = len(found.weights) // 2
    return Seen({key: value[:rows] for key, value in found.batch.items()}, found.weights[:rows], model())


@pytest.mark.long
def test_logs_and_records_are_of_both(folder: Path, ranks: list[dict[str, Any]]) -> None:
    found = joined("straddling", ranks)
    logs = ranks[0]["credit"]["straddling"][2]
    assert logs["delta/coefficient_std"] == pytest.approx(found.flat.std(), abs=1e-6)
    assert logs["delta/coefficient_p25"] == pytest.approx(np.quantile(found.flat, 0.25), abs=1e-6)
    run = RecordedRun(folder / "straddling" / "delta")
    responses = list(run.responses(1))
    assert [response.group for response in responses] == np.repeat(range(5), 4).tolist()
    flat = np.concatenate([response.coefficients for response in responses])
    np.testing.assert_allclose(flat, found.flat, rtol=0, atol=1e-6)
    assert run.metrics[0]["response_length_mean"] == pytest.approx(len(flat) / 20)
