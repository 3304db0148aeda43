"""What only the mlx backend does; what every backend must do is in tests/conformance."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("mlx.core", reason="MLX is not installed")

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.utils import load_adapters, load_model, quantize_model, save_config, save_model

from backends.interface import BackendError, Proxy, RolloutRequest, Sampling, Sequences
from backends.mlx import memory
from backends.mlx.features import MlxFeatures
from backends.mlx.head import MlxHead, pullback
from backends.mlx.optimizer import MlxAdamW
from backends.settings import Lora, Optimizer
from delta_cli.assets.random_model import write_qwen3
from tests.backends.mlx_engine import VOCAB, batch, create, write_small

LORA = Lora(rank=4, layers=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small(tmp_path_factory.mktemp("mlx") / "model")


@pytest.fixture(scope="module", params=[(4, "affine"), (8, "affine"), (4, "mxfp4")], ids=str)
def quantised(request: pytest.FixtureRequest, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    bits, mode = request.param
    model, config = quantize_model(*load_model(folder), group_size=32, bits=bits, mode=mode)
    path = tmp_path_factory.mktemp("quantised")
    save_model(path, model)
    save_config(config, path / "config.json")
    return path


def likelier(logp: np.ndarray, rows: np.ndarray) -> tuple[float, np.ndarray]:
    """The surrogate whose descent makes every token likelier."""
    return -float(logp.mean()), np.full(len(logp), -1 / len(logp))


# --------------------------------------------------------------------------- score and features


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.long), "bfloat16"])
@pytest.mark.parametrize("proxy", [Proxy("output_row"), Proxy("hidden_topk", k=3), Proxy("hidden_exact")])
def test_features_are_the_same_wherever_they_live(folder: Path, dtype: str, proxy: Proxy) -> None:
    """On the device, the host or nowhere, in both storage types: the same bits, so the same sums."""
    sequences, row = batch(), 32 * (2 if dtype == "bfloat16" else 4)
    weights = np.random.default_rng(1).normal(size=(3, len(sequences.tokens)))
    direction = np.random.default_rng(2).normal(size=32)
    results = {}
    for kept in ((40, 0), (0, 40), (0, 0), (7, 16), (13, 0)):
        settings = {"dtype": dtype, "feature_bytes": kept[0] * row, "feature_host_bytes": kept[1] * row + row - 1}
        features = create(folder, **settings, head_chunk_tokens=4).score(sequences, proxy).features
        assert isinstance(features, MlxFeatures)
        places = {position: type(values) for positions, values in features.store.chunks for position in positions}
        assert places == dict.fromkeys(range(kept[0]), mx.array) | dict.fromkeys(range(kept[0], sum(kept)), np.ndarray)
        results[kept] = [features.weighted_sum(weights), features.squared_norms(), features.project(direction)]
        view = features.slice(5, 25)
        np.testing.assert_allclose(view.project(direction), results[kept][2][5:25], rtol=1e-5, atol=1e-5)
    tolerance = {"float32": 2e-6, "bfloat16": 2**-6}[dtype]
    for kept, found in results.items():
        for one, expected in zip(found, results[40, 0], strict=True):
            exact = kept in ((0, 40), (0, 0))  # a cut inside a chunk makes two sums of one
            atol = 0 if exact else tolerance * np.abs(expected).max()
            np.testing.assert_allclose(one, expected, atol=atol, rtol=0)


@pytest.mark.parametrize("scoring", [True, False], ids=["scoring", "again"])
def test_out_of_memory_without_gradient(folder: Path, scoring: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """While scoring, and while features that were not kept are computed again: nothing is summed twice."""
    sequences, weights = batch(), np.random.default_rng(1).normal(size=(3, 40))
    backend = create(folder, feature_bytes=2**20 if scoring else 0, feature_host_bytes=0, micro_batch_tokens=30)
    features = backend.score(sequences, Proxy()).features
    hidden, sizes, limit = backend._hidden, [], 20

    def limited(part: Any) -> mx.array:
        sizes.append(part.ids.size)
        if len(sizes) > 1 and part.ids.size > limit:  # after the first micro-batch
            raise RuntimeError("[malloc_or_wait] Unable to allocate 42 bytes.")
        return hidden(part)

    def sums() -> np.ndarray:
        sizes.clear()
        found = backend.score(sequences, Proxy()).features if scoring else features
        assert found is not None
        return found.weighted_sum(weights)

    expected = sums()
    monkeypatch.setattr(backend, "_hidden", limited)
    np.testing.assert_allclose(sums(), expected, rtol=0, atol=1e-5)
    assert max(sizes) > limit
    np.testing.assert_allclose(sums(), expected, rtol=0, atol=1e-5)
    assert max(sizes) <= limit  # the micro-batch stays small
    limit = 5
    with pytest.raises(BackendError, match=r"single sequence of 1\d tokens"):
        sums()


def test_logits_of_all_tokens_never_exist(tmp_path: Path) -> None:
    """Neither forward nor backward reaches half of what they would take."""
    write_qwen3(tmp_path, vocab_size=6000, hidden=16, layers=1, head_dim=4, intermediate=16)
    backend = create(tmp_path, head_chunk_tokens=32)
    sequences = batch(responses=8, length=100)
    whole = len(sequences.tokens) * 6000 * 4
    for use in (backend.score, lambda sequences: backend.accumulate(sequences, likelier)):
        mx.clear_cache()
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        use(sequences)
        assert mx.get_peak_memory() - before < whole / 2


def test_pullback_of_a_quantised_head() -> None:
    """Against float64 on the dequantised rows."""
    rng = np.random.default_rng(0)
    module = nn.QuantizedLinear(32, VOCAB, bias=False, group_size=32, bits=4)
    head = MlxHead.of(module, "lm_head")
    rows = np.array(head.rows(mx.arange(VOCAB)), dtype=np.float64)
    hidden, targets, dlogp = rng.normal(size=(7, 32)), rng.integers(0, VOCAB, 7), rng.normal(size=7)
    got = pullback(head, mx.array(hidden.astype(np.float32)), mx.array(targets), lambda logp: dlogp, 0.7, 3)
    logits = torch.tensor(hidden @ rows.T / 0.7, requires_grad=True)
    logp = torch.log_softmax(logits, -1)[torch.arange(7), torch.tensor(targets)]
    (logp * torch.tensor(dlogp)).sum().backward()
    np.testing.assert_allclose(np.array(got), logits.grad.numpy() / 0.7 @ rows, rtol=1e-4, atol=1e-5)


# -------------------------------------------------------------------------------------- update


@pytest.mark.parametrize(("chunk", "again"), [(40, 0), (16, 0), (8, 2 * 5 * 8)])
def test_an_update_makes_logits_once_where_responses_fit_a_chunk(
    chunk: int, again: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of longer ones all but those at hand last are made again: of 16 tokens in chunks of 8, one chunk each."""
    write_qwen3(tmp_path, vocab_size=VOCAB, hidden=16, layers=1, head_dim=4, intermediate=16)
    backend, sequences = create(tmp_path, head_chunk_tokens=chunk), batch(responses=10, length=16)
    logits, made = MlxHead.logits, 0

    def counted(self: MlxHead, hidden: mx.array) -> mx.array:
        nonlocal made
        made += len(hidden)
        return logits(self, hidden)

    monkeypatch.setattr(MlxHead, "logits", counted)
    backend.accumulate(sequences, likelier)
    assert made == len(sequences.tokens) + again


def test_checkpointing_saves_memory_changes_nothing_and_touches_no_other_model(tmp_path: Path) -> None:
    write_qwen3(tmp_path, vocab_size=VOCAB, hidden=32, head_dim=8, layers=8, scale=0.2)
    sequences = batch(responses=4, length=100)
    plain, saving = create(tmp_path), create(tmp_path, gradient_checkpointing=True)
    call = type(plain.model.layers[0]).__call__
    peaks = []
    for backend in (plain, saving, plain):  # once more, to see that the second left the class alone
        backend.optimizer.gradient = {}
        mx.clear_cache()
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        backend.accumulate(sequences, likelier)
        peaks.append(mx.get_peak_memory() - before)
    assert type(saving.model.layers[0]) is type(plain.model.layers[0])
    assert type(plain.model.layers[0]).__call__ is call
    assert peaks[1] < peaks[0] / 2
    assert peaks[2] > peaks[1] * 2
    for name, gradient in plain.optimizer.gradient.items():
        np.testing.assert_allclose(saving.optimizer.gradient[name], gradient, rtol=1e-4, atol=1e-7)


class Counting:
    """``likelier`` that counts the tokens it has seen since it last started."""

    def __init__(self, tokens: int) -> None:
        self.tokens, self.seen = tokens, 0

    def __call__(self, logp: np.ndarray, rows: np.ndarray) -> tuple[float, np.ndarray]:
        self.seen += len(logp)
        return -float(logp.sum()) / self.tokens, np.full(len(logp), -1 / self.tokens)

    def restart(self) -> None:
        self.seen = 0


def test_out_of_memory_halves_the_micro_batch_with_the_same_result(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gradient(limit: int) -> tuple[float, dict[str, np.ndarray]]:
        backend = create(folder)
        backward = backend._backward

        def within(part: Any, *arguments: Any) -> float:
            loss = backward(part, *arguments)  # fails after the surrogate has seen it
            if part.tokens > limit:
                raise RuntimeError("[malloc_or_wait] Unable to allocate 42 bytes.")
            return loss

        monkeypatch.setattr(backend, "_backward", within)
        surrogate = Counting(len(batch().tokens))
        backend.accumulate(batch(), surrogate)  # a gradient from before is kept
        loss = backend.accumulate(batch(), surrogate)
        assert surrogate.seen == 2 * len(batch().tokens)  # nothing twice, whatever was started over
        return loss, {name: np.array(part) for name, part in backend.optimizer.gradient.items()}

    whole, halved = gradient(10_000), gradient(30)
    assert halved[0] == pytest.approx(whole[0], rel=1e-6)
    largest = max(np.abs(part).max() for part in whole[1].values())
    for name, part in whole[1].items():
        np.testing.assert_allclose(halved[1][name], part, rtol=0, atol=1e-6 * largest)
    with pytest.raises(BackendError, match=r"single sequence of 1\d tokens"):
        gradient(5)


def test_adamw_is_that_of_torch() -> None:
    """Five steps with clipped and unclipped gradients; the updates agree, not the weights alone."""
    rng = np.random.default_rng(0)
    start = rng.normal(size=(5, 7)).astype(np.float32) * 1e-3
    settings = Optimizer(beta1=0.9, beta2=0.999, epsilon=1e-8, weight_decay=0.1, max_grad_norm=1.0)
    ours = MlxAdamW({"w": mx.array(start)}, settings)
    weight = torch.nn.Parameter(torch.tensor(start, dtype=torch.float64))
    theirs = torch.optim.AdamW([weight], lr=1e-2, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1)
    for size in (0.01, 3.0, 0.1, 1.0, 1e-5):
        gradient = (size * rng.normal(size=start.shape)).astype(np.float32)
        weight.grad = torch.tensor(0.5 * gradient, dtype=torch.float64)
        norm = torch.nn.utils.clip_grad_norm_([weight], 1.0)
        theirs.step()
        ours.add({"w": mx.array(gradient)})
        assert ours.step(1e-2, scale=0.5) == pytest.approx(norm.item(), rel=1e-6)
        moved, expected = np.array(ours.weights["w"]) - start, weight.detach().numpy() - start
        np.testing.assert_allclose(moved, expected, rtol=1e-6, atol=1e-8)


def test_bfloat16_training_keeps_what_a_bfloat16_weight_would_round_away(folder: Path) -> None:
    """At learning rate 1e-6 the masters move by that much; the weights of the compute are their rounding."""
    backend = create(folder, dtype="bfloat16")
    before = {name: np.array(weight) for name, weight in backend.optimizer.weights.items()}
    for _ in range(3):
        backend.accumulate(batch(), likelier)
        backend.step(1e-6)
    name = "model.layers.0.mlp.up_proj.weight"
    moved = np.abs(np.array(backend.optimizer.weights[name]) - before[name])
    assert np.median(moved) == pytest.approx(3e-6, rel=0.2)
    compute = dict(tree_flatten(backend.model.parameters()))[name]
    assert compute.dtype == mx.bfloat16
    rounded = mx.array(before[name]).astype(mx.bfloat16)
    assert mx.mean(compute == rounded).item() > 0.9, "an update in bfloat16 would have been lost"
    assert mx.all(compute == backend.optimizer.weights[name].astype(mx.bfloat16)).item()


def test_bfloat16_rollouts_and_scores_agree(folder: Path) -> None:
    backend = create(folder, dtype="bfloat16")
    prompts = [np.array([3, 4]), np.array([9, 8, 7, 6])]
    drawn = backend.rollout(RolloutRequest(tuple(prompts), Sampling(max_tokens=12, stop_ids=(0,), samples=2)))
    rows = tuple(prompt for prompt in prompts for _ in range(2))
    scored = backend.score(Sequences(rows, drawn.tokens, drawn.starts)).logprobs
    np.testing.assert_allclose(drawn.logprobs, scored, atol=0.05)


# ------------------------------------------------------------------------- adapters and export


def test_adapters_on_a_quantised_base(quantised: Path, tmp_path: Path) -> None:
    """They train, the base does not; the export is plain and computes the same, and so do base + adapter/."""
    backend = create(quantised, lora=LORA, keep_reference=True)
    sequences = batch()
    before = backend.score(sequences).logprobs
    base = {name: np.array(value) for name, value in tree_flatten(backend.model.parameters()) if "lora" not in name}
    for _ in range(3):
        backend.accumulate(sequences, likelier)
        assert backend.step(0.02) > 0
    after = backend.score(sequences).logprobs
    assert after.mean() > before.mean() + 0.1
    np.testing.assert_array_equal(backend.reference(sequences), before)
    for name, value in tree_flatten(backend.model.parameters()):
        if "lora" not in name:
            np.testing.assert_array_equal(value, base[name])

    backend.export(tmp_path)
    assert "quantization" not in json.loads((tmp_path / "config.json").read_text())
    np.testing.assert_array_equal(backend.score(sequences).logprobs, after)  # exporting left the policy alone
    np.testing.assert_allclose(create(tmp_path).score(sequences).logprobs, after, atol=1e-5)
    model = load_adapters(load_model(quantised)[0], str(tmp_path / "adapter"))
    ids = np.concatenate([sequences.prompts[0], sequences.response(0)])
    logits = np.array(model(mx.array(ids[None]))[0], dtype=np.float64)
    logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    np.testing.assert_allclose(logp[np.arange(10), ids[1:]], after[:10], atol=1e-4)


def test_a_quantised_base_needs_adapters(quantised: Path) -> None:
    with pytest.raises(BackendError, match=r"add \[model.lora\]"):
        create(quantised)


def test_adapters_are_a_function_of_the_seed(folder: Path) -> None:
    first, again, other = (create(folder, lora=LORA, seed=seed).optimizer.weights for seed in (1, 1, 2))
    name = "model.layers.1.self_attn.q_proj.lora_a"
    np.testing.assert_array_equal(first[name], again[name])
    assert not np.array_equal(first[name], other[name])


def test_state_of_another_model_is_refused(folder: Path, tmp_path: Path) -> None:
    create(folder, lora=LORA).save(tmp_path)
    with pytest.raises(BackendError, match=r"'.*' does not fit"):
        create(folder).load(tmp_path)
    with pytest.raises(BackendError, match="cannot read the training state"):
        create(folder).load(tmp_path / "nothing")


@pytest.mark.parametrize(("together", "evaluations"), [(2**26, 1), (3 * 40, 4), (1, 10)])
def test_small_parameters_are_updated_together(
    together: int, evaluations: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten of 40 bytes each: evaluated at once, three at a time, or one by one, to the same bits."""
    rng = np.random.default_rng(0)
    start = {str(i): mx.array(rng.normal(size=10).astype(np.float32)) for i in range(10)}
    gradient = {name: mx.array(rng.normal(size=10).astype(np.float32)) for name in start}
    alone = MlxAdamW(start, Optimizer())
    alone.add(gradient)
    alone.step(0.1, 1.0)
    calls: list[int] = []
    evaluate = mx.eval
    ours = MlxAdamW(start, Optimizer())
    ours.add(gradient)
    monkeypatch.setattr("backends.mlx.optimizer.TOGETHER", together)
    monkeypatch.setattr(mx, "eval", lambda arrays: (calls.append(len(arrays)), evaluate(arrays)))
    ours.step(0.1, 1.0)
    assert len([count for count in calls if count]) == evaluations
    for name in start:
        np.testing.assert_array_equal(np.array(ours.weights[name]), np.array(alone.weights[name]))


def test_memory_limits_are_the_recommended_ones_until_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {"wired": 1, "cache": 2}

    def setter(kind: str) -> Any:
        return lambda value: [limits[kind], limits.update({kind: value})][0]

    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(mx, "device_info", lambda: {"max_recommended_working_set_size": 1000})
    monkeypatch.setattr(mx, "set_wired_limit", setter("wired"))
    monkeypatch.setattr(mx, "set_cache_limit", setter("cache"))
    held = memory.MlxMemoryLimits()
    assert limits == {"wired": 1000, "cache": 250}
    held.restore()
    held.restore()
    assert limits == {"wired": 1, "cache": 2}
