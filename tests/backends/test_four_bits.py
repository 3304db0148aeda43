"""Adapters on a base of 4 bits: what is computed, what is exported, where it opens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from backends import registry
from backends.collective import Solo
from backends.interface import BackendError, Engine, Proxy, RolloutRequest, Sampling, Sequences
from backends.settings import BackendSettings, Lora
from backends.torch import four_bits
from backends.torch.backend import TorchEngine
from delta_cli.assets.random_model import write_qwen3
from tests.conformance.objectives import Linear

pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
pytest.importorskip("mlx.core", reason="MLX is not installed")

import mlx.core as mx
from mlx_lm.utils import dequantize_model, load_adapters, load_model, quantize_model, save_config, save_model

from tests.device import DEVICE

pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),  # PEFT's own
    pytest.mark.filterwarnings("ignore:Unexpected keyword arguments .'fine_tune_type':UserWarning"),  # mlx-lm's
]

VOCAB = 70
LORA = Lora(rank=3, scale=1.5, targets=("q_proj", "down_proj"))
DORA = LORA.but(dora=True)
TOLERANCE = 1e-4  # nats


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    write_qwen3(folder, vocab_size=VOCAB, hidden=64, layers=2, head_dim=16, intermediate=128, scale=0.2, tie=False)
    return folder


def make(name: str, folder: Path, **settings: Any) -> Engine:
    return registry.create(name, BackendSettings.of(str(folder), **{"lora": LORA, "load_in_4bit": True} | settings))


def response() -> Sequences:
    ids = np.random.default_rng(0).integers(1, VOCAB, 12)
    return Sequences((ids[:2],), ids[2:], np.array([0, 10]))


def logprobs(model: Any) -> np.ndarray:
    """Of the response's tokens under a model of transformers or of mlx-lm."""
    ids = np.concatenate([response().prompts[0], response().tokens])
    if isinstance(model, torch.nn.Module):
        with torch.no_grad():
            logits = model(torch.from_numpy(ids)[None].to(model.device)).logits[0].double().cpu().numpy()
    else:
        logits = np.array(model(mx.array(ids[None]))[0].astype(mx.float32)).astype(np.float64)
    logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return logp[np.arange(1, 11), ids[2:]]


def train(engine: Engine) -> np.ndarray:
    """A few updates; the log-probabilities after them."""
    before = engine.score(response()).logprobs
    for _ in range(3):
        engine.accumulate(response(), Linear(response().starts, np.ones(10)))
        assert engine.step(0.02) > 0
    after = engine.score(response()).logprobs
    assert np.abs(after - before).max() > 0.1
    return after


def dequantised(engine: Engine, base: Path, out: Path) -> Path:
    """The engine's base in float32 as a folder of transformers: what its 4 bits mean."""
    assert isinstance(engine, TorchEngine)
    weights = {
        name.replace(".base_layer", ""): four_bits.unpacked(weight).detach().float().contiguous()
        for name, weight in engine._policy.causal.named_parameters()
        if "lora_" not in name
    }
    out.mkdir()
    save_file(weights, out / "model.safetensors", {"format": "pt"})
    (out / "config.json").write_bytes((base / "config.json").read_bytes())
    return out


@pytest.mark.parametrize("lora", [LORA, DORA], ids=["LoRA", "DoRA"])
def test_every_number_is_that_of_the_dequantised_base(lora: Lora, folder: Path, tmp_path: Path) -> None:
    """Scores, features, gradient and drawing of an engine that was given the same numbers in float32."""
    packed = make(DEVICE, folder, lora=lora)
    plain = make(DEVICE, dequantised(packed, folder, tmp_path / "plain"), load_in_4bit=False, lora=lora)
    whole = make(DEVICE, folder, load_in_4bit=False, lora=lora)
    assert packed.parameters == plain.parameters
    assert packed.trainable == plain.trainable
    for engine in (packed, plain):
        engine.accumulate(response(), Linear(response().starts, np.ones(10)))
    np.testing.assert_allclose(packed.step(0.02), plain.step(0.02), rtol=1e-4)
    found, known = (engine.score(response(), Proxy("hidden_exact")) for engine in (packed, plain))
    np.testing.assert_allclose(found.logprobs, known.logprobs, rtol=0, atol=TOLERANCE)
    assert np.abs(known.logprobs - whole.score(response()).logprobs).max() > 100 * TOLERANCE, "4 bits show"
    direction = np.random.default_rng(1).normal(size=64)
    assert found.features is not None
    assert known.features is not None
    projected = known.features.project(direction)
    np.testing.assert_allclose(found.features.project(direction), projected, rtol=0, atol=1e-4 * abs(projected).max())
    request = RolloutRequest(response().prompts, Sampling(max_tokens=6, stop_ids=(), samples=3))
    drawn = packed.rollout(request)
    scored = packed.score(Sequences(response().prompts * 3, drawn.tokens, drawn.starts)).logprobs
    np.testing.assert_allclose(drawn.logprobs, scored, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("lora", [LORA, DORA], ids=["LoRA", "DoRA"])
def test_adapters_of_torch_open_everywhere(lora: Lora, folder: Path, tmp_path: Path) -> None:
    """In PEFT on the same 4 bits, in mlx-lm and PEFT on what they mean, and the merged model by itself."""
    engine = make(DEVICE, folder, lora=lora)
    trained = train(engine)
    engine.export(tmp_path / "model")
    adapter = str(tmp_path / "model" / "adapter")
    plain = dequantised(engine, folder, tmp_path / "plain")
    packing = four_bits.quantization_config(torch.float32)
    base = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, quantization_config=packing, device_map={"": DEVICE}
    )
    packed = PeftModel.from_pretrained(base, adapter)
    four_bits.keep_differentiable(packed)  # the kernel for inference on some processors computes in bfloat16
    models = {
        "PEFT, 4 bits": packed,
        "PEFT": PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32), adapter),
        "mlx-lm": load_adapters(load_model(plain)[0], adapter),
        "merged": AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32),
        "merged, mlx-lm": load_model(tmp_path / "model")[0],
    }
    for name, model in models.items():
        np.testing.assert_allclose(logprobs(model), trained, rtol=0, atol=TOLERANCE, err_msg=name)


@pytest.mark.parametrize("lora", [LORA, DORA], ids=["LoRA", "DoRA"])
@pytest.mark.parametrize("quantised_before", [True, False])
def test_adapters_of_mlx_open_everywhere(quantised_before: bool, lora: Lora, folder: Path, tmp_path: Path) -> None:
    """The same of mlx, on a base that came in 4 bits or was quantised as it was loaded."""
    model, config = quantize_model(*load_model(folder), group_size=64, bits=4)
    save_model(tmp_path / "packed", model)
    save_config(config, tmp_path / "packed" / "config.json")
    base = tmp_path / "packed" if quantised_before else folder
    engine = make("mlx", base, load_in_4bit=not quantised_before, lora=lora)
    trained = train(engine)
    engine.export(tmp_path / "model")
    adapter = str(tmp_path / "model" / "adapter")
    save_model(tmp_path / "plain", dequantize_model(load_model(tmp_path / "packed")[0]))
    (tmp_path / "plain" / "config.json").write_bytes((folder / "config.json").read_bytes())
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.float32)
    models = {
        "mlx-lm, 4 bits": load_adapters(load_model(tmp_path / "packed")[0], adapter),
        "PEFT": PeftModel.from_pretrained(plain, adapter),
        "merged": load_model(tmp_path / "model")[0],
    }
    for name, opened in models.items():
        np.testing.assert_allclose(logprobs(opened), trained, rtol=0, atol=TOLERANCE, err_msg=name)


class Two(Solo):
    """The first of two processes."""

    size = 2


def test_several_processes_are_refused(folder: Path) -> None:
    settings = BackendSettings.of(str(folder), lora=LORA, load_in_4bit=True)
    with pytest.raises(BackendError, match=r"load_in_4bit.*set parallel\.processes = 1"):
        registry.create(DEVICE, settings, Two())


def test_without_the_library(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("backends.torch.four_bits.find_spec", lambda name: None)
    with pytest.raises(BackendError, match=r"needs bitsandbytes.*pip install 'delta-rlvr\[quantised\]'"):
        make(DEVICE, folder)
