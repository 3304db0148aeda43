"""Hybrid models on torch: packed rows with a shared prompt against transformers' own forward for each response."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from backends.batching import pack
from backends.interface import RolloutRequest, Sampling, Sequences
from backends.settings import BackendSettings
from backends.torch import backend as torch_backend
from backends.torch import recurrent, rollout
from backends.torch.backend import TorchEngine
from backends.torch.cache import KeyValueCache, PagedCache, SlotCache
from backends.torch.cuda_graphs import GraphRunner
from backends.torch.decoder import Decoder, prefill
from backends.torch.recurrent import StateLayout
from backends.torch.row_states import RowState
from tests.conformance.objectives import Linear
from tests.conformance.test_episodes import Script
from tests.device import DEVICE
from tests.families.families import FAMILIES, VOCAB, build

# One of each kind: gated delta rule, short convolution, Mamba 2, and Mamba 1, whose layers cannot start from a state.
KINDS = {"qwen3_5_text": True, "lfm2": True, "granitemoehybrid": True, "jamba": False}
LONG = {"granitemoehybrid", "jamba"}
CASES = [pytest.param(kind, marks=pytest.mark.long if kind in LONG else ()) for kind in KINDS]


def three_prompts() -> Sequences:
    """Prompts of equal and other lengths; responses of one token and of more than a convolution's kernel."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(2, VOCAB, size) for size in (6, 2, 6)]
    lengths = np.array([9, 1, 5, 2, 7, 8, 3])
    of = (0, 0, 0, 1, 1, 2, 2)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    return Sequences(tuple(prompts[place] for place in of), rng.integers(2, VOCAB, starts[-1]), starts)


def plain(model: PreTrainedModel, sequences: Sequences) -> torch.Tensor:
    """Log-probabilities [n] by transformers, each response alone behind its prompt, with the autograd graph."""
    found = []
    for row, prompt in enumerate(sequences.prompts):
        ids = torch.from_numpy(np.concatenate([prompt, sequences.response(row)]))
        logits = model(ids[None], use_cache=False).logits[0, len(prompt) - 1 : -1]
        found.append(logits.log_softmax(-1).gather(1, ids[len(prompt) :, None])[:, 0])
    return torch.cat(found)


def family(kind: str) -> Any:
    return next(each for each in FAMILIES if each.kind == kind)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointed"])
@pytest.mark.parametrize("kind", CASES)
def test_log_probabilities_and_every_gradient(kind: str, checkpointing: bool, tmp_path: Path) -> None:
    model = build(family(kind), tmp_path).float()
    sequences = three_prompts()
    settings = BackendSettings.of(str(tmp_path), gradient_checkpointing=checkpointing)
    engine = TorchEngine(settings, DEVICE)
    assert engine._policy.carries_state == KINDS[kind]
    expected = plain(model, sequences)
    factors = np.random.default_rng(1).standard_normal(len(sequences.tokens))
    np.testing.assert_allclose(engine.score(sequences).logprobs, expected.detach().numpy(), rtol=0, atol=2e-5)
    engine.accumulate(sequences, Linear(sequences.starts, factors))
    (-(expected * torch.from_numpy(factors).float()).sum()).backward()
    gradients = dict(engine._policy.causal.named_parameters())
    for name, weight in model.named_parameters():
        if weight.grad is not None:
            known = weight.grad.numpy()
            found = gradients[name].grad
            assert found is not None, name
            np.testing.assert_allclose(
                found.cpu().numpy(), known, rtol=0, atol=2e-4 * np.abs(known).max() + 1e-7, err_msg=name
            )


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("kind", CASES)
def test_drawing_equals_scoring(kind: str, tmp_path: Path) -> None:
    """Three slots for eight responses that end at different times, so that states move between slots."""
    build(family(kind), tmp_path)
    engine = TorchEngine(BackendSettings.of(str(tmp_path), rollout_batch=3), DEVICE)
    prompts = three_prompts().prompts[0], three_prompts().prompts[3]
    sampling = Sampling(max_tokens=9, stop_ids=tuple(range(2, 10)), samples=4)
    drawn = engine.rollout(RolloutRequest(prompts, sampling))
    assert len(set(np.diff(drawn.starts))) > 2
    repeated = tuple(prompt for prompt in prompts for _ in range(4))
    scored = engine.score(Sequences(repeated, drawn.tokens, drawn.starts)).logprobs
    np.testing.assert_allclose(drawn.logprobs, scored, rtol=0, atol=2e-5)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.usefixtures("pages")
@pytest.mark.parametrize("kind", CASES)
def test_episodes(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Log-probabilities across turns equal scoring; late answers and preempted rows change no token.

    Rows are parked while others are drawn, which changes the states of their rows. In pages they also leave the cache.
    """
    build(replace(family(kind), config=family(kind).config | {"initializer_range": 0.1}), tmp_path)
    prompts = three_prompts().prompts[0], three_prompts().prompts[3]
    sampling = Sampling(max_tokens=20, stop_ids=tuple(range(2, 12)), samples=4, seed=1)
    rollouts, run = list[rollout.TorchRollout](), rollout.TorchRollout.run
    monkeypatch.setattr(rollout.TorchRollout, "run", lambda self: (rollouts.append(self), run(self))[1])
    monkeypatch.setattr(rollout, "GROWTH", 0)
    found = []
    for delay, slots, pool in ((0, 8, None), (3, 3, None), (2, 8, 52)):
        monkeypatch.setitem(torch_backend.PAGED, DEVICE, pool is not None)
        engine = TorchEngine(BackendSettings.of(str(tmp_path), rollout_batch=slots), DEVICE)
        engine._cache_tokens = pool or engine._cache_tokens
        script = Script(delay, turns=4, limit=sampling.max_tokens)
        drawn = engine.rollout(RolloutRequest(prompts, sampling, turns=script))
        found.append(drawn)
    assert max(map(len, script.ended.values())) > 2
    assert rollouts[-1].preemptions > 0
    first, *others = found
    assert first.regions is not None
    assert not first.regions.own.all()
    for other in others:
        assert other.regions is not None
        np.testing.assert_array_equal(other.regions.ids, first.regions.ids)
        np.testing.assert_array_equal(other.regions.own, first.regions.own)
    repeated = tuple(prompt for prompt in prompts for _ in range(4))
    scored = engine.score(Sequences(repeated, first.tokens, first.starts, regions=first.regions)).logprobs
    for drawn in found:
        np.testing.assert_allclose(drawn.logprobs, scored, rtol=0, atol=3e-5)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("paged", [False, True], ids=["slots", "pages"])
@pytest.mark.parametrize("kind", CASES)
def test_appended_tokens_equal_one_forward_pass(kind: str, paged: bool, tmp_path: Path) -> None:
    """Chunks of unlike lengths appended to two of three rows, then one token to each."""
    build(family(kind), tmp_path)
    policy = TorchEngine(BackendSettings.of(str(tmp_path)), DEVICE)._policy
    rng = np.random.default_rng(2)
    prompts = [rng.integers(2, VOCAB, size) for size in (5, 3, 7)]
    chunks = {0: rng.integers(2, VOCAB, 4), 2: rng.integers(2, VOCAB, 3)}
    last = rng.integers(2, VOCAB, 3)
    cache: KeyValueCache = SlotCache(4, 16, policy.dtype, policy.windows)
    if paged:
        cache = PagedCache(4, 16, 64, 4, policy.dtype, policy.windows, policy.layer_windows)
    decoder = Decoder(policy, cache, GraphRunner(policy.device))
    lengths = np.array([5, 3, 7])
    with torch.no_grad():
        for prefix in prefill(policy, prompts):
            cache.admit(prefix, 1)
        rows = np.array([0, 2])
        cache.grow(lengths + 5)
        appended = decoder.append(rows, lengths[rows], [chunks[0], chunks[2]], 100)
        lengths[rows] += [4, 3]
        found = decoder(torch.from_numpy(last).to(policy.device), lengths)
        for row, prompt in enumerate(prompts):
            ids = np.concatenate([prompt, chunks.get(row, np.empty(0, np.int64)), last[row : row + 1]])
            whole = policy.hidden(torch.from_numpy(ids)[None].to(policy.device), use_cache=False)[0]
            torch.testing.assert_close(found[row], whole[-1], rtol=0, atol=2e-5)
            if row in chunks:
                torch.testing.assert_close(appended[row // 2], whole[-2], rtol=0, atol=2e-5)


@pytest.mark.parametrize("carried", [True, False])
def test_the_layout_of_states(carried: bool) -> None:
    """A layer that sums everything before a token: the sums are those of each response behind its own prompt."""
    sequences = three_prompts()
    batch = pack(sequences, [[0, 1, 2], [3, 4], [5, 6]])
    layout = StateLayout.of(batch, torch.device("cpu"), carried=carried, keep=True)

    def running_sum(rows: torch.Tensor, state: Any) -> torch.Tensor:
        start = None if state is None else state.get_recurrent_state(0)
        found = rows.cumsum(1) + (0 if start is None else start[:, None])
        if state is not None:
            state.update_recurrent_state(found[:, -1], 0)
        return found

    ids = torch.from_numpy(batch.ids).double()[None, :, None]
    found = layout.compute(3, ids, running_sum)[0, :, 0]
    place = 0
    for prompt, members in enumerate([[0, 1, 2], [3, 4], [5, 6]]):
        own = sequences.prompts[members[0]]
        np.testing.assert_array_equal(found[place : place + len(own)], own.cumsum())
        assert layout.kept is not None
        assert layout.kept[3].recurrent[0][prompt, 0] == own.sum()
        place += len(own)
        for row in members:
            response = sequences.response(row)[:-1]
            np.testing.assert_array_equal(found[place : place + len(response)], own.sum() + response.cumsum())
            place += len(response)
    assert place == len(batch.ids)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_single_tokens_take_no_smaller_time_steps_than_whole_sequences(tmp_path: Path) -> None:
    """transformers limits Nemotron-H's time steps in whole sequences only; here many are below the limit."""
    model = build(family("nemotron_h"), tmp_path)
    layer: Any = next(module for module in model.modules() if recurrent.is_recurrent(module))
    rows = torch.randn(2, 9, layer.hidden_size, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        layer.dt_bias -= 4
        assert recurrent.adopt(model)
        whole, state = layer(rows), recurrent.CarriedState()
        layer(rows[:, :4], cache_params=state)
        drawn = RowState(dict(state.conv), dict(state.recurrent))
        single = [layer(rows[:, at : at + 1], cache_params=drawn) for at in range(4, 9)]
    torch.testing.assert_close(torch.cat(single, 1), whole[:, 4:], rtol=0, atol=1e-5)
