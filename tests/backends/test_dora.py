"""DoRA: the gradient is that of PEFT's and mlx-lm's own layers, biases stay as they are, and what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from backends import registry
from backends.interface import BackendError, Sequences
from backends.settings import BackendSettings, Lora
from backends.torch.backend import TorchEngine
from tests.conformance.objectives import Linear

pytest.importorskip("mlx.core", reason="MLX is not installed")

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.tuner.dora import DoRALinear
from mlx_lm.utils import load_model, quantize_model, save_config, save_model

from backends.mlx.adapters import _Scaled
from backends.mlx.backend import MlxEngine
from tests.device import DEVICE

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # PEFT's own

VOCAB = 40
LORA = Lora(rank=3, scale=1.5, targets=("q_proj", "k_proj", "down_proj"), dora=True)
BACKENDS = [DEVICE, "mlx"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen2, of which some adapted projections have biases."""
    folder = tmp_path_factory.mktemp("base")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = AutoConfig.for_model("qwen2", vocab_size=VOCAB, num_key_value_heads=2, initializer_range=0.2, **sizes)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 1:
                weight.add_(0.3 * torch.randn_like(weight))
    model.save_pretrained(folder)
    return folder


def response() -> Sequences:
    ids = np.random.default_rng(0).integers(1, VOCAB, 12)
    return Sequences((ids[:2],), ids[2:], np.array([0, 10]))


@pytest.fixture(scope="module")
def adapter(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Adapters far from where they start: their magnitudes are no norms of the sums."""
    torch.manual_seed(1)
    config = peft.LoraConfig(r=3, lora_alpha=4.5, target_modules=[*LORA.targets], use_dora=True)
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_" in name:
                weight.add_(0.3 * torch.randn_like(weight))
    folder = tmp_path_factory.mktemp("adapter")
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", BACKENDS)
def test_the_gradient_is_that_of_peft(name: str, checkpointing: bool, base: Path, adapter: Path) -> None:
    """Autograd through PEFT's own layer in float64, of every matrix and magnitude."""
    sequences, slopes = response(), np.random.default_rng(2).normal(size=10)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64)
    opened = peft.PeftModel.from_pretrained(model, adapter, is_trainable=True, autocast_adapter_dtype=False).double()
    ids = torch.from_numpy(np.concatenate([sequences.prompts[0], sequences.tokens]))
    log = opened(ids[None]).logits[0].log_softmax(-1)[1:-1].gather(1, ids[2:, None])[:, 0]
    (log * torch.from_numpy(slopes)).sum().backward()
    expected = {}
    for path, weight in opened.named_parameters():
        if weight.grad is not None:
            path = path.removeprefix("base_model.model.").replace("lora_magnitude_vector.default.weight", "m")
            expected[path.replace("lora_A.default.weight", "lora_a").replace("lora_B.default.weight", "lora_b")] = (
                weight.grad.T if weight.ndim == 2 else weight.grad
            ).numpy()
    assert len(expected) == 2 * 3 * 3

    settings = BackendSettings.of(str(base), lora=LORA, adapter=str(adapter), gradient_checkpointing=checkpointing)
    engine = registry.create(name, settings)
    np.testing.assert_allclose(engine.score(sequences).logprobs, log.detach().numpy(), rtol=0, atol=1e-5)
    engine.accumulate(sequences, Linear(sequences.starts, slopes))
    found = gradient(engine)
    assert found.keys() == expected.keys()
    for path, known in expected.items():
        np.testing.assert_allclose(-found[path], known, rtol=0, atol=1e-5 * np.abs(known).max(), err_msg=path)


def gradient(engine: object) -> dict[str, np.ndarray]:
    """What an engine has added up, by mlx-lm's names and shapes."""
    if isinstance(engine, MlxEngine):
        return {path: np.array(part) for path, part in engine.optimizer.gradient.items()}
    assert isinstance(engine, TorchEngine)
    names = {"lora_A.default.weight": "lora_a", "lora_B.default.weight": "lora_b"}
    names["lora_magnitude_vector.default.weight"] = "m"
    found = {}
    for path, weight in engine._optimizer.weights.items():
        end = next(end for end in names if path.endswith(end))
        assert weight.grad is not None
        part = weight.grad.T if weight.ndim == 2 else weight.grad
        found[path.removeprefix("base_model.model.").replace(end, names[end])] = part.numpy()
    return found


@pytest.mark.parametrize("bits", [None, 4])
def test_one_layer_is_that_of_mlx_lm(bits: int | None) -> None:
    """Its value and gradients, bias and packed weights included; no gradient goes through the norms there either."""
    mx.random.seed(3)
    linear = nn.Linear(64, 32)
    layer = DoRALinear.from_base(
        linear if bits is None else nn.QuantizedLinear.from_linear(linear, 32, bits), 4, 0, 1.7
    )
    layer.lora_b, layer.m = 0.2 * mx.random.normal((4, 32)), layer.m * (1 + 0.3 * mx.random.normal((32,)))
    layer.linear.freeze()
    x, slopes = mx.random.normal((5, 64)), mx.random.normal((5, 32))

    def computed() -> dict[str, np.ndarray]:
        value, found = nn.value_and_grad(layer, lambda: (layer(x) * slopes).sum())()
        return {"value": np.array(value)} | {name: np.array(part) for name, part in tree_flatten(found)}

    expected = computed()
    assert expected.keys() == {"value", "lora_a", "lora_b", "m"}
    layer.__class__ = _Scaled
    layer.refresh_norms()
    for name, found in computed().items():
        np.testing.assert_allclose(
            found, expected[name], rtol=0, atol=1e-5 * np.abs(expected[name]).max(), err_msg=name
        )


@pytest.mark.parametrize("name", BACKENDS)
def test_a_merged_model_has_its_biases(name: str, base: Path, adapter: Path, tmp_path: Path) -> None:
    engine = registry.create(name, BackendSettings.of(str(base), lora=LORA, adapter=str(adapter)))
    engine.accumulate(response(), Linear(response().starts, np.ones(10)))
    engine.step(0.02)
    engine.export(tmp_path)
    alone = registry.create(DEVICE, BackendSettings.of(str(tmp_path))).score(response()).logprobs
    np.testing.assert_allclose(alone, engine.score(response()).logprobs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("four_bits", [False, True])
def test_products_in_bfloat16(four_bits: bool, base: Path, adapter: Path, tmp_path: Path) -> None:
    """As near to float32 as without adapters; the factor of a row is not rounded to 8 bits."""
    if four_bits:
        pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    gaps = {}
    for kind, (lora, start) in {"DoRA": (LORA, str(adapter)), "LoRA": (LORA.but(dora=False), None)}.items():
        scores = [
            registry.create(
                DEVICE,
                BackendSettings.of(str(base), dtype=dtype, lora=lora, adapter=start, load_in_4bit=four_bits),
            )
            .score(response())
            .logprobs
            for dtype in ("float32", "bfloat16")
        ]
        gaps[kind] = float(np.abs(scores[1] - scores[0]).mean())
    assert 0 < gaps["DoRA"] < 2 * gaps["LoRA"]


def test_an_engine_that_draws_gets_the_whole_model(base: Path, adapter: Path, tmp_path: Path) -> None:
    """vLLM knows no magnitudes."""
    engine = registry.create(DEVICE, BackendSettings.of(str(base), lora=LORA, adapter=str(adapter)))
    published = engine.publish(tmp_path)
    assert published.folder is not None
    alone = registry.create(DEVICE, BackendSettings.of(str(published.folder))).score(response()).logprobs
    np.testing.assert_allclose(alone, engine.score(response()).logprobs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", BACKENDS)
def test_a_row_of_zeros_is_refused(name: str, base: Path, tmp_path: Path) -> None:
    """PEFT and mlx-lm would compute 0/0."""
    weights = load_file(base / "model.safetensors")
    weights["model.layers.1.self_attn.k_proj.weight"][5] = 0
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_bytes((base / "config.json").read_bytes())
    with pytest.raises(
        BackendError, match=r"a row of 'model\.layers\.1\.self_attn\.k_proj' is 0; set model\.lora\.dora = false"
    ):
        registry.create(name, BackendSettings.of(str(tmp_path), lora=LORA))
    registry.create(name, BackendSettings.of(str(tmp_path), lora=LORA.but(dora=False)))


def test_bits_that_mlx_lm_cannot_open(base: Path, tmp_path: Path) -> None:
    model, config = quantize_model(*load_model(base), group_size=32, bits=6)
    save_model(tmp_path, model)
    save_config(config, tmp_path / "config.json")
    with pytest.raises(BackendError, match="6 bits; choose one of 4 or 8 bits, or train without it"):
        registry.create("mlx", BackendSettings.of(str(tmp_path), lora=LORA))
    registry.create("mlx", BackendSettings.of(str(tmp_path), lora=LORA.but(dora=False)))
