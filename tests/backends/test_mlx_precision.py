"""MLX in 16 and 4 bits: from the hidden states on, numbers are those of float64."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("mlx.core", reason="MLX is not installed")

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.utils import load_model, quantize_model, save_config, save_model

from backends import mlx as package
from backends import registry
from backends.interface import BackendError, Floats, Proxy, RolloutRequest, Sampling, Sequences
from backends.mlx.backend import MlxEngine
from backends.mlx.head import BLOCK, MlxHead, proxies, pullback
from backends.mlx.rollout import MlxRollout
from backends.settings import BackendSettings, Lora
from delta_cli.assets.random_model import write_qwen3
from tests.conformance.objectives import Linear

VOCAB, WIDTH, TOKENS = 32_000, 64, 12
TOLERANCE = 1e-4  # nats
Array = np.ndarray


def plain() -> nn.Module:
    rng = np.random.default_rng(0)
    layer = nn.Linear(WIDTH, VOCAB, bias=False)
    layer.weight = mx.array(0.3 * rng.normal(size=(VOCAB, WIDTH)).astype(np.float32)).astype(mx.bfloat16)
    return layer


def packed(mode: str) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        bits, group = (4, 32) if mode == "mxfp4" else (4, 64)
        return nn.QuantizedLinear.from_linear(plain(), group, bits, mode)

    return make


def float64(array: mx.array) -> Array:
    return np.array(array.astype(mx.float32), dtype=np.float64)


def weights_of(layer: nn.Module) -> Array:
    """What the layer's bits mean, by their definition: scale · code + bias, of each group of columns."""
    if not isinstance(layer, nn.QuantizedLinear):
        return float64(layer.weight)
    if layer.mode == "mxfp4":
        return float64(mx.dequantize(layer.weight, layer.scales, None, layer.group_size, layer.bits, layer.mode))
    packed_codes = np.array(layer.weight)
    codes = np.stack([packed_codes >> shift & 15 for shift in range(0, 32, 4)], axis=-1).reshape(VOCAB, WIDTH)
    scales, biases = (np.repeat(float64(layer[key]), layer.group_size, axis=1) for key in ("scales", "biases"))
    return codes * scales + biases


@pytest.mark.parametrize("softcap", [pytest.param(None, marks=pytest.mark.long), 2.0])
@pytest.mark.parametrize("make", [plain, packed("affine"), packed("mxfp4")], ids=["bfloat16", "4 bits", "mxfp4"])
def test_a_head_of_few_bits_is_that_of_float64(make: Callable[[], nn.Module], softcap: float | None) -> None:
    """Log-probabilities, their gradient and features; products in bfloat16 would be off by 0.03 nats and more."""
    assert BLOCK < VOCAB, "a head of several blocks"
    rng = np.random.default_rng(1)
    layer = make()
    head, weight = MlxHead.of(layer, "lm_head", softcap), weights_of(layer)
    hidden = mx.array(rng.normal(size=(TOKENS, WIDTH)).astype(np.float32)).astype(mx.bfloat16)
    targets, slope = rng.integers(0, VOCAB, TOKENS), rng.normal(size=TOKENS)
    logits, through = float64(hidden) @ weight.T, np.ones((TOKENS, VOCAB))  # and their derivative by the products
    if softcap is not None:
        logits, through = softcap * np.tanh(logits / softcap), np.cosh(logits / softcap) ** -2.0
    logits = logits / 0.7
    logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    rows = through[np.arange(TOKENS), targets, None] * weight[targets]
    exact = rows - (np.exp(logp) * through) @ weight
    log_softmax = head.log_softmax(hidden, 0.7)
    np.testing.assert_allclose(log_softmax, logp, rtol=0, atol=TOLERANCE)
    features = proxies(head, hidden, mx.array(targets), log_softmax, Proxy("hidden_exact"))
    np.testing.assert_allclose(features, exact, rtol=0, atol=1e-4 * np.abs(exact).max())
    likeliest = np.argsort(-logp, axis=-1)[:, :5]
    q = np.exp(np.take_along_axis(logp, likeliest, -1))
    q = q / q.sum(-1, keepdims=True) * np.take_along_axis(through, likeliest, -1)
    features = proxies(head, hidden, mx.array(targets), log_softmax, Proxy("hidden_topk", 5))
    topmost = rows - np.einsum("nk,nkh->nh", q, weight[likeliest])
    np.testing.assert_allclose(features, topmost, rtol=0, atol=1e-4 * np.abs(topmost).max())
    dlogits = -slope[:, None] * np.exp(logp)
    dlogits[np.arange(TOKENS), targets] += slope
    by_hidden, by_weight = slope[:, None] * exact / 0.7, (dlogits * through).T @ float64(hidden) / 0.7
    for size in (5, TOKENS):  # in chunks, of which the last is at hand, and all of it at hand
        asked: list[Floats] = []

        def slopes(logprobs: Floats, asked: list[Floats] = asked) -> Floats:
            asked.append(logprobs)
            return slope

        outer: list[mx.array] = []
        dhidden = pullback(head, hidden, mx.array(targets), slopes, 0.7, size, outer.append if make is plain else None)
        [found] = asked
        np.testing.assert_allclose(found, logp[np.arange(TOKENS), targets], rtol=0, atol=TOLERANCE)
        np.testing.assert_allclose(dhidden, by_hidden, rtol=0, atol=1e-4 * np.abs(by_hidden).max())
        assert bool(outer) == (make is plain)
        if outer:
            np.testing.assert_allclose(sum(outer), by_weight, rtol=0, atol=1e-4 * np.abs(by_weight).max())


def test_rollouts_take_the_same_head(tmp_path: Path) -> None:
    write_qwen3(tmp_path, vocab_size=BLOCK + 500, hidden=32, layers=1, head_dim=8, intermediate=16, scale=0.5)
    engine = package.create(BackendSettings.of(str(tmp_path), dtype="bfloat16"), "mlx")
    assert isinstance(engine, MlxEngine)
    request = RolloutRequest((np.array([3]),), Sampling(max_tokens=1, stop_ids=(0,)))
    ids = mx.array([[3, 4, 5, 6]])
    found = float64(MlxRollout(engine.policy, request, 1, 0)._logits(ids, None))
    hidden = engine.policy.trunk(ids)
    assert hidden.dtype == mx.bfloat16
    expected = float64(hidden) @ float64(engine.model.model.embed_tokens.weight).T
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE)


def test_float16_scales_of_a_base_are_kept(tmp_path: Path) -> None:
    """bfloat16 would round them, and with them every weight of the base."""
    write_qwen3(tmp_path / "plain", vocab_size=40, hidden=32, head_dim=8, intermediate=64, scale=0.2)
    model, config = load_model(tmp_path / "plain")
    model.set_dtype(mx.float16)
    model, config = quantize_model(model, config, group_size=32, bits=4)
    (tmp_path / "packed").mkdir()
    save_model(tmp_path / "packed", model)
    save_config(config, tmp_path / "packed" / "config.json")
    settings = BackendSettings.of(str(tmp_path / "packed"), dtype="bfloat16", lora=Lora(rank=2))
    engine = package.create(settings, "mlx")
    assert isinstance(engine, MlxEngine)
    layer = engine.model.model.layers[0].self_attn.q_proj.linear
    original = model.model.layers[0].self_attn.q_proj
    for key in ("scales", "biases"):
        assert layer[key].dtype == mx.float16
        np.testing.assert_array_equal(np.array(layer[key]), np.array(original[key]))
    assert engine.model.model.norm.weight.dtype == mx.bfloat16


@pytest.mark.parametrize("size", [1.0, 1e-9])
def test_gradients_of_float16_do_not_vanish(size: float, tmp_path: Path) -> None:
    """However little each of many tokens counts: the adapters' gradient is float32's, as far as 11 bits go."""
    write_qwen3(tmp_path, vocab_size=40, hidden=32, head_dim=8, intermediate=64, scale=0.2)
    ids = np.random.default_rng(0).integers(1, 40, 12)
    sequences = Sequences((ids[:2],), ids[2:], np.array([0, 10]))
    weights = size * np.random.default_rng(1).normal(size=10)
    gradients, scores = {}, {}
    for dtype in ("float32", "float16"):
        settings = BackendSettings.of(str(tmp_path), dtype=dtype, lora=Lora(rank=2), gradient_checkpointing=True)
        engine = package.create(settings, "mlx")
        assert isinstance(engine, MlxEngine)
        scores[dtype] = engine.score(sequences).logprobs
        engine.accumulate(sequences, Linear(sequences.starts, weights))
        gradients[dtype] = {name: np.array(part) / size for name, part in engine.optimizer.gradient.items()}
        assert {part.dtype for part in gradients[dtype].values()} == {np.dtype(np.float32)}
        assert engine.model.model.norm.weight.dtype == getattr(mx, dtype)
        engine.close()
    np.testing.assert_allclose(scores["float16"], scores["float32"], rtol=0, atol=0.02)
    for name, known in gradients["float32"].items():
        assert np.linalg.norm(gradients["float16"][name] - known) <= 0.02 * np.linalg.norm(known) + 1e-9, name


def test_float16_is_for_adapters(tmp_path: Path) -> None:
    write_qwen3(tmp_path, vocab_size=40, hidden=32, head_dim=8, intermediate=64)
    with pytest.raises(BackendError, match=r"float16.*add \[model.lora\]"):
        package.create(BackendSettings.of(str(tmp_path), dtype="float16"), "mlx")
    with pytest.raises(BackendError, match=r"float16.*--backend mlx"):
        registry.create("cpu", BackendSettings.of(str(tmp_path), dtype="float16", lora=Lora()))
