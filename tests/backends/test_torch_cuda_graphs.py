"""Forwards of single tokens that are recorded and replayed: rows and columns that nobody reads change nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from backends.interface import Completions, Proxy, RolloutRequest, Sampling
from backends.torch import cuda_graphs, rollout
from backends.torch.backend import TorchEngine
from backends.torch.cache import SlotCache
from backends.torch.cuda_graphs import Decoder
from backends.torch.model import TorchPolicy
from tests.device import DEVICE

REQUEST = RolloutRequest(
    tuple(np.random.default_rng(5).integers(1, 31, size) for size in (60, 9, 1, 5, 3)),
    Sampling(max_tokens=40, stop_ids=(0, 7), samples=4, seed=3),
    entropies=True,
    proxy=Proxy(),
)


class Replay:
    """Stands for a graph of CUDA's: computes again from and to where everything lay, whatever has changed since."""

    def __init__(self, cache: SlotCache, function: Callable[[], torch.Tensor]) -> None:
        self._cache, self._function = cache, function
        self._known = cache._where, cache._width
        self._stores = [*cache._keys, *cache._values]
        self.hidden = function().clone()

    def replay(self) -> None:
        """What CUDA would do."""
        present = [*self._cache._keys, *self._cache._values]
        assert all(one is other for one, other in zip(self._stores, present, strict=True)), "it would write elsewhere"
        self._cache._where, self._cache._width = self._known
        self.hidden.copy_(self._function())


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Decoders record, on a processor what stands for it; the list gets the rows of each replay."""
    found: list[int] = []
    caches: list[SlotCache] = []
    begin, replayed = Decoder.__init__, Decoder._replayed

    def recording(self: Decoder, policy: TorchPolicy, cache: SlotCache) -> None:
        begin(self, policy, cache)
        self._records = True
        caches.append(cache)

    def noted(self: Decoder, *inputs: Any) -> torch.Tensor:
        hidden = replayed(self, *inputs)
        if any(each is not None and each.hidden is hidden for each in self._seen.values()):
            found.append(len(inputs[0]))
        return hidden

    def recorded(function: Callable[[], torch.Tensor], pool: Any) -> tuple[Replay, torch.Tensor]:
        graph = Replay(caches[-1], function)
        return graph, graph.hidden

    monkeypatch.setattr(Decoder, "__init__", recording)
    monkeypatch.setattr(Decoder, "_replayed", noted)
    if DEVICE == "cpu":
        monkeypatch.setattr(cuda_graphs, "_recorded", recorded)
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    return found


def plainly(make: Callable[..., TorchEngine], **settings: Any) -> Completions:
    """Every kernel launched by itself."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Decoder, "_record", lambda *_: None)
        return make(**settings).rollout(REQUEST)


@pytest.mark.parametrize("slots", [5, 16, 512])
def test_responses_are_those_of_plain_forwards(
    slots: int, make: Callable[..., TorchEngine], replays: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slots that are left and entered, columns that run out, and what is kept of several draws."""
    monkeypatch.setitem(rollout.CHECK_EVERY, DEVICE, 4)
    expected = plainly(make, rollout_batch=slots)
    replays.clear()
    found = make(rollout_batch=slots).rollout(REQUEST)
    assert len(set(replays)) > 1, "rows become fewer"
    assert set(replays) <= {1, 2, 3, 4, 6, 8, 12, 16, min(slots, 20)}
    assert len(replays) > 20
    np.testing.assert_array_equal(found.tokens, expected.tokens)
    np.testing.assert_array_equal(found.starts, expected.starts)
    np.testing.assert_allclose(found.logprobs, expected.logprobs, atol=1e-5, rtol=0)
    weights = np.eye(len(found.tokens))
    assert found.features is not None
    assert expected.features is not None
    np.testing.assert_allclose(found.features.weighted_sum(weights), expected.features.weighted_sum(weights), atol=2e-5)


@pytest.mark.skipif(DEVICE != "cuda", reason="graphs are CUDA's")
def test_what_cannot_be_recorded_is_launched(make: Callable[..., TorchEngine], monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward that waits for the GPU, as the routing of some mixtures of experts does."""
    expected, tried = plainly(make), 0
    forward, record = Decoder._forward, Decoder._record

    def waiting(self: Decoder, *inputs: Any) -> torch.Tensor:
        hidden = forward(self, *inputs)
        torch.cuda.synchronize()
        return hidden

    def counted(self: Decoder, inputs: Any) -> Any:
        nonlocal tried
        tried += 1
        return record(self, inputs)

    monkeypatch.setattr(Decoder, "_forward", waiting)
    monkeypatch.setattr(Decoder, "_record", counted)
    found = make().rollout(REQUEST)
    assert tried == 1
    assert torch.rand(1, device=DEVICE) < 1, "others still draw"
    np.testing.assert_array_equal(found.tokens, expected.tokens)
