"""The states of recurrent layers in the doctor's estimate: by hand, and as the engine allocates them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from backends.settings import BackendSettings
from backends.torch.backend import TorchEngine
from backends.torch.cache_size import key_value_bytes as allocated_keys
from backends.torch.cache_size import state_bytes as allocated_states
from delta_cli.doctor.memory import estimate_memory, key_value_bytes, state_bytes
from delta_cli.doctor.model_shape import shape_of
from delta_cli.recipe import load_recipe
from tests.families.families import FAMILIES, build

# The text part of the published Qwen3.5-0.8B, whose config.json is that of an image-text model.
QWEN3_5 = {
    "model_type": "qwen3_5_text",
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 6,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "linear_value_head_dim": 128,
    "num_attention_heads": 8,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
    "vocab_size": 248320,
}
STATE = 18 * (16 * 128 * 128 * 4 + 3 * 16 * 128 * 4 * 2)  # float32 matrices; bfloat16 inputs of a convolution


@pytest.mark.parametrize("without", ["", "layer_types"])
@pytest.mark.parametrize(("environment", "copies"), [({}, 1), ({"kind": "text", "file": "calculator"}, 2)])
def test_qwen3_5_by_hand(without: str, environment: dict[str, str], copies: int, tmp_path: Path) -> None:
    """Six of 24 layers have keys and values; the others have a state of 19 MB for each response."""
    text = {key: value for key, value in QWEN3_5.items() if key != without}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_5", "text_config": text}))
    keys = {"model.path": str(tmp_path), "model.dtype": "bfloat16", "rollout.batch": 16, "rollout.prompts": 8}
    keys |= {f"environment.{key}": value for key, value in environment.items()}
    recipe = load_recipe(None, [f"{key}={json.dumps(value)}" for key, value in keys.items()])
    shape, config = shape_of(str(tmp_path))
    found = {item.name: item for item in estimate_memory(recipe, shape, config)}
    assert key_value_bytes(recipe, shape) == 2 * 6 * 2 * 256 * 2
    assert found["recurrent states"].bytes == copies * 16 * STATE
    assert found["recurrent states"].phase == "rollout"


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize(
    "kind", ["qwen3_5_text", "qwen3_next", "lfm2", "granitemoehybrid", "falcon_h1", "jamba", "nemotron_h"]
)
def test_the_engine_allocates_as_much(kind: str, tmp_path: Path) -> None:
    build(next(family for family in FAMILIES if family.kind == kind), tmp_path)
    policy = TorchEngine(BackendSettings.of(str(tmp_path)), "cpu")._policy
    recipe = load_recipe(None, [f'model.path="{tmp_path}"', 'model.dtype="float32"'])
    shape, _ = shape_of(str(tmp_path))
    assert state_bytes(recipe, shape) == allocated_states(policy)
    assert key_value_bytes(recipe, shape) == allocated_keys(policy)


def test_a_transformer_has_none() -> None:
    recipe = load_recipe(None, ['model.path="Qwen/Qwen3-8B-Base"'])
    shape, config = shape_of("Qwen/Qwen3-8B-Base")
    assert "recurrent states" not in {item.name for item in estimate_memory(recipe, shape, config)}
