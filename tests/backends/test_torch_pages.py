"""Keys and values in pages of one pool: the same responses as in slots, also from a pool that is too small."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from backends.interface import BackendError, Completions, Ids, Proxy, RolloutRequest, Sampling
from backends.torch import backend as torch_backend
from backends.torch import paged_attention, rollout
from backends.torch.backend import TorchEngine
from backends.torch.cache import KeyValueCache, PagedCache, Prefix, SlotCache
from backends.torch.cuda_graphs import GraphRunner
from backends.torch.decoder import Decoder, prefill
from backends.torch.model import TorchPolicy
from tests.backends.completions import assert_same
from tests.device import DEVICE

PAGE = 4 if DEVICE == "cpu" else 256
PROMPTS = tuple(np.random.default_rng(5).integers(1, 31, size) for size in (3, 9, 1, 5, 4))
REQUEST = RolloutRequest(
    PROMPTS, Sampling(max_tokens=24, stop_ids=(0, 7), samples=4, seed=3), entropies=True, proxy=Proxy()
)
LONGEST = 9 + 24


@pytest.fixture
def expected(make: Callable[..., TorchEngine], monkeypatch: pytest.MonkeyPatch) -> Completions:
    """The responses of a rollout whose keys and values lie in slots."""
    with monkeypatch.context() as patch:
        patch.setitem(torch_backend.PAGED, DEVICE, False)
        return make().rollout(REQUEST)


@pytest.fixture
def rollouts(monkeypatch: pytest.MonkeyPatch) -> list[rollout.TorchRollout]:
    """Every rollout that runs."""
    found: list[rollout.TorchRollout] = []
    run = rollout.TorchRollout.run
    monkeypatch.setattr(rollout.TorchRollout, "run", lambda self: (found.append(self), run(self))[1])
    return found


@pytest.mark.usefixtures("pages")
@pytest.mark.parametrize(("slots", "every"), [(512, 1), (3, 1), (7, 5), (6, 8)])
def test_pages_hold_the_responses_of_slots(
    slots: int,
    every: int,
    make: Callable[..., TorchEngine],
    expected: Completions,
    rollouts: list[rollout.TorchRollout],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(rollout.CHECK_EVERY, DEVICE, every)
    assert_same(make(rollout_batch=slots).rollout(REQUEST), expected)
    assert isinstance(rollouts[-1]._cache, PagedCache)
    assert rollouts[-1].preemptions == 0


@pytest.mark.usefixtures("pages")
@pytest.mark.parametrize(("every", "growth"), [(1, 0), (1, 8), (5, 0)])
def test_a_pool_that_is_too_small_changes_no_response(
    every: int,
    growth: int,
    make: Callable[..., TorchEngine],
    expected: Completions,
    rollouts: list[rollout.TorchRollout],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Responses leave and enter again with the tokens they had; each is reported once."""
    monkeypatch.setitem(rollout.CHECK_EVERY, DEVICE, every)
    monkeypatch.setattr(rollout, "GROWTH", growth)
    engine, finished = make(), list[int]()
    pool = (LONGEST + every) // PAGE * PAGE + (8 if DEVICE == "cpu" else 2) * PAGE
    engine._cache_tokens = pool
    held = list[int]()
    grow = PagedCache.grow

    def counted(cache: PagedCache, lengths: Ids) -> None:
        grow(cache, lengths)
        held.append(int(cache._held.sum()) * PAGE)

    monkeypatch.setattr(PagedCache, "grow", counted)
    assert_same(engine.rollout(REQUEST, lambda row, _: finished.append(row)), expected)
    assert sorted(finished) == list(range(20))
    assert max(held) <= pool
    assert DEVICE == "cuda" or (every, growth) != (1, 0) or rollouts[-1].preemptions > 3
    assert engine._cache_tokens == pool, "no memory error"


@pytest.mark.usefixtures("pages")
def test_a_pool_without_room_for_one_response(make: Callable[..., TorchEngine]) -> None:
    engine = make()
    engine._cache_tokens = 2 * PAGE
    prompt = np.resize(PROMPTS[1], 3 * PAGE)
    with pytest.raises(BackendError, match=r"single response.*lower max_tokens"):
        engine.rollout(RolloutRequest((prompt,), Sampling(max_tokens=4, stop_ids=())))


@pytest.mark.usefixtures("pages")
@pytest.mark.parametrize(
    "where", [pytest.param("step", marks=pytest.mark.long), pytest.param("update", marks=pytest.mark.long), "admit"]
)
def test_out_of_memory_halves_the_pool(
    where: str,
    make: Callable[..., TorchEngine],
    expected: Completions,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The tokens drawn so far stay, and with them their features."""
    original, tries = getattr(PagedCache, where), list[int]()

    def limited(cache: PagedCache, *rest: Any, **named: Any) -> Any:
        found = original(cache, *rest, **named)
        tries.append(cache.tokens)
        if cache.tokens > 12 * PAGE and len(tries) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return found

    monkeypatch.setattr(PagedCache, where, limited)
    engine = make(rollout_batch=16)
    assert_same(engine.rollout(REQUEST), expected)
    assert len(set(tries)) > 1
    assert engine._cache_tokens <= 12 * PAGE or DEVICE == "cuda"


def caches(policy: TorchPolicy, rows: int, most: int) -> list[KeyValueCache]:
    """An empty cache of each kind."""
    common = policy.dtype, policy.windows
    pool = rows * (most + PAGE)
    return [SlotCache(rows, most, *common), PagedCache(rows, most, pool, PAGE, *common, policy.layer_windows)]


@torch.no_grad()
def test_given_tokens_are_appended_at_any_position(make: Callable[..., TorchEngine]) -> None:
    """To some rows, of different numbers; decoded tokens before and after see them as in one forward pass."""
    policy, rng = make()._policy, np.random.default_rng(1)
    texts = [rng.integers(0, 31, size) for size in (20, 31, 9, 27)]
    parts = [np.split(text, cuts) for text, cuts in zip(texts, ([4, 5], [6, 7], [3, 4], [1, 2]), strict=True)]
    chunks = [part[2][:-1] for part in parts]
    for cache in caches(policy, 4, 40):
        for part in parts:
            cache.admit(prefill(policy, [part[0]])[0], 1)
        decoder = Decoder(policy, cache, GraphRunner(policy.device))
        lengths = np.array([len(part[0]) for part in parts])
        cache.grow(lengths + 1)
        decoder(torch.tensor([int(part[1][0]) for part in parts], device=policy.device), lengths)
        lengths = lengths + 1
        rows = np.array([3, 0, 1])  # row 2 waits meanwhile
        grown = lengths.copy()
        grown[rows] += [len(chunks[row]) for row in rows]
        cache.grow(grown)
        found = decoder.append(rows, lengths[rows], [chunks[row] for row in rows], budget=16)
        for hidden, row in zip(found, rows, strict=True):
            [whole] = prefill(policy, [texts[row][:-1]])
            torch.testing.assert_close(hidden, whole.hidden, atol=1e-5, rtol=1e-5)
        cache.grow(grown + len(chunks[2]))
        decoder.append(np.array([2]), lengths[[2]], [chunks[2]], budget=16)
        grown[2] += len(chunks[2])
        cache.grow(grown + 1)
        last = decoder(torch.tensor([int(text[-1]) for text in texts], device=policy.device), grown)
        for hidden, text in zip(last, texts, strict=True):
            torch.testing.assert_close(hidden, prefill(policy, [text])[0].hidden, atol=1e-5, rtol=1e-5)


def test_a_page_belongs_to_one_row() -> None:
    """Random admissions, growth and departures; no page is lost, and the pool refuses what does not fit."""
    rng, cache = np.random.default_rng(0), PagedCache(8, 60, 25 * 4, 4, torch.float32, {"full_attention": 0}, (0,))
    layer = torch.zeros(9, 1, 2)
    lengths = np.empty(0, dtype=np.int64)
    refused = 0
    for _ in range(300):
        wanted = np.minimum(60, lengths + rng.integers(0, 12, len(lengths)))
        fits = cache.fits(wanted)
        assert fits == (len(wanted) <= 8 and sum(-(-int(size) // 4) for size in wanted) <= 25)
        refused += not fits
        if fits:
            cache.grow(wanted)
            lengths = wanted
        keep = np.arange(len(lengths))
        if not fits:
            keep = rng.permutation(keep)[: rng.integers(0, len(keep) + 1)]
        cache.arrange(keep)
        lengths = lengths[keep]
        if cache.fits(np.append(lengths, [10, 10])):
            cache.admit(Prefix(9, layer[0, 0], [(layer, layer)]), 2)
            lengths = np.append(lengths, [10, 10])
        owned = [page for row in range(cache.used) for page in cache._table[row, : cache._held[row]].tolist()]
        assert sorted([*owned, *cache._free]) == list(range(1, 26))
        assert (cache._held[: cache.used] * 4 >= lengths).all()
    assert refused > 20
    with pytest.raises(torch.OutOfMemoryError):
        cache.grow(np.full(cache.used, 200))


def test_a_kernel_that_computes_something_else_is_not_used(
    make: Callable[..., TorchEngine], pages: None, expected: Completions, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert paged_attention.kernel_fault(make()._policy) is None
    attend = paged_attention.attend_once

    def refuse(*_: Any) -> torch.Tensor:
        raise NotImplementedError("no such kernel\nin this build")

    wrong: dict[str, Any] = {
        r"off by .* of the largest": lambda *inputs: 1.01 * attend(*inputs),
        r"cannot be used here \(no such kernel\)": refuse,
    }
    for reason, kernel in wrong.items():
        engine = make()
        with monkeypatch.context() as patch:
            patch.setattr(torch_backend, "kernel_fault", paged_attention.kernel_fault)
            patch.setattr(paged_attention, "attend_once", kernel)
            patch.setattr(paged_attention, "_flash", kernel)
            assert_same(engine.rollout(REQUEST), expected)
        assert engine.slower_path is not None
        assert re.fullmatch(f"keys and values are kept in slots.*{reason}.*", engine.slower_path)


def test_memory_that_runs_out_during_the_check_is_no_fault_of_the_kernel(
    make: Callable[..., TorchEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    policy = make()._policy
    monkeypatch.setattr(paged_attention, "prefill", fail)
    with pytest.raises(torch.OutOfMemoryError):
        paged_attention.kernel_fault(policy)
