"""The calls to torch.distributed of a process with a GPU, and running out of memory while weights are gathered."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch

from backends.interface import BackendError
from backends.torch import collective as module
from backends.torch.collective import NCCL_TIMEOUT, TIMEOUT, TorchCollective
from backends.torch.sharding import ALONE, DataParallel


class Recorded:
    """Stands in for torch.distributed with one rank; remembers the calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []

    def init_process_group(self, kinds: str, *, timeout: timedelta, **_: Any) -> None:
        self.calls.append((kinds, timeout))

    def new_group(self, *, backend: str, timeout: timedelta) -> str:
        self.calls.append((backend, timeout))
        return "own gloo"

    def all_reduce(self, tensor: torch.Tensor, group: Any = None) -> None:
        self.calls.append(("all_reduce", group))

    def all_gather(self, slots: list[torch.Tensor], mine: torch.Tensor, group: Any) -> None:
        self.calls.append(("all_gather", group))
        slots[0].copy_(mine)

    @staticmethod
    def get_rank() -> int:
        return 0

    @staticmethod
    def get_world_size() -> int:
        return 1

    @staticmethod
    def is_initialized() -> bool:
        return False


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    found = Recorded()
    monkeypatch.setattr(module, "dist", found)
    monkeypatch.setattr(module, "rendezvous", lambda *_, **__: iter([(None, 0, 1)]))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    return found


def test_nccl_ends_after_minutes_and_long_waits_are_on_gloo(recorded: Recorded) -> None:
    ranks = TorchCollective("cuda")
    try:
        assert recorded.calls[:2] == [("cpu:gloo,cuda:nccl", NCCL_TIMEOUT), ("gloo", TIMEOUT)]
        recorded.calls.clear()
        ranks.sum(np.zeros(3))
        assert recorded.calls == [("all_reduce", "own gloo")]
        recorded.calls.clear()
        ranks._device = torch.device("cuda")
        ranks.sum_tensors([torch.zeros(2), torch.zeros(3)])
        assert recorded.calls == [("all_gather", "own gloo"), ("all_reduce", None), ("all_reduce", None)]
    finally:
        ranks.close()


def test_a_large_sum_waits_over_gloo_before_nccl(recorded: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = TorchCollective("cuda")
    try:
        recorded.calls.clear()
        monkeypatch.setattr(torch.Tensor, "to", lambda self, *_, **__: self)  # there is no GPU
        large = np.zeros(module.LARGE // 8)
        np.testing.assert_array_equal(ranks.sum(large), large)
        assert recorded.calls == [("all_gather", "own gloo"), ("all_reduce", None)]
    finally:
        ranks.close()


def test_a_processor_has_one_timeout(recorded: Recorded) -> None:
    TorchCollective("cpu").close()
    assert recorded.calls[:2] == [("gloo", TIMEOUT), ("gloo", TIMEOUT)]


class Full:
    """A split module whose weights do not fit when they are gathered."""

    def set_reshard_after_forward(self, *_: Any, **__: Any) -> None: ...

    def unshard(self) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")


def test_memory_that_runs_out_while_weights_are_gathered_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    scattered = []
    monkeypatch.setattr("backends.torch.sharding._split_modules", lambda _: [Full()])
    monkeypatch.setattr(DataParallel, "_reshards", lambda *_: True)
    monkeypatch.setattr(DataParallel, "scatter", lambda _, policy: scattered.append(policy))
    policy: Any = object()
    with pytest.raises(BackendError, match="gathered to draw with; lower"), ALONE.gathered(policy):
        pytest.fail("nothing was gathered")
    assert scattered == [policy]
