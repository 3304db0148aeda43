"""Compiled rotary embeddings and feed-forwards: who gets them, the same numbers and gradients, and the way back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import Gemma2Config, GptOssConfig, LlamaConfig, Qwen3Config
from transformers.models.gemma2.modeling_gemma2 import Gemma2MLP
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssAttention
from transformers.models.llama.modeling_llama import LlamaMLP
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3MLP

from backends.interface import Floats, Ids, Sequences
from backends.settings import Lora
from backends.torch import backend as torch_backend
from backends.torch import compiled_layers
from backends.torch.backend import TorchEngine
from backends.torch.compiled_layers import compile_layers
from tests.device import DEVICE

SIZES = {"hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The functions that would have run compiled, by name; nothing is compiled."""
    names: list[str] = []

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *given: (names.append(function.__name__), function(*given))[1]

    monkeypatch.setattr(compiled_layers, "compile_dynamic", counted)
    _forget()
    yield names
    _forget()


def _forget() -> None:
    for cached in (compiled_layers.fused, compiled_layers._with_compiled_rotary):
        cached.cache_clear()


@pytest.fixture
def sequences() -> Sequences:
    rng = np.random.default_rng(0)
    lengths = [3, 6, 9]
    starts = np.concatenate([[0], np.cumsum(lengths)])
    return Sequences((rng.integers(1, 31, 4),) * 3, rng.integers(0, 31, sum(lengths)), starts)


class Summed:
    """The loss Σ logp_t."""

    def __call__(self, logp: Floats, rows: Ids) -> tuple[float, Floats]:
        return float(logp.sum()), np.ones(len(logp))

    def restart(self) -> None: ...


class Scaled(Qwen3MLP):  # type: ignore[misc]
    """A feed-forward with a factor of its own."""

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = 0.5 * super().forward(x)
        return found


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (Qwen3MLP(Qwen3Config(**SIZES)), "gated"),
        (LlamaMLP(LlamaConfig(**SIZES, mlp_bias=True)), "gated"),
        (Gemma2MLP(Gemma2Config(**SIZES)), "gated"),
        (Qwen3Attention(Qwen3Config(**SIZES), 0), "apply_rotary_pos_emb"),
        (GptOssAttention(GptOssConfig(**SIZES), 0), "apply_rotary_pos_emb"),
        (Scaled(Qwen3Config(**SIZES)), None),
        (nn.Linear(8, 8), None),
    ],
)
def test_modules_that_get_compiled_functions_compute_the_same(module: Any, name: str | None, calls: list[str]) -> None:
    """The plain module is the oracle; a single token, which is a decoding step, stays plain."""
    module = module.double()
    hidden, angles = torch.randn(1, 5, 8, dtype=torch.float64), torch.randn(1, 5, 4, dtype=torch.float64)
    angles = angles[..., :2] if "GptOss" in type(module).__name__ else angles

    def run(tokens: int) -> Tensor:
        if not hasattr(module, "q_proj"):
            found: Tensor = module(hidden[:, :tokens])
        else:
            cos, sin = angles.cos()[:, :tokens], angles.sin()[:, :tokens]
            found = module(hidden[:, :tokens], position_embeddings=(cos, sin), attention_mask=None)[0]
        return found

    expected = run(5), run(1)
    assert compile_layers(nn.Sequential(module), torch.device("cpu"), torch.float64) is None
    calls.clear()
    assert torch.equal(run(1), expected[1])
    assert calls == []
    assert torch.equal(run(5), expected[0])
    assert calls == ([name] if name else [])


def test_bfloat16_policies_use_them_and_others_do_not(
    make: Callable[..., TorchEngine], sequences: Sequences, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the reference policy, and not for adapters; a plain function leaves every number what it was."""
    expected = make(dtype="bfloat16").score(sequences).logprobs
    monkeypatch.setitem(torch_backend.COMPILED, DEVICE, True)
    for keys in ({}, {"dtype": "bfloat16", "lora": Lora(rank=2, targets=("q_proj",))}):
        make(**keys).score(sequences)
    assert calls == []
    engine = make(dtype="bfloat16", keep_reference=True, gradient_checkpointing=True)
    calls.clear()
    np.testing.assert_array_equal(engine.score(sequences).logprobs, expected)
    assert sorted(calls) == ["apply_rotary_pos_emb"] * 2 + ["gated"] * 2
    np.testing.assert_array_equal(engine.reference(sequences), expected)
    engine.accumulate(sequences, Summed())
    assert engine.slower_path is None


@pytest.mark.parametrize(
    ("fault", "why"),
    [(1.5, "off by 0.5 of the largest number"), ("no compiler\nfound", "cannot be compiled here (no compiler)")],
)
def test_a_compiler_that_fails_or_computes_otherwise_is_not_used(
    fault: Any,
    why: str,
    make: Callable[..., TorchEngine],
    sequences: Sequences,
    calls: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*given: Tensor) -> Any:
            if isinstance(fault, str):
                raise RuntimeError(fault)
            found = function(*given)
            return tuple(fault * each for each in found) if isinstance(found, tuple) else fault * found

        return run

    expected = make(dtype="bfloat16").score(sequences).logprobs
    monkeypatch.setattr(compiled_layers, "compile_dynamic", broken)
    monkeypatch.setitem(torch_backend.COMPILED, DEVICE, True)
    engine = make(dtype="bfloat16")
    assert engine.slower_path is not None
    assert why in engine.slower_path
    np.testing.assert_array_equal(engine.score(sequences).logprobs, expected)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # by the compiler, which asks for it
def test_pytorch_can_compile_them(
    make: Callable[..., TorchEngine], sequences: Sequences, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Traced with any number of tokens, with and without gradients and checkpoints, run without generated code."""
    monkeypatch.setitem(torch_backend.COMPILED, DEVICE, True)
    expected = make(dtype="bfloat16", gradient_checkpointing=True)
    _forget()
    monkeypatch.setattr(
        compiled_layers, "compile_dynamic", lambda function: torch.compile(function, dynamic=True, backend="aot_eager")
    )
    engine = make(dtype="bfloat16", gradient_checkpointing=True)
    assert engine.slower_path is None
    for each in (expected, engine):
        each.score(sequences)
        each.accumulate(sequences, Summed())
    np.testing.assert_array_equal(engine.score(sequences).logprobs, expected.score(sequences).logprobs)
    for name, weight in expected._optimizer.weights.items():
        assert torch.equal(engine._optimizer.weights[name].grad, weight.grad), name
