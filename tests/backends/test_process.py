"""Which rank a process is, by what each launcher leaves in its environment."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from backends.process import rank_and_size

VARIABLES = ("RANK", "WORLD_SIZE", "MLX_RANK", "MLX_HOSTFILE", "MLX_IBV_DEVICES")


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_alone(environment: pytest.MonkeyPatch) -> None:
    assert rank_and_size() == (0, 1)


def test_torchrun(environment: pytest.MonkeyPatch) -> None:
    environment.setenv("WORLD_SIZE", "8")
    environment.setenv("RANK", "3")
    assert rank_and_size() == (3, 8)


@pytest.mark.parametrize("variable", ["MLX_HOSTFILE", "MLX_IBV_DEVICES"])
def test_mlx_launch(environment: pytest.MonkeyPatch, tmp_path: Path, variable: str) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text(json.dumps([["10.0.0.1:5000"], ["10.0.0.2:5000"], ["10.0.0.3:5000"]]))
    environment.setenv(variable, str(hosts))
    environment.setenv("MLX_RANK", "2")
    assert rank_and_size() == (2, 3)


def test_mlx_launch_of_one_process_writes_no_hosts(environment: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("\n")
    environment.setenv("MLX_HOSTFILE", str(hosts))
    environment.setenv("MLX_RANK", "0")
    assert rank_and_size() == (0, 1)
