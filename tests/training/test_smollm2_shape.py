"""A Llama shaped like SmolLM2 (49,152 tied tokens, three query heads per key head): MLX trains it as torch does."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

pytest.importorskip("mlx.core", reason="MLX is not installed")

from make_tiny_base import write_tokenizer
from mlx_lm.utils import dequantize_model, load_model, quantize_model, save_config, save_model

from delta_cli.recipe import Recipe, load_recipe
from delta_cli.runs.folder import RunFolder, read_lines
from delta_cli.training import parity
from tests.harness import make_recipe, train

VOCAB = 49152
REWARD = "def reward(response, problem):\n    return sum(map(ord, response)) % 7 / 7\n"  # depends on every token
LORA = {"model__lora__rank": 4, "model__lora__layers": 2}


def write_model(path: Path, scale: float) -> Path:
    """Write two layers with random weights of that scale, and a tokenizer with a text for every id."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=96,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=1,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        initializer_range=scale,
        bos_token_id=None,
        eos_token_id=257,
        pad_token_id=257,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    write_tokenizer(path)
    file = path / "tokenizer.json"
    content = json.loads(file.read_text())
    known = set(content["model"]["vocab"].values()) | {each["id"] for each in content["added_tokens"]}
    content["model"]["vocab"] |= {f"w{token}": token for token in range(VOCAB) if token not in known}
    file.write_text(json.dumps(content))
    (path / "reward.py").write_text(REWARD)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with few likely tokens: among tens of thousands of equal ones rounding would decide which is drawn."""
    return write_model(tmp_path_factory.mktemp("smollm2") / "model", 1.0)


def recipe(model: Path, folder: Path, **changes: Any) -> Recipe:
    own = {
        "run__steps": 2,
        "rollout__prompts": 4,
        "rollout__responses": 4,
        "rollout__max_tokens": 6,
        "rollout__stop": ["w3", "w27"],  # many ids' texts begin with these
        "reward__kind": "custom",
        "reward__custom_file": str(folder / "reward.py"),
        "reward__length_penalty": 0.0,
        "reward__workers": 1,
        "update__learning_rate": 1e-3,
        "evaluation__at_start": False,
        "evaluation__every": 0,
        "evaluation__problems": 2,
    }
    return make_recipe(model, **(own | changes))


def first_batch(run: Path) -> list[tuple[float, list[int]]]:
    return [(row["reward"], row["tokens"]) for row in read_lines(RunFolder(run).rollout_file(1))]


@pytest.mark.long
@pytest.mark.parametrize("lora", [pytest.param({}, id="whole"), pytest.param(LORA, id="lora")])
def test_mlx_draws_the_rewards_of_torch_and_both_learn(folder: Path, tmp_path: Path, lora: dict[str, Any]) -> None:
    """Adapters change nothing at first, so they give the same rewards."""
    records = {}
    for backend in ("cpu", "mlx"):
        records[backend] = train(recipe(folder, folder, **lora), tmp_path / backend, backend).records
    assert first_batch(tmp_path / "mlx") == first_batch(tmp_path / "cpu")
    rewards = [reward for reward, _ in first_batch(tmp_path / "cpu")]
    assert len(set(rewards)) > 3
    assert {len(tokens) for _, tokens in first_batch(tmp_path / "cpu")} > {6}, "a stop string should have ended one"
    one, other = records["cpu"][0], records["mlx"][0]
    for name in ("reward_mean", "entropy_mean", "coefficient_std"):
        assert other[name] == pytest.approx(one[name], rel=1e-4), name
    for steps in records.values():
        assert all(
            step["updates"] == 2 and step["grad_norm"] > 0 and step["probe_logprob_change"] > 0 for step in steps
        )
        assert steps[0]["ratio_gap_first"] < 1e-4


@pytest.mark.long
def test_mlx_computes_what_torch_computes(tmp_path: Path) -> None:
    """Log-probabilities, entropies, coefficients, loss, and the gradient of the weights, embedding included."""
    folder = write_model(tmp_path / "model", 0.2)
    run = tmp_path / "run"
    train(recipe(folder, folder, run__steps=1), run, "cpu")
    again = load_recipe(run / "recipe.toml")
    batch = parity.read_batch(run / "rollouts" / "step-000001.jsonl.gz", again.rollout.temperature)
    one, other = (parity.replay(again, again.model.path, batch, backend) for backend in ("cpu", "mlx"))
    assert max(np.abs(part).max() for part in one.gradient.values()) > 1e-4
    assert [each for each in parity.differences(other, one, 1e-4) if not each.within] == []


@pytest.mark.long
def test_a_four_bit_base_of_mlx_lm_trains_through_adapters(folder: Path, tmp_path: Path) -> None:
    """Its first rewards equal those of torch on the dequantised weights."""
    packed, plain = tmp_path / "packed", tmp_path / "plain"
    model, config = quantize_model(*load_model(folder), group_size=32, bits=4)
    for path in (packed, plain):
        shutil.copytree(folder, path, ignore=shutil.ignore_patterns("*.safetensors"))
    save_model(packed, model)
    save_config(config, packed / "config.json")
    save_model(plain, dequantize_model(load_model(packed)[0]))
    records = train(recipe(packed, folder, **LORA), tmp_path / "mlx", "mlx").records
    train(recipe(plain, folder, **LORA), tmp_path / "cpu", "cpu")
    assert first_batch(tmp_path / "mlx") == first_batch(tmp_path / "cpu")
    assert all(step["updates"] > 0 and step["grad_norm"] > 0 for step in records)
    assert max(step["probe_logprob_change"] for step in records) > 0
