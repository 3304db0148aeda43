"""What the mlx backend loads and what it refuses: models, adapters, versions of MLX."""

from __future__ import annotations

import json
import platform
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("mlx.core", reason="MLX is not installed")

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import gemma2
from mlx_lm.models.rope_utils import SuScaledRoPE
from mlx_lm.utils import load_model, quantize_model, save_config, save_model

from backends import mlx as package
from backends.interface import BackendError, RolloutRequest, Sampling, Sequences
from backends.mlx import model
from backends.mlx.checkpointing import checkpointed
from backends.mlx.rollout import MlxRollout
from backends.settings import Lora
from tests.backends.mlx_engine import VOCAB, create, write_small


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small(tmp_path_factory.mktemp("mlx") / "model")


def broken(folder: Path, path: Path, **config: Any) -> Path:
    """A copy of a model with another config."""
    path.mkdir()
    (path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    (path / "config.json").write_text(json.dumps(json.loads((folder / "config.json").read_text()) | config))
    return path


def test_models_that_cannot_be_loaded(folder: Path, tmp_path: Path) -> None:
    """One line each, with the folder and the reason."""
    garbage, empty = broken(folder, tmp_path / "garbage"), broken(folder, tmp_path / "empty")
    (garbage / "config.json").write_text("{")
    (empty / "model.safetensors").unlink()
    cases = {
        tmp_path / "nowhere": "does not exist",
        folder / "config.json": "is a file",
        garbage: "Expecting",
        empty: "No safetensors",
        broken(folder, tmp_path / "unknown", model_type="qwen99"): "qwen99",
        broken(folder, tmp_path / "code", model_file="evil.py"): "evil.py",
        broken(folder, tmp_path / "larger", hidden_size=64): "shape",
    }
    for path, reason in cases.items():
        with pytest.raises(BackendError, match=reason) as error:
            create(path)
        assert str(path) in str(error.value)
        assert "\n" not in str(error.value)


def write_gemma2(folder: Path, **changes: Any) -> Path:
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 16, "head_dim": 8, "vocab_size": VOCAB}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "query_pre_attn_scalar": 8, "rms_norm_eps": 1e-6}
    config = {"model_type": "gemma2", "final_logit_softcapping": 0.5, **shape, **heads}
    save_model(folder, gemma2.Model(gemma2.ModelArgs.from_dict(config)))
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


def test_a_model_that_does_more_to_its_logits_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is computed from trunk and matrix would be wrong."""
    whole = gemma2.Model.__call__
    monkeypatch.setattr(gemma2.Model, "__call__", lambda *args, **options: 2 * whole(*args, **options))
    with pytest.raises(BackendError, match="'gemma2' put more than one matrix, a scale and a cap"):
        create(write_gemma2(tmp_path))


def test_a_sliding_window_that_mlx_lm_leaves_out(tmp_path: Path) -> None:
    """Up to the window the numbers are the model's; beyond it they would be another's, and are refused."""
    engine = create(write_gemma2(tmp_path, sliding_window=6))
    prompt = np.array([1, 2])
    sequences = Sequences((prompt,), np.array([3, 4, 5, 6]), np.array([0, 4]))
    engine.score(sequences)
    longer = Sequences((prompt,), np.array([3, 4, 5, 6, 7]), np.array([0, 5]))
    for call in (
        lambda: engine.score(longer),
        lambda: engine.rollout(RolloutRequest((prompt,), Sampling(max_tokens=5, stop_ids=()))),
    ):
        with pytest.raises(BackendError, match="7 tokens, but beyond 6 mlx-lm computes models of type 'gemma2'"):
            call()


def test_a_quantised_model_that_is_only_drawn_from(folder: Path, tmp_path: Path) -> None:
    """It needs no adapters then: what delta eval and delta chat load."""
    model, config = quantize_model(*load_model(folder), group_size=32, bits=4)
    save_model(tmp_path, model)
    save_config(config, tmp_path / "config.json")
    with pytest.raises(BackendError, match=r"add \[model.lora\]"):
        create(tmp_path)
    engine = create(tmp_path, frozen=True)
    assert engine.trainable == 0
    prompt = np.array([1, 2, 3])
    drawn = engine.rollout(RolloutRequest((prompt,), Sampling(max_tokens=4, stop_ids=())))
    scored = engine.score(Sequences((prompt,), drawn.tokens, drawn.starts)).logprobs
    np.testing.assert_allclose(drawn.logprobs, scored, atol=1e-4)


@pytest.mark.parametrize("what", ["rows", "positions"])
def test_a_generator_that_does_otherwise_is_found_at_the_start(
    what: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What another version of mlx-lm might change: the order of rows, what a cache holds."""
    prefilled, sample = MlxRollout._prefilled, MlxRollout._sample

    def turned(self: MlxRollout, logprobs: mx.array) -> mx.array:
        return sample(self, logprobs[::-1])

    def cut(self: MlxRollout) -> Any:
        for row, last, cache in prefilled(self):
            for layer in cache:
                layer.trim(1)
            yield row, last, cache

    if what == "rows":
        monkeypatch.setattr(MlxRollout, "_sample", turned)
    else:
        monkeypatch.setattr(MlxRollout, "_prefilled", cut)
    with pytest.raises(BackendError, match=r"nats from those of a plain forward.*install mlx-lm 0\.32\.2"):
        create(folder)


def test_unknown_adapter_targets_are_named(folder: Path) -> None:
    with pytest.raises(BackendError, match=r"'c_attn'.*choose from down_proj, gate_proj"):
        create(folder, lora=Lora(targets=("q_proj", "c_attn")))


def test_another_version_of_mlx_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(package, "version", lambda name: "0.33.1")
    with pytest.raises(BackendError, match=r"works with mlx 0\.32\.x and found 0\.33\.1; run: pip install"):
        package.check_installation()


@pytest.mark.parametrize("old", ["0.32.1", "0.32", "0.32.1.dev3"])
def test_an_mlx_whose_failures_end_the_process(old: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(package, "version", lambda name: {"mlx": old, "mlx-lm": "0.32.0"}[name])
    with pytest.raises(BackendError, match=rf"needs mlx 0\.32\.2 or later, .* found {old}; run: pip install"):
        package.check_installation()
    monkeypatch.setattr(package, "version", lambda name: {"mlx": "0.32.2", "mlx-lm": "0.32.0"}[name])
    package.check_installation()


def test_a_mac_without_metal_says_what_to_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    monkeypatch.setattr(mx.metal, "is_available", lambda: False)
    with pytest.raises(BackendError, match=r"no Metal device.*--backend cpu"):
        package.check_installation()


def test_short_sequences_get_the_short_rotary_factors(tmp_path: Path) -> None:
    """LongRoPE turns pair i of position p by p / (factor · base ** (2i / size)); longer sequences are refused."""
    rope = SuScaledRoPE(4, 100.0, 64, 16, short_factor=[1.0, 2.0], long_factor=[5.0, 7.0])
    text = nn.Module()
    text.rope = rope
    config = {"rope_scaling": {"short_factor": [1.0, 2.0], "long_factor": [5.0, 7.0]}}
    assert model._short_rotary_factors(text, config) == 16
    np.testing.assert_allclose(np.array(rope._freqs), [1.0, 2.0 * 10.0], rtol=1e-6)
    assert model._short_rotary_factors(nn.Module(), {}) is None


def test_checkpointed_layers_pass_gradients_to_all_their_inputs() -> None:
    """Gemma 4's layers get inputs of their own and the keys of other layers beside the hidden states."""

    class Layer(nn.Module):
        def __call__(self, x: mx.array, mask: None, *, inputs: mx.array, shared: tuple[mx.array, int]) -> mx.array:
            return x * inputs * shared[0]

    layer, x = Layer(), mx.array([2.0, 3.0])

    def total(inputs: mx.array, keys: mx.array) -> mx.array:
        return layer(x, None, inputs=inputs, shared=(keys, 5)).sum()

    with checkpointed([layer]):
        found = mx.grad(total, (0, 1))(mx.array([5.0, 7.0]), mx.array([11.0, 13.0]))
    assert [part.tolist() for part in found] == [[22.0, 39.0], [10.0, 21.0]]
