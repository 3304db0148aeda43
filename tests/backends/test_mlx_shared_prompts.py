"""MLX: prompts computed once for all their responses, and gradients a layer at a time; against neither."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("mlx.core", reason="MLX is not installed")

import mlx.core as mx

from backends.batching import shared_batches
from backends.interface import Proxy, Sequences, starts_of
from backends.mlx.backend import MlxEngine
from backends.mlx.shared_prompts import PromptCache, ResponseCache
from backends.settings import Lora
from delta_cli.assets.random_model import write_qwen3
from tests.backends import mlx_engine
from tests.conformance.objectives import Linear

VOCAB = 23
LENGTHS = (5, 0, 1, 7, 6, 2, 11, 4, 4, 1, 3)
PROMPT_OF = (0, 0, 0, 0, 1, 1, 1, 2, 2, 2, 2)
PROMPTS = (9, 17, 1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_qwen3(
        folder, vocab_size=VOCAB, hidden=16, layers=3, heads=4, kv_heads=2, head_dim=8, intermediate=24, scale=0.3
    )
    return folder


def sequences() -> Sequences:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(1, VOCAB, length) for length in PROMPTS]
    return Sequences(
        tuple(prompts[p] for p in PROMPT_OF), rng.integers(1, VOCAB, sum(LENGTHS)), starts_of(LENGTHS), 0.8
    )


def create(folder: Path, share: bool, **settings: Any) -> MlxEngine:
    engine = mlx_engine.create(folder, **settings)
    assert engine.shares_prompts
    engine.shares_prompts = share
    return engine


def gradient(engine: MlxEngine) -> dict[str, np.ndarray]:
    batch = sequences()
    engine.accumulate(batch, Linear(batch.starts, np.random.default_rng(1).standard_normal(len(batch.tokens))))
    return {name: np.array(part) for name, part in engine.optimizer.gradient.items()}


def close(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    largest = max(np.abs(part).max() for part in expected.values())
    for name, part in expected.items():
        np.testing.assert_allclose(found[name], part, rtol=0, atol=1e-6 * largest, err_msg=name)


@pytest.mark.parametrize(
    "budget", [pytest.param(16384, marks=pytest.mark.long), pytest.param(40, marks=pytest.mark.long), 20]
)
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("lora", [None, Lora(rank=2, targets=("q_proj", "up_proj"), layers=1)])
def test_the_gradient_is_that_of_each_with_its_own_prompt(
    lora: Lora | None, checkpointing: bool, budget: int, folder: Path
) -> None:
    apart = create(folder, False, lora=lora)
    together = create(folder, True, lora=lora, gradient_checkpointing=checkpointing, micro_batch_tokens=budget)
    if lora:  # fresh adapters are zero on one side
        for engine in (apart, together):
            weights = {
                n: mx.array(np.random.default_rng(7).standard_normal(w.shape))
                for n, w in engine.optimizer.weights.items()
            }
            engine.optimizer.weights = {name: weight.astype(mx.float32) for name, weight in weights.items()}
            engine._update_model()
    close(gradient(together), gradient(apart))


def test_scores_and_features(folder: Path) -> None:
    one, other = (create(folder, share).score(sequences(), Proxy("output_row")) for share in (True, False))
    np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)
    np.testing.assert_allclose(one.entropies, other.entropies, atol=1e-5)
    assert one.features is not None
    assert other.features is not None
    each = np.eye(len(one.logprobs))
    np.testing.assert_allclose(one.features.weighted_sum(each), other.features.weighted_sum(each), atol=1e-5)


@pytest.mark.parametrize("budget", [16384, 60, 30, 1])
def test_batches_hold_every_token_once_within_the_budget(budget: int) -> None:
    given = sequences()
    batches = shared_batches(given, budget)
    rows = np.concatenate([batch.rows for batch in batches])
    assert sorted(rows.tolist()) == [row for row, length in enumerate(LENGTHS) if length]
    for batch in batches:
        assert batch.tokens <= budget or len(batch.rows) == 1
        flat = [*batch.prompts.ravel(), *batch.responses.ravel()]
        assert len(batch.predicts) == len(batch.targets) == sum(LENGTHS[row] for row in batch.rows)
        before = iter(batch.predicts.tolist())
        for row in batch.rows:  # the token before each of a response's, the prompt's last one first
            context = [*given.prompts[row][-1:], *given.response(row)[:-1]]
            assert [flat[next(before)] for _ in context] == context
    if budget == 16384:
        assert sum(batch.prompts.shape[0] for batch in batches) < len(LENGTHS)


class Calls:
    """How often the layers of an engine are called, and with how many tokens."""

    def __init__(self, engine: MlxEngine, patch: pytest.MonkeyPatch) -> None:
        self.seen: Counter[int] = Counter()
        self.tokens = 0
        original = type(engine.model.layers[0]).__call__

        def counting(layer: Any, hidden: mx.array, *rest: Any, **options: Any) -> mx.array:
            self.seen[id(layer)] += 1
            self.tokens += hidden.shape[0] * hidden.shape[1]
            return original(layer, hidden, *rest, **options)

        patch.setattr(type(engine.model.layers[0]), "__call__", counting)


def test_each_layer_is_called_twice_for_a_gradient(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = create(folder, False, gradient_checkpointing=True)
    calls = Calls(engine, monkeypatch)
    gradient(engine)
    assert set(calls.seen.values()) == {2}


def test_a_prompt_is_computed_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = {}
    for share in (False, True):
        engine = create(folder, share)
        with monkeypatch.context() as patch:
            calls = Calls(engine, patch)
            engine.score(sequences())
        tokens[share] = calls.tokens
    assert tokens[True] < 0.75 * tokens[False]


@pytest.mark.parametrize("window", [None, 4])
def test_who_sees_whom(window: int | None) -> None:
    """Of prompts of 2 and 5 tokens and responses of 3, against a loop over positions."""
    lengths, of, width, count = np.array([2, 5]), np.array([1, 0, 1]), 5, 3
    cache = ResponseCache(PromptCache(), lengths, of, width, array_masks=True)
    mask = np.array(cache.make_mask(count, window_size=window))
    for row, prompt in enumerate(of):
        for query in range(count):
            at = lengths[prompt] + query
            positions = [
                *(p if p < lengths[prompt] else None for p in range(width)),
                *(lengths[prompt] + k for k in range(count)),
            ]
            expected = [p is not None and p <= at and (window is None or at - p < window) for p in positions]
            assert mask[row, 0, query].tolist() == expected


def test_layers_that_are_no_chain_are_differentiated_in_one_trace(folder: Path) -> None:
    """Here each takes twice the output of the one before."""
    engines = [create(folder, True, gradient_checkpointing=saving) for saving in (True, False)]
    for engine in engines:
        inner = engine.policy.text.model

        class Doubling(type(inner)):  # type: ignore[misc]
            def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
                hidden = self.embed_tokens(inputs)
                for layer, kept in zip(self.layers, cache or [None] * len(self.layers), strict=True):
                    hidden = layer(2 * hidden, (kept or PromptCache()).make_mask(inputs.shape[1]), kept)
                return self.norm(hidden)

        inner.__class__ = Doubling
        engine._find_capabilities()
    saving, whole = (gradient(engine) for engine in engines)
    assert not engines[0]._by_layer
    assert not engines[0].shares_prompts, "checkpoints do not differentiate through a cache"
    assert engines[1].shares_prompts
    close(saving, whole)
