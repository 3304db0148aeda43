"""Norms as one kernel: the same numbers and gradients, and only for modules that are an RMS norm."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from backends.interface import Sequences
from backends.settings import Lora
from backends.torch import backend as torch_backend
from backends.torch.backend import TorchEngine
from backends.torch.fused_norms import fuse_norms
from tests.backends.torch_engine import gradients, random_sequences, summed
from tests.device import DEVICE


@pytest.fixture
def sequences() -> Sequences:
    return random_sequences([3, 6, 9], (4,))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_norm_and_its_gradients(dtype: torch.dtype) -> None:
    """Against x / sqrt(mean x² + ε) · w in float64, differentiated by hand."""
    rng = np.random.default_rng(0)
    x, w, slope = (torch.from_numpy(rng.normal(size=shape)).to(dtype) for shape in ((5, 16), (16,), (5, 16)))
    module = Qwen3RMSNorm(16, eps=1e-3).to(DEVICE, dtype)
    with torch.no_grad():
        module.weight.copy_(w)
    assert fuse_norms(nn.Sequential(module)) == 1
    given = x.to(DEVICE).requires_grad_()
    out = module(given)
    out.backward(slope.to(DEVICE))
    x, w, slope = (array.detach().double().cpu().numpy() for array in (x, w, slope))
    scale = 1 / np.sqrt((x**2).mean(1, keepdims=True) + 1e-3)
    pulled = slope * w
    of_given = scale * pulled - x * scale**3 * (pulled * x).mean(1, keepdims=True)
    near = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float64 else {"atol": 0.02, "rtol": 0.01}
    for found, expected in (
        (out, x * scale * w),
        (given.grad, of_given),
        (module.weight.grad, (slope * x * scale).sum(0)),
    ):
        assert found is not None
        np.testing.assert_allclose(found.detach().cpu().double().numpy(), expected, **near)


class TwoInputs(Qwen3RMSNorm):  # type: ignore[misc]
    """A norm with a gate."""

    def forward(self, hidden_states: Tensor, gate: Tensor | None = None) -> Tensor:
        found: Tensor = super().forward(hidden_states)
        return found if gate is None else found * gate


@pytest.mark.parametrize("module", [GemmaRMSNorm(16), TwoInputs(16), nn.LayerNorm(16), nn.Linear(16, 16)])
def test_other_modules_stay_what_they_are(module: nn.Module) -> None:
    before = module.forward
    assert fuse_norms(nn.Sequential(module.to(torch.bfloat16))) == 0
    assert module.forward == before


def test_the_engine_computes_the_same_but_for_rounding(
    make: Callable[..., TorchEngine], sequences: Sequences, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32, where rounding is small; every norm of two layers is one: four in each, and the last."""
    monkeypatch.setitem(torch_backend.FUSED, DEVICE, False)
    plain, fused = make(), make()
    assert fuse_norms(fused._policy.causal) == 2 * 4 + 1
    np.testing.assert_allclose(fused.score(sequences).logprobs, plain.score(sequences).logprobs, atol=3e-6)
    for engine in (plain, fused):
        engine.accumulate(sequences, summed)
    found = gradients(fused)
    for name, expected in gradients(plain).items():
        assert (found[name] - expected).abs().max() < 1e-5 * expected.abs().max(), name


def test_bfloat16_policies_use_them_and_others_do_not(
    make: Callable[..., TorchEngine], sequences: Sequences, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(torch_backend.FUSED, DEVICE, True)

    def fused(engine: TorchEngine) -> bool:
        return "forward" in vars(engine._policy.causal.base_model.norm)

    lora = Lora(rank=2, targets=("q_proj",))
    assert [fused(make(**keys)) for keys in ({}, {"dtype": "bfloat16", "lora": lora})] == [False, False]
    engine = make(dtype="bfloat16", keep_reference=True)
    assert fused(engine)
    np.testing.assert_array_equal(engine.reference(sequences), engine.score(sequences).logprobs)
