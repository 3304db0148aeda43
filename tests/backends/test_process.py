"""Threads, addresses and failures of a process among several."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from backends import process, registry
from backends.settings import BackendSettings
from delta_cli.assets import model_path


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setattr(process, "usable_cores", lambda: 12)


@pytest.mark.parametrize(
    ("environment", "threads"),
    [
        ({}, 12),
        ({"LOCAL_WORLD_SIZE": "5"}, 2),
        ({"LOCAL_WORLD_SIZE": "64"}, 1),
        ({"OMP_NUM_THREADS": "3"}, 3),
        ({"OMP_NUM_THREADS": "4,2", "LOCAL_WORLD_SIZE": "2"}, 4),
        ({"OMP_NUM_THREADS": "0"}, 12),
        ({"OMP_NUM_THREADS": "many"}, 12),
    ],
)
def test_the_default(environment: dict[str, str], threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert process.default_threads(process.TINY) == threads


def test_a_tiny_model_has_one_thread_unless_the_user_asks_for_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert process.default_threads(process.TINY - 1) == 1
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert process.default_threads(process.TINY - 1) == 3


@pytest.mark.parametrize(
    ("text", "cores"), [("max 100000", 8), ("250000 100000", 2), ("10000 100000", 1), ("nonsense", 8), (None, 8)]
)
def test_cores_are_those_that_a_container_may_use(text: str | None, cores: int, tmp_path: Path) -> None:
    quota = tmp_path / "cpu.max"
    if text is not None:
        quota.write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.undo()
        patch.setattr(process, "QUOTA", quota)
        patch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
        assert ORIGINAL() == cores


ORIGINAL = process.usable_cores


def test_the_engine_computes_with_them_and_says_so() -> None:
    before = torch.get_num_threads()
    try:
        for asked, threads in ((3, 3), (None, 1)):
            engine = registry.create("cpu", BackendSettings.of(model_path("tiny-base"), threads=asked))
            assert engine.threads == torch.get_num_threads() == threads
            engine.close()
    finally:
        torch.set_num_threads(before)
    assert registry.create("fake", BackendSettings.of(model_path("tiny-base"))).threads is None


@pytest.mark.parametrize("master", ["127.0.0.1", "::1", "no-such-host.invalid"])
def test_a_machine_has_an_address_whatever_the_master_is_called(master: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The watchdog's datagrams need IPv4; a run without it goes on unwatched."""
    monkeypatch.setenv("MASTER_ADDR", master)
    assert process.reachable_address() == "127.0.0.1"


def test_the_first_process_to_fail_is_the_one_that_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "failed"
    monkeypatch.setenv(process.FAILURE, str(file))
    assert process.claim_failure("rank 1: no memory")
    assert process.claim_failure("asked again")
    assert file.read_text() == "rank 1: no memory\n"
    monkeypatch.setattr(process, "_claims", {})  # as another process
    assert not process.claim_failure("rank 0: lost the others", patience=5.0)
    assert file.read_text() == "rank 1: no memory\n"


def test_torchrun_has_a_folder_of_its_own_for_each_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that an earlier run left, or that somebody else made, mutes nothing."""
    monkeypatch.delenv(process.FAILURE, raising=False)
    for attempt in range(2):
        folder = tmp_path / f"attempt_{attempt}" / "0"
        folder.mkdir(parents=True)
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(folder / "error.json"))
        assert process.claim_failure("why")
        assert [path.name for path in folder.parent.iterdir() if path.is_file()] == ["delta-failed"]
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE")
    assert process.claim_failure("nobody shares a folder")
