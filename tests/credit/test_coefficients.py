"""DelTA's coefficients against the method's definition, token by token."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest

from delta_cli.credit import DenseFeatures, output_row_features, token_coefficients

from . import oracle
from .samples import Rollout, bf16, rollout

MIXED = [0.7, -1.3, 0.0, 1.9, -0.4, 0.0, 0.2]
LENGTHS = [5, 9, 3, 1, 12, 4, 0]


def compare(batch: Rollout, **settings: object) -> None:
    """Weights and scores to 1e-6, margins to 1e-6 of their spread."""
    ours = token_coefficients(batch.features, batch.advantages, batch.starts, **settings)
    truth = oracle.coefficients(batch.hidden, batch.logp, batch.advantages, batch.starts, **settings)
    np.testing.assert_allclose(ours.weights, truth.weights, rtol=0, atol=1e-6)
    np.testing.assert_allclose(ours.alpha, truth.alpha, rtol=0, atol=1e-6)
    np.testing.assert_allclose(ours.margins, truth.margins, rtol=0, atol=1e-6 * (np.std(truth.margins) + 1e-12))


@pytest.mark.parametrize("refinements", [0, 1, 2, 3])
@pytest.mark.parametrize("seed", range(4))
def test_match_the_definition(refinements: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 14, 8).tolist()
    lengths[:2] = [1, 7]
    advantages = rng.normal(size=8)
    advantages[:2] = [0.5, -0.8]
    advantages[2] = 0
    compare(rollout(seed, lengths, advantages.tolist()), refinements=refinements)


def test_lag_of_the_temperatures_is_seen() -> None:
    """With the temperature of the newest margins the second score would differ by more than 1e-3."""
    batch = rollout(3, LENGTHS, MIXED)
    lagged = token_coefficients(batch.features, batch.advantages, batch.starts)
    newest = np.std(lagged.margins[np.repeat(batch.advantages, np.diff(batch.starts)) > 0])
    positive = np.repeat(batch.advantages, np.diff(batch.starts)) > 0
    unlagged = 1 / (1 + np.exp(-lagged.margins[positive] / newest))
    assert np.abs(unlagged - lagged.alpha[positive]).max() > 1e-3


@pytest.mark.parametrize("store", [np.float64, np.float32, np.float16, bf16])
def test_storage_of_the_hidden_states_does_not_matter(store: Callable[[np.ndarray], np.ndarray]) -> None:
    batch = rollout(11, LENGTHS, MIXED)
    batch.hidden = store(batch.hidden)
    compare(batch)


def test_a_common_offset_ten_thousand_times_the_contrast() -> None:
    """The difference of squared distances in float32 is off by more than the weights' range here."""
    batch = rollout(5, LENGTHS, MIXED)
    batch.hidden = (batch.hidden + np.float32(1e4)).astype(np.float32)
    compare(batch)


@pytest.mark.parametrize(
    ("advantages", "reason"),
    [
        ([1.0, 0.0, 2.0], "no response has a negative advantage"),
        ([-1.0, 0.0, -2.0], "no response has a positive advantage"),
        ([0.0, 0.0, 0.0], "every advantage is zero"),
        ([1.0, 2.0, -1.0], "no response has a negative advantage"),  # the negative one has no token
    ],
)
def test_no_contrast_gives_weights_of_one(advantages: list[float], reason: str) -> None:
    batch = rollout(0, [3, 4, 0], advantages)
    result = token_coefficients(batch.features, batch.advantages, batch.starts)
    assert result.degenerate == reason
    assert result.weights.tolist() == [1.0] * 7
    assert not result.alpha.any()
    assert not result.margins.any()


def test_an_empty_batch() -> None:
    features = DenseFeatures(np.zeros((0, 4)))
    for groups in (None, []):
        result = token_coefficients(features, [], [0], groups=groups)
        assert result.degenerate
        assert result.weights.shape == (0,)


def test_zero_advantage_takes_lambda_min_before_normalising() -> None:
    batch = rollout(2, LENGTHS, MIXED)
    zero = np.repeat(batch.advantages, np.diff(batch.starts)) == 0
    plain = token_coefficients(batch.features, batch.advantages, batch.starts, normalise="count")
    assert (plain.weights[zero] == 0.8).all()
    assert not plain.alpha[zero].any()
    normalised = token_coefficients(batch.features, batch.advantages, batch.starts)
    np.testing.assert_allclose(normalised.weights[zero], 0.8 * zero.size / plain.weights.sum(), rtol=1e-12)
    assert normalised.weights.mean() == pytest.approx(1, abs=1e-12)


def test_hand_worked() -> None:
    """Two tokens a side in one dimension, p = 0: centroids 2 and −1, K = 0.

    Margins are D+ = 2·3·(v − 0.5): 3 and 15 for v = 1 and 3, D− = 3 and 15 for v = 0 and −2;
    both sides have a standard deviation of 6.
    """
    features = output_row_features(np.array([[1.0], [3.0], [0.0], [-2.0]]), np.full(4, -np.inf))
    result = token_coefficients(features, [1.0, -1.0], [0, 2, 4], refinements=0)
    np.testing.assert_allclose(result.margins, [3, 15, 3, 15], rtol=1e-14)
    low, high = 1 / (1 + np.exp(-0.5)), 1 / (1 + np.exp(-2.5))
    np.testing.assert_allclose(result.alpha, [low, high, low, high], rtol=1e-14)
    lam = 0.8 + 0.4 * np.array([low, high, low, high])
    np.testing.assert_allclose(result.weights, lam / lam.mean(), rtol=1e-14)


# ---------------------------------------------------------------------------------- ablations


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 3.0},
        {"temperature": 1e3, "refinements": 2},
        {"score": "hard"},
        {"score": "hard", "refinements": 3},
        {"contrast": "within"},
        {"contrast": "within", "refinements": 2},
        {"weighting": "alpha"},
        {"weighting": "top"},
        {"weighting": "bottom", "share": 0.2},
        {"weighting": "top", "share": 1.0},
        {"normalise": "count"},
        {"normalise": "count", "weighting": "alpha"},
        {"lambda_min": 0.5, "lambda_max": 1.5},
        {"lambda_min": 0.0, "lambda_max": 1.0},
        {"lambda_min": 1.3, "lambda_max": 1.3},
    ],
    ids=str,
)
def test_ablations_match_the_definition(settings: dict[str, object]) -> None:
    compare(rollout(17, LENGTHS, MIXED), **settings)


def test_random_scores_lie_in_the_range_and_follow_the_generator() -> None:
    batch = rollout(1, [200, 200, 50], [1.0, -1.0, 0.0])

    def draw(seed: int) -> np.ndarray:
        rng = np.random.default_rng(seed)
        settings: dict[str, object] = {"score": "random", "normalise": "count"}
        return token_coefficients(batch.features, batch.advantages, batch.starts, rng=rng, **settings).weights

    weights = draw(0)
    assert (draw(0) == weights).all()
    assert (draw(1) != weights)[:400].all()
    assert weights.min() >= 0.8
    assert weights.max() <= 1.2
    assert weights[:400].mean() == pytest.approx(1.0, abs=0.025)  # four standard errors of 0.4/√(12·400)
    assert (weights[400:] == 0.8).all()


def test_a_random_share_keeps_that_many() -> None:
    batch = rollout(1, [20, 21], [1.0, -1.0])
    result = token_coefficients(
        batch.features, batch.advantages, batch.starts, weighting="random", share=0.25, rng=np.random.default_rng(4)
    )
    assert np.count_nonzero(result.weights) == 11  # ceil(0.25 · 41)
    assert result.weights.mean() == pytest.approx(1, abs=1e-12)


# ------------------------------------------------------------------------------------- groups


@pytest.mark.parametrize("refinements", [0, 1, 2])
def test_groups_match_the_definition(refinements: int) -> None:
    """Three groups with both signs, one without a contrast, one of zeros."""
    groups = [4, 4, 4, 9, 9, 2, 2, 7, 7, 1]
    advantages = [1.0, -0.5, 0.0, 2.0, -1.0, 1.0, 0.0, -0.3, 0.6, 0.0]
    batch = rollout(8, [4, 6, 2, 5, 3, 4, 2, 7, 1, 3], advantages)
    compare(batch, groups=groups, refinements=refinements)


def test_one_group_is_the_whole_batch() -> None:
    batch = rollout(8, LENGTHS, MIXED)
    grouped = token_coefficients(batch.features, batch.advantages, batch.starts, groups=[3] * len(MIXED))
    whole = token_coefficients(batch.features, batch.advantages, batch.starts)
    np.testing.assert_array_equal(grouped.weights, whole.weights)


def test_groups_without_any_contrast() -> None:
    batch = rollout(8, [3, 3], [1.0, -1.0])
    result = token_coefficients(batch.features, batch.advantages, batch.starts, groups=[0, 1])
    assert result.degenerate == "no group has advantages of both signs"
    assert (result.weights == 1).all()


# -------------------------------------------------------------------------------------- ranks


class Ranks:
    """all_sum over threads: everyone waits for everyone, then reads the same total."""

    def __init__(self, size: int) -> None:
        self.slots: list[np.ndarray] = [np.zeros(0)] * size
        self.barrier = threading.Barrier(size, timeout=10)

    def all_sum(self, rank: int) -> Callable[[np.ndarray], np.ndarray]:
        def add(array: np.ndarray) -> np.ndarray:
            self.slots[rank] = array
            self.barrier.wait()
            total = np.sum(self.slots, axis=0)
            self.barrier.wait()
            return total

        return add


class SummedFeatures(DenseFeatures):
    """A backend's features: its weighted sums are those of all ranks."""

    all_sum: Callable[[np.ndarray], np.ndarray]

    def weighted_sum(self, weights: np.ndarray) -> np.ndarray:
        return self.all_sum(super().weighted_sum(weights))


@pytest.mark.parametrize("refinements", [0, 1, 2])
@pytest.mark.parametrize(
    ("advantages", "split"),
    [
        ([0.7, -1.3, 0.0, 1.9, -0.4, 0.2], [2, 4]),
        ([0.7, 1.3, 0.0, -1.9, -0.4, 0.0], [3]),  # each rank has one side only
        ([0.7, -1.3, 0.0, 1.9, -0.4, 0.2], [0, 5]),  # a rank without a response
        ([0.7, 1.3, 0.0, 1.9, 0.4, 0.2], [3]),  # no contrast anywhere
    ],
)
def test_ranks_change_nothing(refinements: int, advantages: list[float], split: list[int]) -> None:
    batch = rollout(21, [5, 9, 3, 1, 12, 4], advantages)
    whole = token_coefficients(batch.features, batch.advantages, batch.starts, refinements=refinements)
    edges = [0, *split, len(advantages)]
    ranks, results = Ranks(len(edges) - 1), {}

    def work(rank: int) -> None:
        first, last = edges[rank], edges[rank + 1]
        tokens = slice(batch.starts[first], batch.starts[last])
        features = SummedFeatures(batch.hidden[tokens], batch.features.scale[tokens])
        features.all_sum = ranks.all_sum(rank)
        starts = batch.starts[first : last + 1] - batch.starts[first]
        results[rank] = token_coefficients(
            features, batch.advantages[first:last], starts, refinements=refinements, all_sum=features.all_sum
        )

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(len(edges) - 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {result.degenerate for result in results.values()} == {whole.degenerate}
    for name in ("weights", "alpha", "margins"):
        parts = np.concatenate([getattr(results[rank], name) for rank in range(len(edges) - 1)])
        np.testing.assert_allclose(parts, getattr(whole, name), rtol=1e-9, atol=1e-11)
