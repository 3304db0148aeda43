"""Hybrid models on MLX, whose recurrences have kernels without a gradient on Metal; against transformers in torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

pytest.importorskip("mlx.core", reason="MLX is not installed")

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import gated_delta, qwen3_5

from backends.interface import Sequences
from backends.mlx.attention import CausalAttention
from backends.mlx.checkpointing import differentiable
from backends.mlx.recurrence import STEPS, DeltaRule
from tests.backends.mlx_engine import VOCAB, create
from tests.conformance.objectives import Linear

SHAPE: dict[str, Any] = {
    **{"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_experts": 0},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "linear_conv_kernel_dim": 4},
    **{"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
    **{"layer_types": ["linear_attention", "full_attention"], "mlp_only_layers": [], "tie_word_embeddings": False},
    **{"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0},
}


def hybrid(folder: Path) -> PreTrainedModel:
    """A tiny Qwen3.5 with a recurrent and an attention layer, written to ``folder``."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3_5_text", **SHAPE)).float()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" not in name and "A_log" not in name:
                weight.normal_(0, 0.2)
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "qwen3_5", "full_attention_interval": 2}  # mlx-lm reads this instead of the list of layers
    (folder / "config.json").write_text(json.dumps(config))
    return model


def two_responses(long: int) -> Sequences:
    rng = np.random.default_rng(0)
    prompts = (np.array([3, 4]), np.array([5]))
    return Sequences(prompts, rng.integers(1, VOCAB, 6 + long), np.array([0, 6, 6 + long]))


def test_gradient_is_that_of_torch(tmp_path: Path) -> None:
    """Of every weight; a response of more than one chunk and a shorter one, with checkpointed layers."""
    model = hybrid(tmp_path)
    sequences = two_responses(STEPS + 9)
    factors = np.random.default_rng(1).standard_normal(len(sequences.tokens))
    engine = create(tmp_path, gradient_checkpointing=True)
    found_logp = engine.score(sequences).logprobs
    engine.accumulate(sequences, Linear(sequences.starts, factors))
    total = torch.zeros(())
    for row, prompt in enumerate(sequences.prompts):
        ids = torch.from_numpy(np.concatenate([prompt, sequences.response(row)]))[None]
        logp = torch.log_softmax(model(ids[:, :-1]).logits, -1)[0].gather(-1, ids[0, 1:, None])[len(prompt) - 1 :, 0]
        span = slice(*sequences.starts[row : row + 2])
        np.testing.assert_allclose(found_logp[span], logp.detach().numpy(), rtol=0, atol=2e-5)
        total = total - (logp * torch.from_numpy(factors[span])).sum()
    total.backward()
    prefix = engine.policy.prefix
    for name, weight in model.named_parameters():
        assert weight.grad is not None
        expected = weight.grad.numpy()
        if name.endswith("conv1d.weight"):
            expected = np.moveaxis(expected, 2, 1)
        found = np.array(engine.optimizer.gradient[prefix + name])
        np.testing.assert_allclose(found, expected, rtol=0, atol=2e-4 * np.abs(expected).max(), err_msg=name)


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointed"])
def test_the_gradient_takes_no_kernel_that_has_none(
    checkpointing: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the device is: what the layer asks for is looked at, not what this build then does."""
    hybrid(tmp_path)
    engine, sequences = create(tmp_path, gradient_checkpointing=checkpointing), two_responses(4)
    update, asked = qwen3_5.gated_delta_update, []

    def watched(*arrays: Any, use_kernel: bool, **options: Any) -> Any:
        asked.append((use_kernel, isinstance(gated_delta.gated_delta_ops, DeltaRule)))
        return update(*arrays, use_kernel=use_kernel, **options)

    monkeypatch.setattr(qwen3_5, "gated_delta_update", watched)
    engine.score(sequences)
    assert set(asked) == {(True, False)}, "scoring needs no gradient and takes the fast kernel"
    asked.clear()
    engine.accumulate(sequences, Linear(sequences.starts, np.ones(len(sequences.tokens))))
    ahead = {(True, False)} if checkpointing else set()  # the forward that gives the head its values
    assert set(asked) - ahead == {(False, True)}
    asked.clear()
    engine.score(sequences)
    assert set(asked) == {(True, False)}, "and so it does afterwards"


def test_dropout_stays_off_and_everything_is_put_back() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.9)).eval()
    plain, ones = gated_delta.gated_delta_ops, mx.ones((2, 4))
    with differentiable(model, CausalAttention(fused=False), DeltaRule(fused=False)):
        assert model.layers[0].training
        np.testing.assert_array_equal(model(ones), model.layers[0](ones))
    assert not model.layers[0].training
    assert gated_delta.gated_delta_ops is plain
