"""Rollouts of the torch backend: slots that responses leave and enter, and memory that does not suffice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from backends.interface import BackendError, Ids, Proxy, RolloutRequest, Sampling, Sequences
from backends.stop_strings import StopText
from backends.torch import decoder, rollout
from backends.torch.backend import TorchEngine
from backends.torch.cache import Prefix, SlotCache
from backends.torch.model import TorchPolicy
from tests.backends.completions import assert_same
from tests.device import DEVICE

VOCAB, EOS = 31, 0


def prompts() -> list[Ids]:
    rng = np.random.default_rng(5)
    return [rng.integers(1, VOCAB, size) for size in (3, 9, 1, 5, 4)]


SAMPLING = Sampling(max_tokens=24, stop_ids=(EOS, 7), samples=4, seed=3)


def test_batching_changes_no_response(make: Callable[..., TorchEngine], monkeypatch: pytest.MonkeyPatch) -> None:
    """Few slots or many, prefills apart or together, ends noticed at once or late: the same responses."""
    whole = make().rollout(RolloutRequest(tuple(prompts()), SAMPLING))
    assert len(set(np.diff(whole.starts))) > 5, "ragged"
    assert 0 < whole.truncated.sum() < 20
    for slots, budget, every in ((1, 4, 1), (3, 16384, 1), (7, 10, 1), (20, 16384, 5), (6, 16384, 8)):
        monkeypatch.setitem(rollout.CHECK_EVERY, DEVICE, every)
        assert_same(
            make(rollout_batch=slots, micro_batch_tokens=budget).rollout(RolloutRequest(tuple(prompts()), SAMPLING)),
            whole,
        )


@pytest.mark.parametrize("every", [1, 5, 8])
def test_stop_strings_that_are_noticed_late(
    make: Callable[..., TorchEngine], monkeypatch: pytest.MonkeyPatch, every: int
) -> None:
    """As on a GPU, where several tokens are drawn between two looks: what lies behind the string is left out."""
    monkeypatch.setitem(rollout.CHECK_EVERY, DEVICE, every)
    plain = make().rollout(RolloutRequest(tuple(prompts()), SAMPLING))
    stop = StopText.of(("k", "de"), lambda ids: "".join(chr(97 + token) for token in ids), VOCAB)
    stopped = make().rollout(RolloutRequest(tuple(prompts()), replace(SAMPLING, stop=stop)))
    earlier = 0
    for row in range(20):
        whole, found = (done.tokens[slice(*done.starts[row : row + 2])].tolist() for done in (plain, stopped))
        ends = [n for n in range(1, len(whole) + 1) if stop.completed_by(np.array(whole[:n]))]
        assert found == whole[: min(ends, default=len(whole))]
        earlier += bool(ends)
    assert 3 < earlier < 20


def test_each_prompt_is_prefilled_once(make: Callable[..., TorchEngine], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the responses of a prompt enter at different times."""
    prefilled: list[int] = []
    original, asked = decoder.prefill, prompts()

    def count(policy: TorchPolicy, group: Sequence[Ids]) -> list[Prefix]:
        prefilled.extend(next(place for place, each in enumerate(asked) if each is prompt) for prompt in group)
        return original(policy, group)

    monkeypatch.setattr(decoder, "prefill", count)
    make(rollout_batch=3).rollout(RolloutRequest(tuple(asked), SAMPLING))
    assert prefilled == [0, 1, 2, 3, 4]


def test_finished_responses_cost_nothing(make: Callable[..., TorchEngine], monkeypatch: pytest.MonkeyPatch) -> None:
    """The decoder's rows add up to the tokens that a forward had to follow, and it ends with the longest."""
    monkeypatch.setitem(rollout.CHECK_EVERY, DEVICE, 1)
    backend, rows, decode = make(), list[int](), rollout.Decoder.__call__
    monkeypatch.setattr(
        rollout.Decoder, "__call__", lambda self, ids, lengths: (rows.append(len(ids)), decode(self, ids, lengths))[1]
    )
    drawn = backend.rollout(RolloutRequest(tuple(prompts()), SAMPLING))
    lengths = np.diff(drawn.starts)
    assert sum(rows) == (lengths - 1).sum()
    assert len(rows) == lengths.max() - 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rollouts_use_the_weights_of_now(make: Callable[..., TorchEngine], dtype: str) -> None:
    """What was sampled after an update is scored the same after it; bfloat16 rounds the two differently."""
    backend = make(dtype=dtype)
    for _ in range(2):
        drawn = backend.rollout(RolloutRequest(tuple(prompts()), SAMPLING))
        sequences = Sequences(tuple(prompts()[row // 4] for row in range(20)), drawn.tokens, drawn.starts)
        scored = backend.score(sequences).logprobs
        assert np.abs(scored - drawn.logprobs).max() < (1e-5 if dtype == "float32" else 0.15)
        backend.accumulate(sequences, lambda logp, _: (float(logp.sum()), np.ones_like(logp)))
        backend.step(0.05)
    assert np.abs(backend.score(sequences).logprobs - scored).max() > 0.5


def test_the_cache_grows_no_longer_than_a_response_can(
    make: Callable[..., TorchEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    columns: list[int] = []
    reserve = SlotCache._reserve

    def note(cache: SlotCache, needed: int) -> None:
        reserve(cache, needed)
        assert needed <= cache.columns
        columns.append(cache.columns)

    monkeypatch.setattr(SlotCache, "_reserve", note)
    make().rollout(RolloutRequest(tuple(prompts()), Sampling(max_tokens=90, stop_ids=(), samples=1)))
    assert sorted(set(columns)) == [64, 96, 9 + 90 + rollout.CHECK_EVERY[DEVICE]]


def test_a_prompts_first_tokens_find_room() -> None:
    """Nothing is moved for the tokens after a long prompt, until half as many have come."""
    cache = SlotCache(2, 1000, torch.float32, {"full_attention": 0})
    cache.admit(Prefix(100, torch.zeros(8), [(torch.ones(100, 1, 4), torch.ones(100, 1, 4))]), 2)
    before = cache._keys[0]
    for length in (100, 149):
        cache.step(torch.tensor([length, 100]), length + 1)
        assert cache._keys[0] is before
    cache.step(torch.tensor([150, 100]), 151)
    assert cache._keys[0].shape[1] == 225


class Memory:
    """Lets generation run out of memory wherever more than so many responses are held, before or after a forward."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, slots: int, where: str) -> None:
        self.tries: list[int] = []
        original = getattr(SlotCache, where)

        def limited(cache: SlotCache, *rest: Any) -> Any:
            found = original(cache, *rest)
            self.tries.append(cache.slots)
            if cache.used > slots:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return found

        monkeypatch.setattr(SlotCache, where, limited)


@pytest.mark.parametrize(
    "where", ["step", pytest.param("update", marks=pytest.mark.long), pytest.param("admit", marks=pytest.mark.long)]
)
def test_out_of_memory_halves_the_responses_at_a_time(
    make: Callable[..., TorchEngine], where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Responses do not change, each is reported once, and later rollouts begin with what fits."""
    whole = make().rollout(RolloutRequest(tuple(prompts()), SAMPLING))
    backend, memory, finished = make(rollout_batch=16), Memory(monkeypatch, 5, where), list[int]()
    for _ in range(2):
        assert_same(
            backend.rollout(RolloutRequest(tuple(prompts()), SAMPLING), lambda row, _: finished.append(row)), whole
        )
    assert sorted(finished) == sorted(2 * list(range(20)))
    assert list(dict.fromkeys(memory.tries)) == [16, 8, 4]


def test_out_of_memory_late_in_a_rollout(make: Callable[..., TorchEngine], monkeypatch: pytest.MonkeyPatch) -> None:
    """Responses that were finished by then stay as they are."""
    whole = make().rollout(RolloutRequest(tuple(prompts()), SAMPLING))
    forward, steps, finished = SlotCache.step, [0], list[int]()

    def failing(cache: SlotCache, *rest: Any) -> Any:
        steps[0] += 1
        if steps[0] == 12:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(cache, *rest)

    monkeypatch.setattr(SlotCache, "step", failing)
    found = make(rollout_batch=8).rollout(
        RolloutRequest(tuple(prompts()), SAMPLING), lambda row, _: finished.append(row)
    )
    assert steps[0] > 12
    assert_same(found, whole)
    assert sorted(finished) == list(range(20))


@pytest.mark.parametrize("kind", ["output_row", "hidden_exact"])
def test_features_belong_to_the_tokens_that_stay(
    kind: Any, make: Callable[..., TorchEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not to those drawn past an end before it was noticed, nor to those of responses that began again."""
    request = RolloutRequest(tuple(prompts()), SAMPLING, proxy=Proxy(kind))
    whole = make().rollout(request)
    assert whole.features is not None
    for every, slots in ((5, 512), (1, 6), (3, 6)):
        monkeypatch.setitem(rollout.CHECK_EVERY, DEVICE, every)
        forward, steps = SlotCache.step, [0]

        def failing(cache: SlotCache, *rest: Any, forward: Any = forward, steps: Any = steps) -> Any:
            steps[0] += 1
            if steps[0] == 15:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return forward(cache, *rest)

        with monkeypatch.context() as patch:
            patch.setattr(SlotCache, "step", failing)
            found = make(rollout_batch=slots).rollout(request)
        assert steps[0] > 15
        assert_same(found, whole)
        assert found.features is not None
        every_token = np.eye(len(whole.tokens))
        np.testing.assert_allclose(
            found.features.weighted_sum(every_token), whole.features.weighted_sum(every_token), atol=2e-5
        )


def test_a_response_that_does_not_fit(make: Callable[..., TorchEngine], monkeypatch: pytest.MonkeyPatch) -> None:
    Memory(monkeypatch, 0, "step")
    with pytest.raises(BackendError, match=r"single response.*lower max_tokens"):
        make().rollout(RolloutRequest(tuple(prompts()), SAMPLING))
