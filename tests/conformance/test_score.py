"""Log-probabilities, entropies and features of a fixed batch are those of the oracle."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from backends.interface import Engine, Proxy, Sequences

from .conftest import Make, Tolerance
from .oracle import Oracle
from .tiny_model import VOCAB, make_sequences

PROXIES = [
    Proxy("output_row"),
    Proxy("hidden_topk", k=5),
    Proxy("hidden_topk", k=VOCAB + 1),
    Proxy("hidden_exact"),
]


ROW = 16 * 4  # bytes of one token's features: H float32
BUDGETS = {
    "device": (2**20, 0),
    "device+host": (5 * ROW, 2**20),
    "host": (0, 2**20),
    "device+recomputed": (5 * ROW, 0),
    "device+host+recomputed": (5 * ROW, 7 * ROW),
    "recomputed": (ROW - 1, ROW - 1),
}


def relative_error(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def test_oracle_is_transformers_own_model(folders: dict[str, Path]) -> None:
    """Making transformers float64 throughout changes it no more than its float32 operations would."""
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


def test_temperature_zero_is_read_as_one(backend: Engine) -> None:
    zero, one = (backend.score(make_sequences(temperature=value)) for value in (0.0, 1.0))
    np.testing.assert_array_equal(zero.logprobs, one.logprobs)


@pytest.mark.parametrize("proxy", PROXIES, ids=lambda proxy: f"{proxy.kind}-{proxy.k}")
def test_features(make: Make, either: Path, sequences: Sequences, proxy: Proxy, tolerance: Tolerance) -> None:
    """Weighted sums with a single weight of 1 are the vectors themselves; everything else follows from them."""
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


@pytest.mark.parametrize(
    "proxy",
    [Proxy("output_row"), pytest.param(Proxy("hidden_exact"), marks=pytest.mark.long)],
    ids=lambda proxy: proxy.kind,
)
@pytest.mark.parametrize("budgets", BUDGETS.values(), ids=BUDGETS)
def test_where_features_live_changes_nothing(
    make: Make, oracle: Oracle, sequences: Sequences, budgets: tuple[int, int], proxy: Proxy, tolerance: Tolerance
) -> None:
    """The chunks end inside responses; the views lie before, across and after those ends, and one is empty."""
    expected = oracle.vectors(sequences, proxy)  # [N, H]
    backend = make(feature_bytes=budgets[0], feature_host_bytes=budgets[1], micro_batch_tokens=24)
    features = backend.score(sequences, proxy).features
    assert features is not None
    count, size = expected.shape
    rng = np.random.default_rng(0)
    weights, direction = rng.standard_normal((2, count)), rng.standard_normal(size)
    for start, stop in ((0, count), (1, 4), (3, 9), (6, 12), (3, 15), (13, count - 1), (7, 7)):
        view, v, w = features.slice(start, stop), expected[start:stop], weights[:, start:stop]
        for found, exact, whole in (
            (view.weighted_sum(w), w @ v, weights @ expected),
            (view.project(direction), v @ direction, expected @ direction),
            (view.squared_norms(), np.square(v).sum(1), 2 * np.square(expected).sum(1)),
        ):
            assert found.dtype == np.float64
            np.testing.assert_allclose(found, exact, atol=tolerance.feature * np.abs(whole).max(), rtol=0)
    features.close()
    features.close()


@pytest.mark.parametrize("change", ["step", "load"])
def test_features_are_not_recomputed_with_other_weights(
    make: Make, name: str, sequences: Sequences, change: str, tmp_path: Path
) -> None:
    """Features that were kept do not change."""
    if name == "fake":
        pytest.skip("the fake backend keeps all features")
    backend = make(feature_bytes=5 * ROW, feature_host_bytes=0)
    features = backend.score(sequences, Proxy("output_row")).features
    assert features is not None
    kept, before = features.slice(0, 5), features.project(np.ones(16))
    backend.save(tmp_path)  # the same weights
    np.testing.assert_array_equal(features.project(np.ones(16)), before)
    if change == "step":
        backend.accumulate(sequences, lambda logp, rows: (-float(logp.sum()), -np.ones(len(logp))))
        backend.step(1e-3)
    else:
        backend.load(tmp_path)
    for reduce in (lambda: features.weighted_sum(np.eye(24)), lambda: features.project(np.ones(16))):
        with pytest.raises(RuntimeError, match=r"cannot be computed again; .* before step\(\) and load\(\)"):
            reduce()
    np.testing.assert_array_equal(kept.project(np.ones(16)), before[:5])
    features.close()


def test_weighted_sum_and_projection_are_adjoint(backend: Engine, sequences: Sequences, tolerance: Tolerance) -> None:
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
    [{"micro_batch_tokens": 1}, {"micro_batch_tokens": 24}, {"head_chunk_tokens": 3}],
    ids=lambda settings: "-".join(map(str, *settings.items())),
)
def test_budgets_change_nothing(
    make: Make, backend: Engine, sequences: Sequences, settings: dict[str, int], tolerance: Tolerance
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


def test_parameters_are_counted(backend: Engine, oracle: Oracle, name: str) -> None:
    expected = sum(weight.size for weight in oracle.weights().values())
    assert (backend.name, backend.parameters, backend.trainable) == (name, expected, expected)
    assert backend.peak_memory() > 0
