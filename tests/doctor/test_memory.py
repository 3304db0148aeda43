"""What the doctor estimates a run to need: sizes by hand, activations as autograd saves them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from safetensors import safe_open

from backends import registry
from backends.interface import Sequences
from delta_cli.assets.random_model import write_qwen3
from delta_cli.doctor.memory import MemoryItem, bytes_by_phase, estimate_memory, peak_bytes, pooled
from delta_cli.doctor.model_shape import KNOWN, ModelShape, shape_of
from delta_cli.doctor.sharding import ShardingLayout
from delta_cli.recipe import load_recipe
from delta_cli.recipe.backend_settings import backend_settings

RECIPES = Path(__file__).parents[2] / "recipes"


@pytest.mark.parametrize("tie", [True, False])
def test_parameters_are_those_of_the_weights(tie: bool, tmp_path: Path) -> None:
    write_qwen3(tmp_path, vocab_size=500, hidden=96, layers=3, heads=6, kv_heads=2, head_dim=24, tie=tie)
    with safe_open(tmp_path / "model.safetensors", "numpy") as tensors:
        shapes = {name: tensors.get_slice(name).get_shape() for name in tensors.keys()}  # noqa: SIM118
    assert shape_of(str(tmp_path))[0].parameters == sum(math.prod(shape) for shape in shapes.values())


def test_known_models_have_the_size_in_their_name() -> None:
    sizes = {name: round(shape.parameters / 1e9, 1) for name, shape in KNOWN.items()}
    assert sizes == {
        "HuggingFaceTB/SmolLM2-135M-Instruct": 0.1,
        "Qwen/Qwen3-0.6B": 0.6,
        "Qwen/Qwen3-1.7B": 1.7,
        "Qwen/Qwen3-4B": 4.0,
        "Qwen/Qwen3-8B-Base": 8.2,
        "Qwen/Qwen3-14B-Base": 14.8,
        "Qwen/Qwen3-32B": 32.8,
        "meta-llama/Llama-3.3-70B-Instruct": 70.6,
        "allenai/Olmo-3-1025-7B": 7.3,
        "mlx-community/Qwen3-1.7B-4bit": 1.7,
    }


def test_adapters_by_hand(tmp_path: Path) -> None:
    write_qwen3(tmp_path, vocab_size=50, hidden=64, layers=2, heads=4, kv_heads=2, head_dim=16, intermediate=192)
    shape, _ = shape_of(str(tmp_path))
    assert shape.adapters(4, ("q_proj", "v_proj"), 1) == 4 * ((64 + 64) + (64 + 32))
    assert shape.adapters(4, ("down_proj",), None) == 2 * 4 * (192 + 64)
    assert shape.adapters(4, ("q_proj", "v_proj"), 1, dora=True) == 4 * ((64 + 64) + (64 + 32)) + 64 + 32


def estimated(name: str, *overrides: str) -> tuple[dict[str, MemoryItem], list[MemoryItem]]:
    """The items of a recipe of this repository by phase and name, and as they come."""
    recipe = load_recipe(RECIPES / name, overrides)
    items = estimate_memory(recipe, *shape_of(recipe.model.path))
    return {f"{item.phase} {item.name}": item for item in items}, items


def test_the_estimate_by_hand() -> None:
    found, items = estimated("qwen3_8b.toml", "update.offload=false", "rollout.batch=16", "update.feature_bytes=1024")
    count = 36 * (4096 * 128 * (2 * 32 + 2 * 8) + 3 * 4096 * 12288) + 2 * 151936 * 4096
    assert found["stays weights"].bytes == 2 * count
    assert found["stays masters"].bytes == 4 * count
    assert found["stays moments"].bytes == 8 * count
    assert found["update gradient"].bytes == 4 * count
    assert "stays compute copy" not in found
    assert found["rollout KV cache"].bytes == 16 * (2048 + 30000) * (2 * 36 * 8 * 128 * 2), "of an evaluation"
    assert found["update logits"].bytes == 3 * 4096 * 151936 * 4
    assert found["score features"].bytes == 1024
    assert found["host features"].bytes == 48 * 2**30, "of 128 · 16 · 20480 · 4096 · 2 bytes"
    tokens = 24576
    inside = 2 * (8 * 4096 + 6 * 4096 + 7 * 1024 + 4 * 12288)
    assert found["rollout prefill"].bytes == 2 * 2048 * (inside + 2 * 36 * 8 * 128 * 2), "16 slots are 2 problems"
    assert found["update activations"].bytes == tokens * (36 * 4096 * 2 + inside + 4 * 4096 * 4)
    assert found["score activations"].bytes == tokens * (inside + 4 * 4096 * 4)
    phases = bytes_by_phase(items)
    assert peak_bytes(items) == phases["stays"] + max(phases["rollout"], phases["score"], phases["update"])
    assert phases["stays"] == sum(item.bytes for item in items if item.phase == "stays")


@pytest.mark.parametrize(
    ("micro_batch", "samples", "together", "entering"),
    [(24576, 16, 2048, 2048), (24576, 5, 4 * 2048, 4 * 2048), (5000, 1, 5000, 16 * 2048), (100, 1, 2048, 16 * 2048)],
)
def test_a_prefill_takes_each_prompt_once_and_a_micro_batch_at_a_time(
    micro_batch: int, samples: int, together: int, entering: int
) -> None:
    overrides = [f"update.micro_batch_tokens={micro_batch}", f"rollout.responses={samples}", "rollout.batch=16"]
    found, _ = estimated("qwen3_8b.toml", *overrides, "evaluation.problems=1", "evaluation.samples=1")
    inside = 2 * (8 * 4096 + 6 * 4096 + 7 * 1024 + 4 * 12288)
    assert found["rollout prefill"].bytes == together * inside + entering * 2 * 36 * 8 * 128 * 2


def test_a_rollout_is_as_large_as_its_largest_use() -> None:
    """Many prompts may take more beside a smaller cache than few beside a larger one."""
    overrides = ["rollout.batch=16", "evaluation.max_tokens=20500", "rollout.responses=1", "evaluation.samples=16"]
    found, _ = estimated("qwen3_8b.toml", *overrides)
    assert found["rollout KV cache"].bytes == 16 * (2048 + 20480) * (2 * 36 * 8 * 128 * 2)
    found, _ = estimated("qwen3_8b.toml", *overrides, "evaluation.samples=1")
    assert found["rollout KV cache"].bytes == 16 * (2048 + 20500) * (2 * 36 * 8 * 128 * 2), "of an evaluation"


def test_moments_on_the_host_and_in_8_bits() -> None:
    count = shape_of("Qwen/Qwen3-8B-Base")[0].parameters
    here, items = estimated("qwen3_8b.toml", "update.offload=false")
    there, offloaded = estimated("qwen3_8b.toml", "update.offload=true")
    assert there["host moments"].bytes == here["stays moments"].bytes == 8 * count
    assert there["host masters"].bytes == here["stays masters"].bytes == 4 * count
    assert peak_bytes(items) - peak_bytes(offloaded) == 12 * count
    assert bytes_by_phase(offloaded)["host"] - bytes_by_phase(items)["host"] == 12 * count
    coded, _ = estimated("qwen3_8b.toml", "update.offload=false", "update.moments=int8")
    assert coded["stays moments"].bytes == 2 * count + 2 * count // 64


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "bfloat16 adapters", "float32 DoRA", "bfloat16 DoRA"])
def test_activations_are_what_autograd_saves(kind: str, tmp_path: Path) -> None:
    """For a token in a layer: counted for two depths, so that all else cancels.

    On a processor a layer also saves a mask of tokens × tokens, so the linear part is taken from three lengths.
    Adapters save less, as their frozen matrices need no input; the estimate does not tell them apart.
    """
    torch = pytest.importorskip("torch", reason="what autograd saves is counted in torch")
    pytest.importorskip("transformers", reason="what autograd saves is counted in a model of transformers")
    dtype, _, adapters = kind.partition(" ")
    overrides = [f"model.dtype={dtype}", f"model.path={tmp_path}", "update.micro_batch_tokens=4096"]
    overrides += ["model.lora.rank=2", "model.lora.scale=2.0"] if adapters else []
    overrides += ["model.lora.dora=true"] if adapters == "DoRA" else []
    recipe = load_recipe(None, overrides)

    def saved(layers: int, tokens: int) -> int:
        """Bytes of all that the forward pass keeps for the backward pass."""
        sizes: dict[int, tuple[int, object]] = {}

        def keep(tensor: Any) -> Any:
            storage = tensor.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes(), tensor  # held, so that its address is not used again
            return tensor

        write(layers)
        backend = registry.create("cpu", backend_settings(recipe))
        response = Sequences((np.array([1]),), np.ones(tokens, np.int64), np.array([0, tokens]))
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            backend.accumulate(response, lambda logp, rows: (0.0, np.ones(len(logp))))
        backend.close()
        return sum(size for size, _ in sizes.values())

    def write(layers: int) -> ModelShape:
        parts = {"hidden": 64, "heads": 8, "kv_heads": 2, "head_dim": 8, "intermediate": 192}
        write_qwen3(tmp_path, vocab_size=101, layers=layers, tie=False, **parts)
        return shape_of(str(tmp_path))[0]

    short, middle, long = (saved(3, tokens) - saved(2, tokens) for tokens in (64, 128, 192))
    counted = (5 * (middle - short) - 3 * (long - middle)) / (2 * 64)
    three, two = (
        next(item.bytes for item in estimate_memory(recipe, write(layers), {}) if item.name == "activations")
        for layers in (3, 2)
    )
    assert counted <= (three - two) / 4096 * 1.03
    assert counted >= (three - two) / 4096 * (0.85 if adapters else 0.97)


@pytest.mark.parametrize(
    ("name", "memory"),
    [("qwen3_8b.toml", 141e9), ("qwen3_8b_lora.toml", 24e9), ("qwen3_8b_lora_16gb.toml", 16e9)],
)
def test_the_recipes_fit_one_gpu(name: str, memory: float) -> None:
    """With a tenth left for the context, the allocator's gaps and what frameworks keep.

    Keys and values take what is free while responses are drawn, for one of the longest at least.
    """
    recipe, (_, items) = load_recipe(RECIPES / name), estimated(name)
    found = pooled(recipe, shape_of(recipe.model.path)[0], items, int(0.9 * memory))
    assert peak_bytes(found) <= 0.9 * memory
    [cache] = [item for item in found if item.name == "KV cache"]
    longest = recipe.rollout.max_prompt_tokens + max(recipe.rollout.max_tokens, recipe.evaluation.max_tokens or 0)
    each = 2 * 36 * 8 * 128 * 2
    assert cache.bytes >= each * longest
    [least] = [item for item in pooled(recipe, shape_of(recipe.model.path)[0], items, 0) if item.name == "KV cache"]
    assert least.bytes == each * longest


def test_adapters_on_a_quantised_base_need_far_less() -> None:
    mac = load_recipe(RECIPES / "qwen3_1.7b_mac.toml")
    shape, _ = shape_of("mlx-community/Qwen3-1.7B-4bit")
    quantised = peak_bytes(estimate_memory(mac, shape, {"quantization": {"bits": 4, "group_size": 64}}))
    assert quantised < peak_bytes(estimate_memory(mac, shape, {}))
    assert quantised < 12 * 2**30


def test_a_base_of_four_bits_by_hand() -> None:
    """What bitsandbytes stores: a code of 4 bits a number, a byte for 64 of them, 4 bytes for 64 · 256."""
    found, _ = estimated("qwen3_8b_lora.toml", "model.load_in_4bit=true")
    matrices = 36 * (4096 * 128 * (2 * 32 + 2 * 8) + 3 * 4096 * 12288)
    packed = matrices / 2 + matrices / 64 + 4 * matrices / (64 * 256)
    assert found["stays weights"].bytes == packed + 2 * 2 * 151936 * 4096


@pytest.mark.parametrize("sharding", ["none", "full"])
def test_the_copy_of_a_checkpoint_is_counted(sharding: Literal["none", "full"]) -> None:
    """Weights and two moments of 4 bytes each, of which a process of eight holds an eighth if they are split."""
    recipe = load_recipe(None, ["checkpoint.async_save=true"])
    shape, config = shape_of(recipe.model.path)
    layout = ShardingLayout(8, sharding)
    host = {item.name: item.bytes for item in estimate_memory(recipe, shape, config, layout) if item.phase == "host"}
    assert host["checkpoint, copied"] == pytest.approx(12 * shape.parameters / layout.parts, rel=1e-3)
    plain = estimate_memory(load_recipe(None), shape, config, layout)
    assert "checkpoint, copied" not in {item.name for item in plain}
