"""What only the fake backend has: its own derivatives to full precision, its sampler, what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from backends.fake.backend import FakeEngine
from backends.fake.sampling import draw
from backends.interface import BackendError, Sampling, Sequences, token_index
from backends.settings import BackendSettings, Lora
from delta_cli.assets.random_model import write_qwen3


def write(folder: Path, tie: bool = True) -> Path:
    shape = {"hidden": 8, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 4, "intermediate": 12}
    write_qwen3(folder, vocab_size=11, **shape, tie=tie, scale=0.4)
    return folder


@pytest.mark.parametrize("tie", [True, False])
def test_every_weights_gradient_against_central_differences(tmp_path: Path, tie: bool) -> None:
    """Of Σ c·logp along a random direction of each weight, in float64 throughout."""
    backend = FakeEngine(BackendSettings.of(str(write(tmp_path / "model", tie))), "fake")
    rng = np.random.default_rng(0)
    prompts = tuple(rng.integers(0, 11, size=size) for size in (1, 4, 2))
    sequences = Sequences(prompts, rng.integers(0, 11, size=9), np.array([0, 3, 4, 9]), temperature=0.8)
    factors = rng.standard_normal(9)

    def surrogate(logp: np.ndarray, rows: np.ndarray) -> tuple[float, np.ndarray]:
        c = factors[token_index(sequences.starts, rows)]
        return float(c @ logp), c

    backend.accumulate(sequences, surrogate)
    gradients = {name: grad.copy() for name, grad in backend.model.grads.items()}
    assert len(gradients) == 2 * 11 + 2 + (not tie)
    for name, weight in backend.model.weights.items():
        direction, start = rng.standard_normal(weight.shape), weight.copy()
        losses = []
        for step in (1e-5, -1e-5):
            weight[:] = start + step * direction
            losses.append(backend.accumulate(sequences, surrogate))
        weight[:] = start
        expected = (losses[0] - losses[1]) / 2e-5
        assert np.vdot(gradients[name], direction) == pytest.approx(expected, rel=1e-6, abs=1e-7), name


def test_a_token_of_probability_zero_is_never_drawn() -> None:
    """Not at either end of the unit interval, and not where top-p cut."""
    with np.errstate(divide="ignore"):
        logprobs = np.log([[0.0, 0.5, 0.0, 0.3, 0.2, 0.0]])
    edges = np.array([0.0, 0.25, 0.5, 0.79, 0.8, np.nextafter(1, 0)])
    drawn = [int(draw(logprobs, noise[None], Sampling(1, ()))[0]) for noise in edges]
    assert drawn == [1, 1, 3, 3, 4, 4]
    assert {int(draw(logprobs, noise[None], Sampling(1, (), top_p=0.7))[0]) for noise in edges} == {1, 3}


def test_a_sharded_folder_is_the_same_model(tmp_path: Path) -> None:
    whole, shards = write(tmp_path / "whole"), write(tmp_path / "shards")
    weights = list(load_file(shards / "model.safetensors").items())
    (shards / "model.safetensors").unlink()
    save_file(dict(weights[:5]), shards / "model-00001-of-00002.safetensors")
    save_file(dict(weights[5:]), shards / "model-00002-of-00002.safetensors")
    one, two = (FakeEngine(BackendSettings.of(str(folder)), "fake") for folder in (whole, shards))
    assert one.model.weights.keys() == two.model.weights.keys()
    for name, weight in one.model.weights.items():
        np.testing.assert_array_equal(two.model.weights[name], weight)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "llama"}, "model_type is 'llama'"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_type is 'yarn'"),
        ({"quantization": {"bits": 4}}, "quantization is"),
    ],
)
def test_a_model_it_does_not_compute(tmp_path: Path, change: dict, message: str) -> None:
    config = write(tmp_path) / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | change))
    with pytest.raises(BackendError, match=message) as caught:
        FakeEngine(BackendSettings.of(str(tmp_path)), "fake")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("settings", [{"lora": Lora()}, {"dtype": "bfloat16"}])
def test_settings_it_does_not_take(tmp_path: Path, settings: dict) -> None:
    with pytest.raises(BackendError, match="choose --backend cpu or mlx"):
        FakeEngine(BackendSettings.of(str(write(tmp_path)), **settings), "fake")
