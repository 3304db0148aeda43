"""Runs that start from adapters: of PEFT's format or mlx-lm's, by either backend, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from backends import registry
from backends.interface import BackendError, Engine, Sequences
from backends.settings import BackendSettings, Lora
from delta_cli.assets.random_model import write_qwen3
from tests.conformance.objectives import Linear

pytest.importorskip("mlx.core", reason="MLX is not installed")

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.tuner.utils import linear_to_lora_layers
from mlx_lm.utils import load_model

from tests.device import DEVICE

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # PEFT's own

VOCAB, RANK, SCALE = 40, 3, 1.5
TARGETS = ("q_proj", "down_proj")
BACKENDS = [DEVICE, "mlx"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    write_qwen3(folder, vocab_size=VOCAB, hidden=32, layers=3, head_dim=8, intermediate=64, scale=0.2)
    return folder


def response() -> Sequences:
    ids = np.random.default_rng(0).integers(1, VOCAB, 12)
    return Sequences((ids[:2],), ids[2:], np.array([0, 10]))


def logprobs(logits: np.ndarray) -> np.ndarray:
    """Of the response's tokens, from the logits of all, float64."""
    logits = logits.astype(np.float64)
    logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return logp[np.arange(1, 11), response().tokens]


def ids() -> np.ndarray:
    return np.concatenate([response().prompts[0], response().tokens])


@pytest.fixture(scope="module", params=[False, True], ids=["LoRA", "DoRA"])
def dora(request: pytest.FixtureRequest) -> bool:
    """Whether the adapters have magnitudes."""
    return bool(request.param)


@pytest.fixture(scope="module")
def of_peft(dora: bool, base: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, np.ndarray]:
    """Adapters on the last two layers as PEFT writes them, and the log-probabilities under them by PEFT."""
    torch.manual_seed(0)
    config = peft.LoraConfig(
        r=RANK, lora_alpha=SCALE * RANK, target_modules=[*TARGETS], layers_to_transform=[1, 2], use_dora=dora
    )
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_" in name:
                weight.copy_(0.3 * torch.randn_like(weight))
        known = logprobs(model(torch.from_numpy(ids())[None]).logits[0].numpy())
    folder = tmp_path_factory.mktemp("peft")
    model.save_pretrained(folder)
    return folder, known


@pytest.fixture(scope="module")
def of_mlx(dora: bool, base: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, np.ndarray]:
    """The same as mlx-lm writes and computes them."""
    mx.random.seed(0)
    model, _ = load_model(base)
    parameters = {"rank": RANK, "scale": SCALE, "dropout": 0.0, "keys": ["self_attn.q_proj", "mlp.down_proj"]}
    model.freeze()
    linear_to_lora_layers(model, 2, parameters, use_dora=dora)
    trained = {name: 0.3 * mx.random.normal(value.shape) for name, value in tree_flatten(model.trainable_parameters())}
    model.load_weights(list(trained.items()), strict=False)
    known = logprobs(np.array(model(mx.array(ids()[None]))[0]))
    folder = tmp_path_factory.mktemp("mlx")
    mx.save_safetensors(str(folder / "adapters.safetensors"), trained)
    config = {"fine_tune_type": "dora" if dora else "lora", "num_layers": 2, "lora_parameters": parameters}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder, known


def start(name: str, base: Path, adapter: Path | str, **changes: Any) -> Engine:
    lora: dict[str, Any] = {"rank": RANK, "scale": SCALE, "targets": TARGETS, "layers": 2} | changes
    keep = lora.pop("keep_reference", False)
    settings = BackendSettings.of(str(base), lora=Lora(**lora), adapter=str(adapter), keep_reference=keep)
    return registry.create(name, settings)


@pytest.mark.parametrize("kind", ["of_peft", "of_mlx"])
@pytest.mark.parametrize("name", BACKENDS)
def test_a_run_starts_where_the_adapters_are(
    name: str, kind: str, dora: bool, base: Path, request: pytest.FixtureRequest
) -> None:
    """The policy is that of the library that wrote them, the reference too, and both go their ways from there."""
    folder, known = request.getfixturevalue(kind)
    plain = registry.create(name, BackendSettings.of(str(base)))
    assert np.abs(plain.score(response()).logprobs - known).max() > 0.1
    plain.close()
    engine = start(name, base, folder, keep_reference=True, dora=dora)
    np.testing.assert_allclose(engine.score(response()).logprobs, known, rtol=0, atol=1e-5)
    engine.accumulate(response(), Linear(response().starts, np.ones(10)))
    engine.step(0.02)
    moved = engine.score(response()).logprobs
    assert np.abs(moved - known).max() > 0.05
    np.testing.assert_allclose(engine.reference(response()), known, rtol=0, atol=1e-5)
    np.testing.assert_array_equal(engine.score(response()).logprobs, moved)
    engine.close()


@pytest.mark.parametrize("name", BACKENDS)
def test_what_a_run_wrote_another_starts_from(name: str, dora: bool, base: Path, tmp_path: Path) -> None:
    engine = registry.create(
        name, BackendSettings.of(str(base), lora=Lora(rank=RANK, scale=SCALE, targets=TARGETS, dora=dora))
    )
    for _ in range(2):
        engine.accumulate(response(), Linear(response().starts, np.ones(10)))
        engine.step(0.02)
    engine.export(tmp_path / "model")
    trained = engine.score(response()).logprobs
    engine.close()
    for other in BACKENDS:
        again = start(other, base, tmp_path / "model" / "adapter", layers=None, dora=dora)
        np.testing.assert_allclose(again.score(response()).logprobs, trained, rtol=0, atol=1e-5)
        again.close()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_adapters_of_other_types(
    dtype: torch.dtype, dora: bool, base: Path, of_peft: tuple[Path, Any], tmp_path: Path
) -> None:
    """Their numbers are taken as they are: numpy knows no bfloat16, in which most on the hub are."""
    shutil.copytree(of_peft[0], tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    stored = {name: weight.to(dtype) for name, weight in load_file(file).items()}
    save_file(stored, file)
    engine = start(DEVICE, base, tmp_path / "adapter", dora=dora)
    engine.save(tmp_path)
    found = load_file(tmp_path / "weights.safetensors")
    for name, weight in stored.items():
        inside = name.removeprefix("base_model.model.").removesuffix(".weight")
        assert torch.equal(found[f"{inside}.default.weight"], weight.float())


def test_alpha_over_the_root_of_the_rank(dora: bool, base: Path, of_peft: tuple[Path, Any], tmp_path: Path) -> None:
    adapter = edited(of_peft[0], tmp_path, use_rslora=True, lora_alpha=SCALE * RANK**0.5)
    engine = start(DEVICE, base, adapter, dora=dora)
    np.testing.assert_allclose(engine.score(response()).logprobs, of_peft[1], rtol=0, atol=1e-5)


def edited(folder: Path, tmp_path: Path, **changes: Any) -> Path:
    """A copy of adapters with another configuration."""
    shutil.copytree(folder, tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return tmp_path / "adapter"


def broken(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    file = folder / "adapter_model.safetensors"
    weights = load_file(file)
    change(weights)
    save_file(weights, file)


A = "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"


@pytest.mark.parametrize(
    ("lora", "config", "change", "why"),
    [
        ({"rank": 4}, {}, None, "rank 3, but the recipe has 4; set model.lora.rank = 3"),
        ({"scale": 2.0}, {}, None, "scale 1.5, but the recipe has 2; set model.lora.scale = 1.5"),
        ({"layers": 3}, {}, None, r"no adapter on mlp.down_proj of layer 0.*\['down_proj', 'q_proj'\]"),
        ({"targets": ("q_proj",)}, {}, None, "an adapter on mlp.down_proj of layer 1"),
        ({}, {"modules_to_save": ["lm_head"]}, None, "modules_to_save"),
        ({}, {"rank_pattern": {"q_proj": 2}}, None, "rank_pattern"),
        ({}, {"peft_type": "IA3"}, None, "PEFT's type IA3"),
        ({}, {"r": "many"}, None, "cannot be read"),
        ({}, {}, lambda weights: weights.pop(A), "lacks lora_A.weight of model.layers.1.self_attn.q_proj"),
        ({}, {}, lambda weights: weights.update({A: weights[A][:, :-1].contiguous()}), "belongs to another model"),
        ({}, {}, lambda weights: weights.update({A: weights[A] * torch.nan}), "NaN or infinity"),
        ({}, {}, lambda weights: weights.update({"base_model.model.lm_head.weight": torch.ones(2)}), "lm_head"),
    ],
)
def test_adapters_that_cannot_be_gone_on_with(
    lora: dict[str, Any],
    config: dict[str, Any],
    change: Callable[[dict[str, torch.Tensor]], None] | None,
    why: str,
    dora: bool,
    base: Path,
    of_peft: tuple[Path, Any],
    tmp_path: Path,
) -> None:
    adapter = edited(of_peft[0], tmp_path, **config)
    if change:
        broken(adapter, change)
    for name in BACKENDS:
        with pytest.raises(BackendError, match=why) as error:
            start(name, base, adapter, dora=dora, **lora)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("kind", ["of_peft", "of_mlx"])
def test_magnitudes_that_only_one_side_has(
    kind: str, dora: bool, base: Path, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    folder, _ = request.getfixturevalue(kind)
    why = f"set model.lora.dora = {str(dora).lower()}"
    for name in BACKENDS:
        with pytest.raises(BackendError, match=why):
            start(name, base, folder, dora=not dora)
    said = {"use_dora": not dora} if kind == "of_peft" else {"fine_tune_type": "lora" if dora else "dora"}
    for name in BACKENDS:  # adapter_config.json says otherwise than the file
        with pytest.raises(
            BackendError, match="which is not a low-rank matrix" if dora else "lacks (lora_magnitude|m of)"
        ):
            start(name, base, edited(folder, tmp_path / name, **said), dora=not dora)


@pytest.mark.parametrize("dora", [True], indirect=True)
@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda found: found[:-1], "belongs to another model"),
        (lambda found: found[None], "which is not a low-rank matrix"),
    ],
)
def test_magnitudes_of_another_shape(
    change: Callable[[torch.Tensor], torch.Tensor], why: str, base: Path, of_peft: tuple[Path, Any], tmp_path: Path
) -> None:
    adapter = edited(of_peft[0], tmp_path)
    name = A.replace("lora_A.weight", "lora_magnitude_vector")
    broken(adapter, lambda weights: weights.update({name: change(weights[name]).contiguous()}))
    with pytest.raises(BackendError, match=why):
        start(DEVICE, base, adapter, dora=True)


def test_names_that_are_no_adapters(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for name, why in (
        (tmp_path / "nowhere", "does not exist"),
        (base, "has no adapter_config.json"),
        ("nobody/nothing", "cannot be downloaded"),
    ):
        with pytest.raises(BackendError, match=why):
            start(DEVICE, base, name)


@pytest.mark.parametrize("name", BACKENDS)
def test_adapters_on_experts_are_refused(name: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    experts = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16, "head_dim": 16}
    config = AutoConfig.for_model("qwen3_moe", vocab_size=VOCAB, num_key_value_heads=2, **sizes, **experts)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"num_experts": 2, "mlp_only_layers": []}))
    with pytest.raises(BackendError, match=r"experts.*would open in no other library"):
        registry.create(name, BackendSettings.of(str(tmp_path), lora=Lora(targets=("gate_proj",))))
