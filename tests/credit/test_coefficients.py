"""DelTA's coefficients against the method's definition, token by token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from backends.interface import token_index
from delta_cli.credit import DenseFeatures, TokenCoefficients, output_row_features, token_coefficients

from . import oracle
from .ranks import ThreadRanks, on_ranks
from .samples import Rollout, bf16, rollout, starts_of

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

ADVANTAGES = [0.7, -1.3, 0.0, 1.9, -0.4, 0.2, -0.6, 1.1]
GROUPS = [0, 0, 0, 1, 1, 1, 2, 2]
DEALS = {
    "halves": [[0, 1, 2, 3], [4, 5, 6, 7]],
    "groups straddle": [[0, 2, 3, 6], [1, 4, 5, 7]],
    "one has a single short response": [[3], [0, 1, 2, 4, 5, 6, 7]],
    "one has none": [[0, 1, 2, 3, 4, 5, 6, 7], []],
    "three": [[0, 5], [1, 6, 7], [2, 3, 4]],
    "sides apart": [[0, 3, 5, 7], [1, 2, 4, 6]],
}
SETTINGS: dict[str, dict[str, Any]] = {
    "paper": {},
    "K = 0": {"refinements": 0},
    "K = 2": {"refinements": 2},
    "by group": {"groups": GROUPS},
    "top": {"weighting": "top"},
    "bottom": {"weighting": "bottom", "share": 0.3},
    "random half": {"weighting": "random"},
    "random scores": {"score": "random"},
    "hard": {"score": "hard"},
    "within": {"contrast": "within"},
    "within, by group": {"contrast": "within", "groups": GROUPS},
    "alpha": {"weighting": "alpha"},
    "count": {"normalise": "count"},
    "fixed": {"temperature": 0.5},
    "a pair": {"temperature": (0.5, 2.0)},
    "median": {"centroid": "median"},
    "two shards": {"shards": 2},
    "three shards": {"shards": 3, "one_sided": "zero"},
}


def on_each_rank(
    batch: Any, deal: list[list[int]], settings: dict[str, Any], rows: list[list[int]] | None = None
) -> list[TokenCoefficients]:
    """The coefficients of every rank's own responses."""

    def work(ranks: ThreadRanks) -> TokenCoefficients:
        own = np.array(deal[ranks.rank], np.int64)
        tokens = token_index(batch.starts, own)
        changed = settings | ({"groups": np.array(GROUPS)[own]} if "groups" in settings else {})
        return token_coefficients(
            DenseFeatures(batch.hidden[tokens], batch.features.scale[tokens]),
            batch.advantages[own],
            starts_of(np.diff(batch.starts)[own]),
            rng=np.random.default_rng(3),
            ranks=ranks,
            rows=(rows or deal)[ranks.rank],
            **changed,
        )

    return on_ranks(len(deal), work)


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("deal", DEALS.values(), ids=DEALS)
def test_ranks_change_nothing(deal: list[list[int]], settings: dict[str, Any]) -> None:
    """Whoever holds which responses, every token has the weight that it has in one process."""
    batch = rollout(21, [5, 9, 3, 1, 12, 4, 7, 2], ADVANTAGES)
    whole = token_coefficients(batch.features, batch.advantages, batch.starts, rng=np.random.default_rng(3), **settings)
    for own, found in zip(deal, on_each_rank(batch, deal, settings), strict=True):
        tokens = token_index(batch.starts, np.array(own, np.int64))
        for name in ("weights", "alpha", "margins"):
            expected = getattr(whole, name)[tokens]
            np.testing.assert_allclose(getattr(found, name), expected, rtol=1e-9, atol=1e-11)
        assert found.degenerate is None


def test_ranks_agree_that_there_is_no_contrast() -> None:
    batch = rollout(21, [5, 9, 3, 1, 12, 4, 7, 2], np.abs(ADVANTAGES).tolist())
    for found in on_each_rank(batch, DEALS["three"], {}):
        assert found.degenerate == "no response has a negative advantage"
        assert set(found.weights) == {1.0}


@pytest.mark.parametrize(
    "rows", [[[0, 1, 2, 3], [4, 5, 6, 6]], [[1, 0, 2, 3], [4, 5, 6, 7]], [[1, 2, 3, 4], [5, 6, 7, 8]]]
)
def test_rows_number_every_response_once(rows: list[list[int]]) -> None:
    batch = rollout(21, [5, 9, 3, 1, 12, 4, 7, 2], ADVANTAGES)
    with pytest.raises(ValueError, match="number the 8 responses"):
        on_each_rank(batch, DEALS["halves"], {}, rows)
