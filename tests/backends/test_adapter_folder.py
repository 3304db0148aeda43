"""Adapters that either backend has trained open in PEFT and in mlx-lm, with the log-probabilities of the run."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from backends import registry
from backends.interface import BackendError, Sequences
from backends.settings import BackendSettings, Lora
from delta_cli.assets.random_model import write_qwen3
from tests.conformance.objectives import Linear
from tests.conformance.tiny_model import write_model

pytest.importorskip("mlx.core", reason="MLX is not installed")

import mlx.core as mx
from mlx_lm import fuse
from mlx_lm.utils import load_adapters, load_model

from tests.device import DEVICE

VOCAB = 40
# Not all targets in all layers, and ranks unlike any width: a missing transpose or factor shows.
LORA = {
    "all layers": Lora(rank=3, scale=1.5, targets=("q_proj", "down_proj")),
    "the last": Lora(rank=2, scale=4.0, targets=("v_proj", "gate_proj"), layers=1),
    "DoRA": Lora(rank=3, scale=1.5, targets=("q_proj", "down_proj"), layers=2, dora=True),
}


def one_response() -> Sequences:
    ids = np.random.default_rng(0).integers(1, VOCAB, 12)
    return Sequences((ids[:2],), ids[2:], np.array([0, 10]))


def logprobs(logits: np.ndarray) -> np.ndarray:
    """Of the response's tokens, from the logits of all, float64."""
    ids = np.random.default_rng(0).integers(1, VOCAB, 12)
    logits = logits.astype(np.float64)
    logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return logp[np.arange(1, 11), ids[2:]]


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # PEFT's own
@pytest.mark.filterwarnings("ignore:Unexpected keyword arguments .'fine_tune_type':UserWarning")  # mlx-lm's
@pytest.mark.parametrize("lora", LORA.values(), ids=LORA)
@pytest.mark.parametrize("name", [DEVICE, "mlx"])
def test_both_libraries_open_what_either_backend_writes(name: str, lora: Lora, tmp_path: Path) -> None:
    write_qwen3(tmp_path / "base", vocab_size=VOCAB, hidden=32, layers=3, head_dim=8, intermediate=64, scale=0.2)
    engine = registry.create(name, BackendSettings.of(str(tmp_path / "base"), lora=lora))
    sequences = one_response()
    before = engine.score(sequences).logprobs
    for _ in range(2):
        engine.accumulate(sequences, Linear(sequences.starts, np.ones(10)))
        engine.step(0.02)
    trained = engine.score(sequences).logprobs
    assert np.abs(trained - before).max() > 0.1
    engine.export(tmp_path / "model")
    engine.close()
    adapter = str(tmp_path / "model" / "adapter")
    ids = np.concatenate([sequences.prompts[0], sequences.tokens])

    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    opened = PeftModel.from_pretrained(base, adapter)
    with torch.no_grad():
        found = opened(torch.from_numpy(ids)[None]).logits[0].numpy()
    np.testing.assert_allclose(logprobs(found), trained, rtol=0, atol=1e-5)

    model = load_adapters(load_model(tmp_path / "base")[0], adapter)
    np.testing.assert_allclose(logprobs(np.array(model(mx.array(ids[None]))[0])), trained, rtol=0, atol=1e-5)

    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    with torch.no_grad():
        found = merged(torch.from_numpy(ids)[None]).logits[0].numpy()
    np.testing.assert_allclose(logprobs(found), trained, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", [DEVICE, "mlx"])
def test_more_layers_than_there_are(name: str, tmp_path: Path) -> None:
    write_qwen3(tmp_path, vocab_size=VOCAB, hidden=32, layers=2, head_dim=8, intermediate=64)
    with pytest.raises(BackendError, match=r"model\.lora\.layers = 3, but the model has 2; choose 1 to 2"):
        registry.create(name, BackendSettings.of(str(tmp_path), lora=Lora(layers=3)))


@pytest.mark.filterwarnings("ignore:Unexpected keyword arguments .'fine_tune_type':UserWarning")  # mlx-lm's
@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("name", [DEVICE, "mlx"])
def test_mlx_lm_fuses_them(name: str, dora: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = write_model(tmp_path / "base", tie=False)
    settings = Lora(rank=3, scale=1.5, targets=("q_proj", "down_proj"), dora=dora)
    engine = registry.create(name, BackendSettings.of(str(base), lora=settings))
    ids = np.random.default_rng(0).integers(1, 20, 12)
    sequences = Sequences((ids[:2],), ids[2:], np.array([0, 10]))
    for _ in range(2):
        engine.accumulate(sequences, Linear(sequences.starts, np.ones(10)))
        engine.step(0.02)
    trained = engine.score(sequences).logprobs
    engine.export(tmp_path / "model")
    engine.close()
    options = {"--model": base, "--adapter-path": tmp_path / "model" / "adapter", "--save-path": tmp_path / "fused"}
    monkeypatch.setattr(sys, "argv", ["fuse", *(str(part) for pair in options.items() for part in pair)])
    fuse.main()
    opened = registry.create(DEVICE, BackendSettings.of(str(tmp_path / "fused")))
    np.testing.assert_allclose(opened.score(sequences).logprobs, trained, rtol=0, atol=1e-5)
