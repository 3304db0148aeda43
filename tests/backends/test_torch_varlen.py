"""Attention over sequences of any lengths: its layout against the definition, the engine with it, and the check.

The kernel needs a GPU; on a processor a loop over the sequences takes its place.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from backends.interface import Sequences
from backends.torch import backend as torch_backend
from backends.torch import varlen_attention
from backends.torch.attention import PackedLayout, packed_attention
from backends.torch.backend import TorchEngine
from backends.torch.varlen_attention import SquareLayout, VarlenLayout
from tests.backends.test_torch_attention import HEADS, KEY_HEADS, SIZE, packed
from tests.backends.torch_engine import gradients, random_sequences, summed
from tests.device import DEVICE


def loop(
    query: Tensor, keys: Tensor, values: Tensor, layout: VarlenLayout, window: int, scaling: float | None
) -> Tensor:
    """What the kernel computes: the last query of a sequence sees up to its last key."""
    ends: list[list[int]] = [starts.tolist() for starts in (layout.query_starts, layout.key_starts)]
    outputs = []
    exact = torch.promote_types(query.dtype, torch.float32)
    given, query, keys, values = query.dtype, query.to(exact), keys.to(exact), values.to(exact)
    for queries, seen in zip(*(pairwise(each) for each in ends), strict=True):
        assert 0 < queries[1] - queries[0] <= layout.most_queries
        assert seen[1] - seen[0] <= layout.most_keys
        rows = query[slice(*queries)].transpose(0, 1)
        count = query.shape[1] // keys.shape[1]
        key, value = (part[slice(*seen)].transpose(0, 1).repeat_interleave(count, 0) for part in (keys, values))
        scores = rows @ key.mT * (query.shape[-1] ** -0.5 if scaling is None else scaling)
        ages = torch.arange(rows.shape[1])[:, None] + key.shape[1] - rows.shape[1] - torch.arange(key.shape[1])
        hidden = (ages < 0) | (ages >= window) if window else ages < 0
        outputs.append((scores.masked_fill(hidden.to(scores.device), -torch.inf).softmax(-1) @ value).transpose(0, 1))
    return torch.cat(outputs).to(given)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor computes what the kernel would."""
    if DEVICE == "cpu":
        monkeypatch.setattr(varlen_attention, "_kernel", loop)


@pytest.mark.parametrize(("window", "squares"), [(None, 0), (4, 0), (6, 0), (None, 1), (None, 8), (None, 99), (4, 8)])
def test_outputs_and_gradients(window: int | None, squares: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a softmax over explicit masks in float64, with grouped heads, ragged lengths and sliding windows.

    Squares are all sequences, those of at least eight tokens, or none; with a window none either.
    """
    monkeypatch.setattr(varlen_attention, "_kernel", loop)
    monkeypatch.setattr(varlen_attention, "SQUARE", squares)
    monkeypatch.setattr(varlen_attention, "SQUARE_STEP", 5)
    batch, sees = packed()
    if window:
        positions = torch.from_numpy(batch.positions)
        sees &= positions[:, None] - positions < window
    torch.manual_seed(0)
    shapes = [(1, heads, len(batch.ids), SIZE) for heads in (HEADS, KEY_HEADS, KEY_HEADS)]
    exact = [torch.randn(shape, dtype=torch.float64, device=DEVICE, requires_grad=True) for shape in shapes]
    weight = torch.randn(1, len(batch.ids), HEADS, SIZE, dtype=torch.float64, device=DEVICE)
    query, key, value = exact
    key, value = (tensor.repeat_interleave(HEADS // KEY_HEADS, dim=1) for tensor in (key, value))
    scores = (query @ key.mT / 3).masked_fill(~sees.to(DEVICE), -torch.inf)
    expected = (scores.softmax(-1) @ value).transpose(1, 2)
    (expected * weight).sum().backward()

    given = [tensor.detach().clone().requires_grad_() for tensor in exact]
    layout = PackedLayout(batch, (0, window or 0), torch.device(DEVICE), varlen=True, squares=squares > 0)
    module = torch.nn.Module()
    module.layer_idx = 1
    found, _ = packed_attention(module, *given, None, scaling=1 / 3, layout=layout)
    (found * weight).sum().backward()
    assert "rectangles" not in vars(layout)
    assert ("squared" in vars(layout)) == (squares > 0 and not window)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-12)
    for state, reference in zip(given, exact, strict=True):
        torch.testing.assert_close(state.grad, reference.grad, atol=1e-12, rtol=1e-12)


def test_a_prompt_is_kept_once_and_nothing_is_padded() -> None:
    batch, _ = packed()
    layout = VarlenLayout.of(batch, torch.device("cpu"))
    assert int(layout.query_starts[-1]) == len(batch.ids), "every token asks once"
    groups = [(group.prompt, group.responses[group.responses > 0]) for group in batch.groups]
    assert len(layout.query_starts) - 1 == sum(1 + len(responses) for _, responses in groups)
    expected = sum(prompt + int((prompt + responses).sum()) for prompt, responses in groups)
    assert len(layout.keys) == int(layout.key_starts[-1]) == expected


def test_only_long_sequences_are_squares_padded_to_few_widths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Written down by hand from the lengths of the packed row, whose responses lack their last token."""
    monkeypatch.setattr(varlen_attention, "SQUARE", 8)
    monkeypatch.setattr(varlen_attention, "SQUARE_STEP", 5)
    layout = SquareLayout.of(packed()[0], torch.device("cpu"))
    assert layout.sizes == [5, 8, 1, 6, 2, 1, 3, 7, 3, 11, 10, 9, 1]
    assert layout.prompts == [None, 0, 0, 0, 0, None, 5, None, None, 8, 8, 8, 8]
    assert layout.widths == [0, 15, 0, 15, 0, 0, 0, 0, 0, 15, 15, 15, 0]
    assert layout.short is not None
    assert layout.short.query_starts.diff().tolist() == [5, 1, 2, 1, 3, 7, 3, 1]


@pytest.mark.parametrize(("variants", "size"), [({"softcap": 5.0, "s_aux": torch.ones(HEADS)}, SIZE), ({}, 6)])
def test_what_the_kernels_do_not_take_is_computed_in_rectangles(variants: dict[str, Any], size: int) -> None:
    """Capped scores with sinks, and values of another size than the queries."""
    batch, _ = packed()
    torch.manual_seed(0)
    query, key = (torch.randn(1, heads, len(batch.ids), SIZE, device=DEVICE) for heads in (HEADS, KEY_HEADS))
    value = torch.randn(1, KEY_HEADS, len(batch.ids), size, device=DEVICE)
    outputs = []
    for varlen in (True, False):
        layout = PackedLayout(batch, (0,), torch.device(DEVICE), varlen=varlen)
        module = torch.nn.Module()
        module.layer_idx = 0
        outputs.append(packed_attention(module, query, key, value, None, layout=layout, **variants)[0])
        assert "sequences" not in vars(layout)
    assert torch.equal(*outputs)


# ------------------------------------------------------------------------------------------- engine


@pytest.fixture
def sequences() -> Sequences:
    """Seven responses of different lengths to three prompts."""
    return random_sequences([3, 6, 9, 1, 2, 7, 12], (4, 6, 1))


@pytest.mark.skipif(DEVICE == "cuda", reason="the kernel takes no float32")
@pytest.mark.parametrize(("checkpointing", "squares"), [(False, False), (True, False), (True, True)])
def test_the_engine_computes_the_same(
    make: Callable[..., TorchEngine],
    kernel: None,
    sequences: Sequences,
    checkpointing: bool,
    squares: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(varlen_attention, "SQUARE", 9)
    plain, found = (make(gradient_checkpointing=checkpointing, micro_batch_tokens=40) for _ in range(2))
    found._policy.varlen, found._policy.squares = True, squares
    for engine in (plain, found):
        engine.accumulate(sequences, summed)
    scored, expected = found.score(sequences), plain.score(sequences)
    np.testing.assert_allclose(scored.logprobs, expected.logprobs, atol=2e-6)
    for name, gradient in gradients(plain).items():
        assert (gradients(found)[name] - gradient).abs().max() < 1e-5 * gradient.abs().max(), name


def test_the_kernel_is_used_if_it_computes_the_same(
    make: Callable[..., TorchEngine], kernel: None, sequences: Sequences, monkeypatch: pytest.MonkeyPatch
) -> None:
    """bfloat16 only, which the kernel takes; the reference policy too; otherwise with a line that says why not."""
    monkeypatch.setitem(torch_backend.VARLEN, DEVICE, True)
    assert not make()._policy.varlen
    engine = make(dtype="bfloat16", keep_reference=True)
    assert engine._policy.varlen
    assert engine.slower_path is None
    np.testing.assert_array_equal(engine.reference(sequences), engine.score(sequences).logprobs)

    used = varlen_attention._kernel

    def refuse(*_: Any) -> Tensor:
        raise NotImplementedError("no such kernel\nin this build")

    class WrongGradient(torch.autograd.Function):
        @staticmethod
        def forward(_: Any, out: Tensor) -> Tensor:
            return out.clone()

        @staticmethod
        def backward(_: Any, gradient: Tensor) -> Tensor:
            return 1.1 * gradient

    for wrong, why in (
        (refuse, "cannot be used here (no such kernel)"),
        (lambda *given: 1.1 * used(*given), "off by 0.1 of the largest"),
        (lambda *given: WrongGradient.apply(used(*given)), "off by 0.1 of the largest"),
    ):
        monkeypatch.setattr(varlen_attention, "_kernel", wrong)
        refused = make(dtype="bfloat16", keep_reference=True)
        assert not refused._policy.varlen
        assert refused.slower_path is not None
        assert "pads responses to equal lengths" in refused.slower_path
        assert why in refused.slower_path
        refused.score(sequences)


def test_squares_are_used_on_gpus_made_for_them_if_they_are_right(
    make: Callable[..., TorchEngine], kernel: None, sequences: Sequences, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not with run.deterministic, for which cuDNN has no backward pass; a wrong kernel leaves the flash kernel."""
    monkeypatch.setitem(torch_backend.VARLEN, DEVICE, True)
    monkeypatch.setattr(varlen_attention, "SQUARE", 320)
    monkeypatch.setattr(varlen_attention, "SQUARE_STEP", 64)
    used = varlen_attention._square_kernel
    made, wrong = [False, True, True, True], [1.0, 1.0, 1.0, 1.1]
    found = []
    for for_squares, factor, deterministic in zip(made, wrong, [False, False, True, False], strict=True):
        monkeypatch.setattr(varlen_attention, "made_for_squares", lambda _, made=for_squares: made)
        monkeypatch.setattr(varlen_attention, "_square_kernel", lambda *given, factor=factor: factor * used(*given))
        engine = make(dtype="bfloat16", keep_reference=True, deterministic=deterministic)
        np.testing.assert_array_equal(engine.reference(sequences), engine.score(sequences).logprobs)
        assert engine._policy.varlen
        found.append((engine._policy.squares, engine.slower_path))
    assert [squares for squares, _ in found] == [False, True, False, False]
    *others, why = [line for _, line in found]
    assert others == [None] * 3
    assert why is not None
    assert why.startswith("long sequences take FlashAttention 2: for cuDNN's attention, its result is off by 0.0")


def test_memory_that_runs_out_during_the_check_is_no_fault_of_the_kernel(
    make: Callable[..., TorchEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    policy = make(dtype="bfloat16")._policy
    monkeypatch.setattr(varlen_attention, "_kernel", fail)
    with pytest.raises(torch.OutOfMemoryError):
        varlen_attention.kernel_fault(policy)
