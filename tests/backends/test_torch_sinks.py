"""Attention sinks with kernels that have none.

The flash kernel of CUDA needs a GPU; on a processor PyTorch's flash kernel for processors takes its place, which has
the same two halves: outputs with logarithms of sums, and gradients from both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

from backends.settings import BackendSettings
from backends.torch import backend as torch_backend
from backends.torch import paged_attention, sink_attention, varlen_attention
from backends.torch.attention import PackedLayout, packed_attention
from backends.torch.backend import TorchEngine
from backends.torch.cache import PageTable
from backends.torch.softmax import Softmax
from backends.torch.varlen_attention import VarlenLayout
from tests.backends.test_torch_attention import HEADS, KEY_HEADS, SIZE, packed
from tests.backends.test_torch_models import ARCHITECTURES
from tests.backends.test_torch_varlen import loop
from tests.backends.torch_engine import gradients, random_sequences, summed
from tests.device import DEVICE

FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
pytestmark = pytest.mark.skipif(DEVICE == "cuda", reason="the stand-in is a kernel for processors")


def each(layout: VarlenLayout, window: int, dtype: torch.dtype) -> Iterator[tuple[slice, slice, Tensor]]:
    """The queries and keys of each sequence, and the mask to add to its scores."""
    ends: list[list[int]] = [starts.tolist() for starts in (layout.query_starts, layout.key_starts)]
    for queries, keys in zip(*(pairwise(each) for each in ends), strict=True):
        rows, columns = queries[1] - queries[0], keys[1] - keys[0]
        ages = torch.arange(rows)[:, None] + columns - rows - torch.arange(columns)
        hidden = (ages < 0) | (ages >= window) if window else ages < 0
        yield slice(*queries), slice(*keys), torch.zeros(rows, columns, dtype=dtype).masked_fill(hidden, -torch.inf)


def rows_first(states: Tensor, heads: int) -> Tensor:
    """[1, heads, rows, size] of states [rows, fewer heads, size]."""
    return states.transpose(0, 1)[None].repeat_interleave(heads // states.shape[1], 1)


def forward(
    query: Tensor, keys: Tensor, values: Tensor, layout: VarlenLayout, window: int, scaling: float | None
) -> tuple[Tensor, Tensor]:
    """In place of the flash kernel for CUDA."""
    outputs, sums = [], []
    for rows, columns, mask in each(layout, window, query.dtype):
        states = [rows_first(state, query.shape[1]) for state in (query[rows], keys[columns], values[columns])]
        out, log_sums = FORWARD(*states, attn_mask=mask, scale=scaling)
        outputs.append(out[0].transpose(0, 1))
        sums.append(log_sums[0])
    return torch.cat(outputs), torch.cat(sums, 1)


def backward(
    gradient: Tensor,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    out: Tensor,
    log_sums: Tensor,
    layout: VarlenLayout,
    window: int,
    scaling: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """In place of its backward pass."""
    found = [torch.zeros_like(state) for state in (query, keys, values)]
    for rows, columns, mask in each(layout, window, query.dtype):
        parts = gradient[rows], query[rows], keys[columns], values[columns], out[rows]
        states = [rows_first(state, query.shape[1]) for state in parts]
        sums = log_sums[None, :, rows].to(torch.promote_types(query.dtype, torch.float32))
        computed = BACKWARD(*states, sums, 0.0, False, attn_mask=mask, scale=scaling)
        for total, part, place in zip(found, computed, (rows, columns, columns), strict=True):
            total[place] += part[0].transpose(0, 1).unflatten(1, (total.shape[1], -1)).sum(2)
    return found[0], found[1], found[2]


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor computes what the kernels would."""
    monkeypatch.setattr(sink_attention, "_forward", forward)
    monkeypatch.setattr(sink_attention, "_backward", backward)
    monkeypatch.setattr(varlen_attention, "_kernel", loop)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("window", [0, 4])
@pytest.mark.parametrize("squares", [False, True])
def test_outputs_and_gradients(window: int, squares: bool) -> None:
    """Against a softmax in float64 over the scores and the sinks; also those that dwarf every score, or vanish."""
    batch, sees = packed()
    if window:
        positions = torch.from_numpy(batch.positions)
        sees &= positions[:, None] - positions < window
    torch.manual_seed(0)
    shapes = [(1, heads, len(batch.ids), SIZE) for heads in (HEADS, KEY_HEADS, KEY_HEADS)]
    exact = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    sinks = torch.tensor([9.0, -9.0, 0.5, 1.5][:HEADS], dtype=torch.float64, requires_grad=True)
    assert len(sinks) == HEADS
    weight = torch.randn(1, len(batch.ids), HEADS, SIZE, dtype=torch.float64)
    query, key, value = exact
    key, value = (tensor.repeat_interleave(HEADS // KEY_HEADS, dim=1) for tensor in (key, value))
    scores = (query @ key.mT / 3).masked_fill(~sees, -torch.inf)
    every = torch.cat([scores, sinks[None, :, None, None].expand(*scores.shape[:3], 1)], -1)
    expected = (every.softmax(-1)[..., :-1] @ value).transpose(1, 2)
    (expected * weight).sum().backward()

    given = [tensor.detach().clone().requires_grad_() for tensor in (*exact, sinks)]
    layout = PackedLayout(batch, (window,), torch.device("cpu"), varlen=True, squares=squares)
    module = torch.nn.Module()
    module.layer_idx = 0
    found, _ = packed_attention(module, *given[:3], None, scaling=1 / 3, layout=layout, s_aux=given[3])
    (found * weight).sum().backward()
    assert not {"rectangles", "squared"} & set(vars(layout))
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)  # sums are in float32, as on a GPU
    for state, reference in zip(given, (*exact, sinks), strict=True):
        assert state.grad is not None
        torch.testing.assert_close(state.grad, reference.grad, atol=5e-6, rtol=1e-5)


@pytest.fixture
def make_with_sinks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., TorchEngine]:
    """Create a backend on a tiny gpt-oss with some settings."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model("gpt_oss", **ARCHITECTURES["gpt_oss"])
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path)
    return lambda **settings: TorchEngine(BackendSettings.of(str(tmp_path), **settings), DEVICE)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_engine_computes_the_same(make_with_sinks: Callable[..., TorchEngine], checkpointing: bool) -> None:
    sequences = random_sequences([3, 6, 9, 1, 2, 7, 12], (4, 6, 1))
    plain, found = (make_with_sinks(gradient_checkpointing=checkpointing) for _ in range(2))
    found._policy.varlen = True
    for engine in (plain, found):
        engine.accumulate(sequences, summed)
    np.testing.assert_allclose(found.score(sequences).logprobs, plain.score(sequences).logprobs, atol=1e-5)
    assert any(name.endswith("sinks") for name in gradients(plain))
    for name, gradient in gradients(plain).items():
        assert (gradients(found)[name] - gradient).abs().max() < 1e-5 * gradient.abs().max(), name


@pytest.mark.usefixtures("kernels")
def test_the_kernels_are_used_if_they_compute_the_same(
    make_with_sinks: Callable[..., TorchEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check computes with sinks, so that one left out, or with a wrong gradient, is noticed."""
    monkeypatch.setitem(torch_backend.VARLEN, DEVICE, True)
    engine = make_with_sinks(dtype="bfloat16")
    assert engine._policy.has_sinks
    assert engine._policy.varlen
    assert engine.slower_path is None

    def forgotten(out: Tensor, log_sums: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
        return out, log_sums

    def uncorrected(*given: Any) -> tuple[Tensor, Tensor, Tensor]:
        *states, log_sums, layout, window, scaling = given
        return backward(*states, log_sums - 0.5, layout, window, scaling)

    for name, wrong in (("add_sinks", forgotten), ("_backward", uncorrected)):
        with monkeypatch.context() as patch:
            patch.setattr(sink_attention, name, wrong)
            refused = make_with_sinks(dtype="bfloat16")
        assert not refused._policy.varlen
        assert refused.slower_path is not None
        assert "of the largest number" in refused.slower_path


@pytest.mark.parametrize("window", [0, 3])
def test_one_token_of_each_row_reads_its_pages(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The call of the paged kernel, in whose place the pages are gathered, against the plain path with sinks."""
    torch.manual_seed(0)
    table = PageTable(torch.tensor([[2, 0, 3], [1, 4, 4]], dtype=torch.int32), torch.tensor([11, 6]).int(), (window,))
    query = torch.randn(2, HEADS, 1, SIZE)
    keys, values = (torch.randn(5, 4, KEY_HEADS, SIZE) for _ in range(2))
    sinks = torch.randn(HEADS)

    def kernel(query: Tensor, keys: Tensor, values: Tensor, *_: Any, **options: Any) -> tuple[Tensor, Tensor]:
        assert options["return_aux"].lse
        outputs, sums = [], []
        for row, (pages, length) in enumerate(zip(options["block_table"], options["seqused_k"].tolist(), strict=True)):
            oldest = max(0, length - 1 - options["window_size"][0]) if options["window_size"][0] >= 0 else 0
            seen = [rows_first(pool[pages.long()].flatten(0, 1)[oldest:length], HEADS)[0] for pool in (keys, values)]
            scores = query[row][:, None] @ seen[0].mT * options["scale"]
            outputs.append((scores.softmax(-1) @ seen[1])[:, 0])
            sums.append(scores.logsumexp(-1)[:, 0])
        return torch.stack(outputs), torch.stack(sums, 1)

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", kernel)
    for given in (sinks, None):
        found = paged_attention._flash(query, keys, values, table, window, 0.4, given)
        expected = paged_attention.attend_pages(query, keys, values, table, window, 0.4, Softmax(sinks=given))
        torch.testing.assert_close(found, expected)
