"""Attention over packed rows against its definition: every token looks at its own prompt and what came before it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from backends.batching import PackedBatch, pack
from backends.interface import Sequences
from backends.torch import attention
from backends.torch.attention import PackedLayout, Rectangles, packed_attention
from tests.backends.largest import Largest
from tests.device import DEVICE

HEADS, KEY_HEADS, SIZE = 4, 2, 8
GROUPS = [(5, [9, 2, 7, 1, 3]), (1, [4]), (7, [1, 1]), (3, [12, 11, 10, 2])]  # prompt, responses; in tokens


def packed() -> tuple[PackedBatch, Tensor]:
    """A row of several prompts, and which of its tokens [T, T] the token of each line may look at."""
    prompts = [np.arange(prompt) for prompt, _ in GROUPS]
    lengths = [length for _, responses in GROUPS for length in responses]
    starts = np.concatenate([[0], np.cumsum(lengths)])
    owners = [i for i, (_, responses) in enumerate(GROUPS) for _ in responses]
    sequences = Sequences(tuple(prompts[i] for i in owners), np.zeros(starts[-1], dtype=np.int64), starts)
    batch = pack(sequences, [np.flatnonzero(np.array(owners) == i).tolist() for i in range(len(GROUPS))])
    sees = torch.zeros(len(batch.ids), len(batch.ids), dtype=torch.bool)
    end = 0
    for prompt, responses in GROUPS:
        own = list(range(end, end + prompt))
        end += prompt
        members = [own]
        for length in responses:
            members.append([*own, *range(end, end + length - 1)])
            end += length - 1
        for sequence in members:
            for i, token in enumerate(sequence):
                sees[token, sequence[: i + 1]] = True
    assert end == len(batch.ids)
    return batch, sees


@pytest.mark.parametrize("call", [0, 20, 10**9])
@pytest.mark.parametrize("window", [None, 4, 6])
def test_outputs_and_gradients(window: int | None, call: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a softmax over explicit masks in float64: with grouped heads, ragged lengths and sliding windows.

    A call for each prompt's responses, for some together, for all.
    """
    monkeypatch.setitem(attention.CALL_PAIRS, DEVICE, call)
    batch, sees = packed()
    if window:
        positions = torch.from_numpy(batch.positions)
        sees &= positions[:, None] - positions < window
    torch.manual_seed(0)
    shapes = [(1, heads, len(batch.ids), SIZE) for heads in (HEADS, KEY_HEADS, KEY_HEADS)]
    states = [torch.randn(shape, dtype=torch.float64, device=DEVICE) for shape in shapes]
    weight = torch.randn(1, len(batch.ids), HEADS, SIZE, dtype=torch.float64, device=DEVICE)

    exact = [tensor.clone().requires_grad_() for tensor in states]
    query, key, value = exact
    key, value = (tensor.repeat_interleave(HEADS // KEY_HEADS, dim=1) for tensor in (key, value))
    scores = (query @ key.mT / 3).masked_fill(~sees.to(DEVICE), -torch.inf)
    expected = (scores.softmax(-1) @ value).transpose(1, 2)
    (expected * weight).sum().backward()

    found_states = [tensor.float().requires_grad_() for tensor in states]
    layout = PackedLayout(batch, (0, window or 0), torch.device(DEVICE))
    assert len(layout.rectangles.blocks) == {0: 9, 20: 8, 10**9: 6}[call]
    module = torch.nn.Module()
    module.layer_idx = 1
    found, _ = packed_attention(module, *found_states, None, scaling=1 / 3, layout=layout)
    assert layout.reached == {1}
    (found * weight).sum().backward()
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)
    for state, reference in zip(found_states, exact, strict=True):
        torch.testing.assert_close(state.grad.double(), reference.grad, atol=1e-5, rtol=1e-5)


def test_blocks_waste_less_than_half_on_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(attention.CALL_PAIRS, DEVICE, 0)
    batch, _ = packed()
    layout = Rectangles.of(batch, torch.device(DEVICE))
    queries = sum(block.rows * block.width for block in layout.blocks)
    assert len(batch.ids) < queries < 2 * len(batch.ids)
    assert sorted(layout.places.tolist()) == sorted(set(layout.places.tolist())), "each token has its own place"


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("window", [0, 4])
@pytest.mark.parametrize("call", [0, 10**9])
def test_parts_of_the_queries_give_the_same_and_hold_few_scores(
    softcap: float | None, window: int, call: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With capped scores and sinks, with windows, and with prompts padded to a common length."""
    monkeypatch.setitem(attention.CALL_PAIRS, DEVICE, call)
    batch, _ = packed()
    torch.manual_seed(0)
    shapes = [(1, heads, len(batch.ids), SIZE) for heads in (HEADS, KEY_HEADS, KEY_HEADS)]
    states = [torch.randn(shape, dtype=torch.float64, device=DEVICE) for shape in shapes]
    weight = torch.randn(1, len(batch.ids), HEADS, SIZE, dtype=torch.float64, device=DEVICE)
    variants = {} if softcap is None else {"softcap": softcap, "s_aux": torch.randn(HEADS, device=DEVICE)}
    results = []
    for most in (2**28, 100):
        monkeypatch.setattr(attention, "PART_SCORES", most)
        given = [state.clone().requires_grad_() for state in states]
        layout = PackedLayout(batch, (window,), torch.device(DEVICE))
        module = torch.nn.Module()
        module.layer_idx = 0
        found, _ = packed_attention(module, *given, None, layout=layout, **variants)
        (found * weight).sum().backward()
        results.append([found, *(state.grad for state in given)])
        for block in layout.rectangles.blocks:
            parts = attention._parts(block, window, 2)
            assert [range(block.width)[queries] for queries, _ in parts][-1][-1] == block.width - 1
            least = 2 * block.shape[0] * (block.prefix + block.width)  # of one query
            for queries, keys in parts:
                scores = 2 * block.shape[0] * len(range(block.width)[queries]) * (keys.stop - (keys.start or 0))
                assert scores <= max(most, least)
    for whole, part in zip(*results, strict=True):
        torch.testing.assert_close(part, whole, atol=1e-6 if softcap else 1e-12, rtol=0)


def test_one_token_of_each_row_sees_what_its_mask_says() -> None:
    """Four heads that share keys in pairs, against their softmax in float64; no key is there twice."""
    rng = np.random.default_rng(0)
    query, keys, values = (rng.normal(size=(3, heads, tokens, 8)) for heads, tokens in ((4, 1), (2, 7), (2, 7)))
    mask = np.arange(7) <= np.array([6, 2, 4])[:, None]
    given = [torch.from_numpy(array.astype(np.float32)).to(DEVICE) for array in (query, keys, values)]
    visible = torch.from_numpy(mask)[:, None, None].to(DEVICE)
    with Largest() as largest:
        found, _ = packed_attention(torch.nn.Identity(), *given, visible, 0.5)
    assert largest.numel <= given[1].numel()
    scores = 0.5 * np.einsum("bhd,bhtd->bht", query[:, :, 0], keys.repeat(2, axis=1))
    weights = np.where(mask[:, None], np.exp(scores), 0)
    expected = np.einsum("bht,bhtd->bhd", weights / weights.sum(-1, keepdims=True), values.repeat(2, axis=1))
    np.testing.assert_allclose(found[:, 0].cpu(), expected, atol=1e-6, rtol=0)


def test_attention_with_a_position_bias_is_refused() -> None:
    states = [torch.zeros(1, HEADS, 2, SIZE)] * 3
    with pytest.raises(ValueError, match="position_bias"):
        packed_attention(torch.nn.Module(), *states, None, position_bias=1.0)
