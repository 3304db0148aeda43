"""Episodes on the PyTorch engine: parked responses keep their keys and values, in slots and in pages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from backends.interface import Completions, Ids, Proxy, RolloutRequest
from backends.torch import backend as torch_backend
from backends.torch import rollout
from backends.torch.backend import TorchEngine
from backends.torch.cache import PagedCache, SlotCache
from backends.torch.decoder import Decoder
from tests.backends.completions import assert_same
from tests.conformance.test_episodes import SAMPLING, Script
from tests.device import DEVICE

from .test_torch_pages import PROMPTS, rollouts  # noqa: F401 (a fixture)


def drawn(engine: TorchEngine, delay: int = 2, turns: int = 4) -> Completions:
    script = Script(delay, turns)
    return engine.rollout(RolloutRequest(PROMPTS, SAMPLING, entropies=True, proxy=Proxy(), turns=script))


@pytest.fixture
def expected(make: Callable[..., TorchEngine], monkeypatch: pytest.MonkeyPatch) -> Completions:
    """The episodes drawn in slots, a token at a time, with environments that answer at once."""
    with monkeypatch.context() as patch:
        patch.setitem(torch_backend.PAGED, DEVICE, False)
        patch.setitem(rollout.CHECK_EVERY, DEVICE, 1)
        return drawn(make(), delay=0)


@pytest.mark.parametrize(("slots", "every"), [(512, 1), (512, 5), (4, 3)])
def test_slots(
    slots: int,
    every: int,
    make: Callable[..., TorchEngine],
    expected: Completions,
    rollouts: list[rollout.TorchRollout],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(torch_backend.PAGED, DEVICE, False)
    monkeypatch.setitem(rollout.CHECK_EVERY, DEVICE, every)
    assert_same(drawn(make(rollout_batch=slots)), expected)
    assert isinstance(rollouts[-1]._cache, SlotCache)


@pytest.mark.usefixtures("pages")
@pytest.mark.parametrize(
    ("every", "room"),
    [pytest.param(1, None, marks=pytest.mark.long), (4, None), (1, 9), pytest.param(3, 12, marks=pytest.mark.long)],
)
def test_pages_also_where_responses_have_to_leave(
    every: int,
    room: int | None,
    make: Callable[..., TorchEngine],
    expected: Completions,
    rollouts: list[rollout.TorchRollout],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Responses that left, parked or not, are computed anew with the tokens they had."""
    monkeypatch.setitem(rollout.CHECK_EVERY, DEVICE, every)
    monkeypatch.setattr(rollout, "GROWTH", 0)
    engine = make()
    if room is not None:
        engine._cache_tokens = room * (4 if DEVICE == "cpu" else 256)
    assert_same(drawn(engine), expected)
    assert isinstance(rollouts[-1]._cache, PagedCache)
    assert DEVICE == "cuda" or (rollouts[-1].preemptions > 0) == (room is not None)


@pytest.mark.parametrize("fails", [4, 9, 15])
def test_memory_that_runs_out(
    fails: int, make: Callable[..., TorchEngine], expected: Completions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The environments are not asked again: what was written stays."""
    call, calls = Decoder.__call__, list[int]()

    def limited(decoder: Decoder, *rest: Any) -> Any:
        calls.append(1)
        if len(calls) == fails:
            raise torch.OutOfMemoryError("out of memory")
        return call(decoder, *rest)

    monkeypatch.setattr(Decoder, "__call__", limited)
    assert_same(drawn(make()), expected)
    assert len(calls) > fails


def test_nothing_of_earlier_turns_is_computed_again(
    make: Callable[..., TorchEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given tokens that are computed: those of the answers, and the last token of each turn, once each."""
    appended = list[Ids]()
    append = Decoder.append

    def counted(decoder: Decoder, rows: Ids, lengths: Ids, chunks: list[Ids], most: int) -> Any:
        appended.extend(chunks)
        return append(decoder, rows, lengths, chunks, most)

    monkeypatch.setattr(Decoder, "append", counted)
    script = Script()
    found = make().rollout(RolloutRequest(PROMPTS, SAMPLING, turns=script))
    assert found.regions is not None
    written = int((~found.regions.own).sum())
    assert written > 10
    assert sum(map(len, appended)) == written, "the last token of a turn, and all but the last of its answer"
