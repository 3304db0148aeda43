"""Attention with capped scores by flex attention.

Flex attention has no gradient on a processor, so the scores of the whole row take its place, with the same functions of
a score and of its place; its outputs are compared with flex attention's own.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from backends.batching import pack
from backends.interface import Sequences
from backends.settings import BackendSettings
from backends.torch import backend as torch_backend
from backends.torch import capped_attention, varlen_attention
from backends.torch.attention import PackedLayout, packed_attention
from backends.torch.backend import TorchEngine
from tests.backends.test_torch_attention import HEADS, KEY_HEADS, SIZE, packed
from tests.backends.test_torch_models import ARCHITECTURES
from tests.backends.torch_engine import gradients, random_sequences, summed
from tests.device import DEVICE

pytestmark = pytest.mark.skipif(DEVICE == "cuda", reason="the stand-in is for processors")
CAP = 1.5


def every_score(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Tensor],
    block_mask: BlockMask,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    """In place of flex attention."""
    exact = torch.promote_types(query.dtype, torch.float32)
    count = query.shape[1] // key.shape[1]
    assert enable_gqa == (count > 1)
    keys, values = (state.to(exact).repeat_interleave(count, 1) for state in (key, value))
    scores = query.to(exact) @ keys.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    size, none = scores.shape[-1], torch.tensor(0)
    seen = block_mask.mask_mod(none, none, torch.arange(size)[:, None], torch.arange(size)[None])
    scores = score_mod(scores, none, none, none, none).masked_fill(~seen, -torch.inf)
    return (scores.softmax(-1) @ values).to(query.dtype)


@pytest.fixture(autouse=True)
def _kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capped_attention, "_kernel", lambda: every_score)


@pytest.mark.parametrize("step", [1, 16])
@pytest.mark.parametrize("window", [0, 4, 6])
def test_outputs_and_gradients(window: int, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a softmax over explicit masks in float64, with grouped heads, ragged lengths and sliding windows."""
    monkeypatch.setattr(capped_attention, "STEP", step)
    batch, sees = packed()
    if window:
        positions = torch.from_numpy(batch.positions)
        sees &= positions[:, None] - positions < window
    torch.manual_seed(0)
    shapes = [(1, heads, len(batch.ids), SIZE) for heads in (HEADS, KEY_HEADS, KEY_HEADS)]
    exact = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    weight = torch.randn(1, len(batch.ids), HEADS, SIZE, dtype=torch.float64)
    query, key, value = exact
    key, value = (tensor.repeat_interleave(HEADS // KEY_HEADS, dim=1) for tensor in (key, value))
    scores = (CAP * torch.tanh(query @ key.mT / 3 / CAP)).masked_fill(~sees, -torch.inf)
    expected = (scores.softmax(-1) @ value).transpose(1, 2)
    (expected * weight).sum().backward()

    given = [tensor.detach().clone().requires_grad_() for tensor in exact]
    layout = PackedLayout(batch, (window,), torch.device("cpu"), varlen=True, squares=True)
    module = torch.nn.Module()
    module.layer_idx = 0
    found, _ = packed_attention(module, *given, None, scaling=1 / 3, layout=layout, softcap=CAP)
    (found * weight).sum().backward()
    assert not {"rectangles", "sequences", "squared"} & set(vars(layout))
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-12)
    for state, reference in zip(given, exact, strict=True):
        torch.testing.assert_close(state.grad, reference.grad, atol=1e-12, rtol=1e-12)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("window", [0, 4])
def test_flex_attention_is_called_as_it_expects(window: int) -> None:
    """Its own outputs, without compiling it, for a row of four blocks; some have no pair that counts."""
    prompts, lengths = (np.zeros(20, np.int64), np.zeros(140, np.int64)), np.array([150, 90, 60])
    starts = np.concatenate([[0], np.cumsum(lengths)])
    owners = tuple(prompts[each] for each in (0, 0, 1))
    batch = pack(Sequences(owners, np.zeros(starts[-1], np.int64), starts), [[0, 1], [2]])
    layout = capped_attention.FlexLayout.of(batch, torch.device("cpu"))
    assert len(layout.groups) == 512
    assert layout.mask(window).sparsity() > 40
    torch.manual_seed(0)
    states = [torch.randn(512, heads, SIZE)[None].transpose(1, 2) for heads in (HEADS, KEY_HEADS, KEY_HEADS)]
    given = {"score_mod": capped_attention._cap(CAP), "block_mask": layout.mask(window), "scale": 0.4}
    expected = every_score(*states, **given, enable_gqa=True)
    torch.testing.assert_close(flex_attention(*states, **given, enable_gqa=True), expected)


def test_layers_share_the_masks_of_their_windows() -> None:
    layout = PackedLayout(packed()[0], (0, 4), torch.device("cpu"), varlen=True)
    query = torch.randn(1, HEADS, len(layout.batch.ids), SIZE)
    masks = []
    for layer in (0, 1, 0, 1):
        module = torch.nn.Module()
        module.layer_idx = layer
        packed_attention(module, query, query, query, None, layout=layout, softcap=CAP)
        masks.append(layout.flex.mask(layout.windows[layer]))
    assert masks[0] is masks[2]
    assert masks[1] is masks[3]
    assert [*layout.flex.masks] == [0, 4]


@pytest.fixture
def make_capped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Callable[..., TorchEngine]:
    """Create a backend on a tiny Gemma 2 with some settings, whose scores reach the cap unless a test gives another."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    torch.manual_seed(0)
    cap = getattr(request, "param", ARCHITECTURES["gemma2"]["attn_logit_softcapping"])
    config = transformers.AutoConfig.for_model("gemma2", **{**ARCHITECTURES["gemma2"], "attn_logit_softcapping": cap})
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model.save_pretrained(tmp_path)
    return lambda **settings: TorchEngine(BackendSettings.of(str(tmp_path), **settings), DEVICE)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_engine_computes_the_same(make_capped: Callable[..., TorchEngine], checkpointing: bool) -> None:
    sequences = random_sequences([3, 6, 9, 1, 2, 7, 12], (4, 6, 1))
    plain, found = (make_capped(gradient_checkpointing=checkpointing) for _ in range(2))
    found._policy.varlen = True
    for engine in (plain, found):
        engine.accumulate(sequences, summed)
    np.testing.assert_allclose(found.score(sequences).logprobs, plain.score(sequences).logprobs, atol=1e-5)
    for name, gradient in gradients(plain).items():
        assert (gradients(found)[name] - gradient).abs().max() < 2e-5 * gradient.abs().max(), name


@pytest.mark.parametrize("make_capped", [50.0], indirect=True)
def test_it_is_used_if_it_computes_the_same(
    make_capped: Callable[..., TorchEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check computes with a cap that random scores reach; squares, which know none, are never asked for."""
    monkeypatch.setitem(torch_backend.VARLEN, DEVICE, True)
    monkeypatch.setattr(varlen_attention, "made_for_squares", lambda _: True)
    monkeypatch.setattr(varlen_attention, "attend_squares", None)
    engine = make_capped(dtype="bfloat16")
    assert engine._policy.varlen
    assert not engine._policy.squares
    assert engine.slower_path is None

    def refuse(*_: Any, **__: Any) -> Tensor:
        raise RuntimeError("no compiler\nhere")

    wrong: dict[str, tuple[str, Any]] = {
        "of the largest number": ("_cap", lambda limit: lambda score, *_: score),
        "cannot be used here (no compiler)": ("_kernel", lambda: refuse),
    }
    for why, (name, broken) in wrong.items():
        with monkeypatch.context() as patch:
            patch.setattr(capped_attention, name, broken)
            refused = make_capped(dtype="bfloat16")
        assert not refused._policy.varlen
        assert refused.slower_path is not None
        assert why in refused.slower_path
