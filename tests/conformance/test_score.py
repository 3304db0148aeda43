"""Log-probabilities, entropies and features of a fixed batch, against the oracle."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from backends.interface import Backend, Proxy, Sequences

from .conftest import VOCAB, Make, Tolerance, make_sequences
from .oracle import Oracle

PROXIES = [
    Proxy("output_row"),
    Proxy("hidden_topk", k=5),
    Proxy("hidden_topk", k=VOCAB + 1),
    Proxy("hidden_exact"),
]


def relative_error(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def test_oracle_is_transformers_own_model(folders: dict[str, Path]) -> None:
    """What makes the oracle float64 throughout changes it by no more than transformers' float32 islands."""
    for folder in folders.values():
        exact = Oracle(folder).distributions(make_sequences()).log
        stock = Oracle(folder, stock=True).distributions(make_sequences()).log
        torch.testing.assert_close(exact, stock, atol=5e-6, rtol=0)


def test_logprobs_and_entropies(make: Make, either: Path, sequences_at: Sequences, tolerance: Tolerance) -> None:
    with torch.no_grad():
        expected = Oracle(either).distributions(sequences_at)
    scores = make(either).score(sequences_at)
    assert scores.features is None
    assert scores.logprobs.dtype == scores.entropies.dtype == np.float32
    np.testing.assert_allclose(scores.logprobs, expected.logprobs, atol=tolerance.logprob, rtol=0)
    np.testing.assert_allclose(scores.entropies, expected.entropies, atol=tolerance.logprob, rtol=0)


def test_temperature_zero_is_read_as_one(backend: Backend) -> None:
    zero, one = (backend.score(make_sequences(temperature=value)) for value in (0.0, 1.0))
    np.testing.assert_array_equal(zero.logprobs, one.logprobs)


@pytest.mark.parametrize("proxy", PROXIES, ids=lambda proxy: f"{proxy.kind}-{proxy.k}")
def test_features(make: Make, either: Path, sequences: Sequences, proxy: Proxy, tolerance: Tolerance) -> None:
    """Weighted sums with one weight each are the vectors themselves; everything else follows from them."""
    expected = Oracle(either).vectors(sequences, proxy)  # [N, H]
    features = make(either).score(sequences, proxy).features
    assert features is not None
    count = len(expected)
    vectors = features.weighted_sum(np.eye(count))
    assert vectors.dtype == np.float64
    assert relative_error(vectors, expected) < tolerance.feature
    norms = features.squared_norms()
    assert norms.dtype == np.float64
    assert relative_error(norms, np.square(expected).sum(1)) < 2 * tolerance.feature

    part = features.slice(3, count - 2)
    assert relative_error(part.weighted_sum(np.eye(count - 5)), expected[3:-2]) < tolerance.feature
    direction = np.random.default_rng(0).standard_normal(expected.shape[1])
    assert relative_error(part.project(direction), expected[3:-2] @ direction) < tolerance.feature
    features.close()
    features.close()


def test_weighted_sum_and_projection_are_adjoint(backend: Backend, sequences: Sequences, tolerance: Tolerance) -> None:
    """⟨weighted_sum(w), d⟩ = ⟨w, project(d)⟩ for any w and d."""
    features = backend.score(sequences, Proxy("hidden_exact")).features
    assert features is not None
    rng = np.random.default_rng(3)
    weights, direction = rng.standard_normal((2, len(sequences.tokens))), rng.standard_normal(16)
    sums, projections = features.weighted_sum(weights), features.project(direction)
    assert sums.shape == (2, 16)
    assert projections.shape == (len(sequences.tokens),)
    assert relative_error(sums @ direction, weights @ projections) < tolerance.feature


@pytest.mark.parametrize(
    "settings",
    [{"micro_batch_tokens": 1}, {"micro_batch_tokens": 24}, {"head_chunk_tokens": 3}, {"feature_bytes": 1}],
    ids=lambda settings: "-".join(map(str, *settings.items())),
)
def test_budgets_change_nothing(
    make: Make, backend: Backend, sequences: Sequences, settings: dict[str, int], tolerance: Tolerance
) -> None:
    proxy, weights = Proxy("output_row"), np.random.default_rng(0).standard_normal((2, len(sequences.tokens)))
    whole, split = backend.score(sequences, proxy), make(**settings).score(sequences, proxy)
    np.testing.assert_allclose(split.logprobs, whole.logprobs, atol=tolerance.logprob, rtol=0)
    np.testing.assert_allclose(split.entropies, whole.entropies, atol=tolerance.logprob, rtol=0)
    assert whole.features is not None
    assert split.features is not None
    expected = whole.features.weighted_sum(weights)
    assert relative_error(split.features.weighted_sum(weights), expected) < tolerance.feature
    assert relative_error(split.features.project(expected[0]), whole.features.project(expected[0])) < tolerance.feature


def test_parameters_are_counted(backend: Backend, oracle: Oracle, name: str) -> None:
    expected = sum(weight.size for weight in oracle.weights().values())
    assert (backend.name, backend.parameters, backend.trainable) == (name, expected, expected)
    assert backend.peak_memory() > 0


def test_one_process_sums_alone(backend: Backend) -> None:
    np.testing.assert_array_equal(backend.all_sum(np.arange(3.0)), np.arange(3.0))
