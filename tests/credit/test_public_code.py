"""What the public code does otherwise, as options: each against a rule written out a second time.

Token by token in float64 loops; none of it calls what it checks.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

from delta_cli.credit import CoefficientSettings, token_coefficients
from delta_cli.credit.coefficients import CentroidKind

from . import oracle
from .samples import Rollout, rollout

LENGTHS = [5, 9, 3, 1, 12, 4]
MIXED = [0.7, -1.3, 0.4, 1.9, -0.4, 0.2]


def close(first: np.ndarray, second: object, tolerance: float = 1e-9) -> None:
    np.testing.assert_allclose(first, np.array(second), rtol=tolerance, atol=1e-11)


# ---------------------------------------------------------------------------------------- shards


@pytest.mark.parametrize("refinements", [0, 1, 2, 3])
def test_shards_are_batches_of_their_own(refinements: int) -> None:
    """The oracle on each half alone: its centroids, its temperatures, its normaliser."""
    batch = rollout(3, LENGTHS, MIXED)
    found = token_coefficients(batch.features, batch.advantages, batch.starts, refinements=refinements, shards=2)
    expected: list[float] = []
    for rows in (slice(0, 3), slice(3, 6)):
        first, last = batch.starts[rows.start], batch.starts[rows.stop]
        part = oracle.coefficients(
            batch.hidden[first:last],
            batch.logp[first:last],
            batch.advantages[rows],
            batch.starts[rows.start : rows.stop + 1] - first,
            refinements=refinements,
        )
        expected += part.weights
        assert np.mean(part.weights) == pytest.approx(1)
    close(found.weights, expected, 1e-8)
    whole = token_coefficients(batch.features, batch.advantages, batch.starts, refinements=refinements)
    assert np.abs(found.weights - whole.weights).max() > 0.01  # the option does something


def test_a_shard_without_a_side_has_weights_of_one() -> None:
    batch = rollout(4, LENGTHS, [0.7, 1.3, 0.4, 1.9, -0.4, 0.2])
    found = token_coefficients(batch.features, batch.advantages, batch.starts, shards=2)
    first = batch.starts[3]
    close(found.weights[:first], np.ones(first))
    assert found.weights[first:].std() > 0
    assert found.degenerate is None
    one_sided = token_coefficients(batch.features, np.abs(batch.advantages), batch.starts, shards=2)
    assert one_sided.degenerate == "no shard has advantages of both signs"


def test_shards_and_groups_exclude_each_other() -> None:
    batch = rollout(5, LENGTHS, MIXED)
    with pytest.raises(ValueError, match="groups or those of shards"):
        token_coefficients(batch.features, batch.advantages, batch.starts, shards=2, groups=[0, 0, 0, 1, 1, 1])
    with pytest.raises(ValueError, match="shards must be 1 or more"):
        CoefficientSettings(shards=0)


# ------------------------------------------------------------------------------- one-sided batches


def test_a_missing_side_is_a_centroid_at_zero_in_the_public_code() -> None:
    """K = 1, all advantages positive, written out: mu− = 0, so D = ‖v‖² − ‖v − mu+‖²."""
    batch = rollout(6, LENGTHS, [0.7, 1.3, 0.4, 1.9, 0.4, 0.2])
    v = [[-math.expm1(lp) * float(x) for x in h] for h, lp in zip(batch.hidden, batch.logp, strict=True)]
    masses = [float(a) for a, n in zip(batch.advantages, LENGTHS, strict=True) for _ in range(n)]

    def centroid(weights: list[float]) -> list[float]:
        total = math.fsum(weights)
        return [math.fsum(w * x[j] for w, x in zip(weights, v, strict=True)) / total for j in range(len(v[0]))]

    def margins(mu: list[float]) -> list[float]:
        squares = [math.fsum(y * y for y in x) for x in v]
        return [
            s - math.fsum((y - m) ** 2 for y, m in zip(x, mu, strict=True)) for s, x in zip(squares, v, strict=True)
        ]

    def spread(values: list[float]) -> float:
        mean = math.fsum(values) / len(values)
        return math.sqrt(max(math.fsum((value - mean) ** 2 for value in values) / len(values), 1e-8))

    before = margins(centroid(masses))
    gamma = spread(before)
    alpha = [1 / (1 + math.exp(-d / gamma)) for d in before]
    after = margins(centroid([a * m for a, m in zip(alpha, masses, strict=True)]))
    lam = [0.8 + 0.4 / (1 + math.exp(-d / gamma)) for d in after]
    expected = [len(lam) * each / math.fsum(lam) for each in lam]

    found = token_coefficients(batch.features, batch.advantages, batch.starts, one_sided="zero")
    close(found.weights, expected, 1e-7)
    assert found.degenerate is None
    assert 0.8 < min(expected) < 0.95  # far from 1: the size of the difference
    ours = token_coefficients(batch.features, batch.advantages, batch.starts)
    close(ours.weights, np.ones(len(lam)))
    nothing = token_coefficients(batch.features, np.zeros(6), batch.starts, one_sided="zero")
    assert nothing.degenerate == "every advantage is zero"


# ------------------------------------------------------------------------- temperatures and medians


def test_a_pair_of_temperatures_is_one_for_each_side() -> None:
    batch = rollout(7, LENGTHS, MIXED)
    pair = token_coefficients(batch.features, batch.advantages, batch.starts, temperature=(50.0, 900.0))
    per_token = np.repeat(batch.advantages, LENGTHS)
    for side, gamma in ((per_token > 0, 50.0), (per_token < 0, 900.0)):
        expected = 1 / (1 + np.exp(-np.clip(pair.margins[side] / gamma, -700, 700)))
        close(pair.alpha[side], expected)
    assert pair.temperatures == (50.0, 900.0)


def test_the_temperatures_of_a_step_are_given_back_and_can_be_fixed() -> None:
    """What temperature = "first" does: on the same batch, K = 1, the step's own gammas change nothing."""
    batch = rollout(8, LENGTHS, MIXED)
    lagged = token_coefficients(batch.features, batch.advantages, batch.starts)
    fixed = token_coefficients(batch.features, batch.advantages, batch.starts, temperature=lagged.temperatures)
    close(fixed.weights, lagged.weights)
    per_token = np.repeat(batch.advantages, LENGTHS)
    unrefined = token_coefficients(batch.features, batch.advantages, batch.starts, refinements=0)
    for side, gamma in zip((per_token > 0, per_token < 0), unrefined.temperatures, strict=True):
        assert gamma == pytest.approx(unrefined.margins[side].std())


@pytest.mark.parametrize("temperature", [(1.0, 0.0), (1.0,), (1.0, np.inf), "warm", -1.0])
def test_temperatures_that_are_none(temperature: object) -> None:
    with pytest.raises(ValueError, match="temperature must be"):
        CoefficientSettings(temperature=temperature)  # type: ignore[arg-type]


def weighted_distance(batch: Rollout, masses: np.ndarray, mu: np.ndarray) -> float:
    v = -np.expm1(batch.logp)[:, None] * batch.hidden.astype(np.float64)
    return float(masses @ np.linalg.norm(v - mu, axis=1))


def median_margins(batch: Rollout) -> tuple[np.ndarray, np.ndarray]:
    """The centroids that minimise Σ A·‖v − mu‖, by scipy, and the margins to them."""
    from scipy.optimize import minimize

    v = -np.expm1(batch.logp)[:, None] * batch.hidden.astype(np.float64)
    per_token = np.repeat(batch.advantages, np.diff(batch.starts))
    centres = []
    for masses in (np.maximum(per_token, 0), np.maximum(-per_token, 0)):
        start = masses @ v / masses.sum()
        found = minimize(lambda mu, m=masses: weighted_distance(batch, m, mu), start, method="BFGS")  # type: ignore[misc]
        centres.append(found.x)
    positive, negative = centres
    margins = ((v - negative) ** 2).sum(1) - ((v - positive) ** 2).sum(1)
    return np.where(per_token > 0, margins, -margins), np.array(centres)


def test_the_median_centroid_is_the_minimiser_of_distances() -> None:
    """Against scipy's minimiser; sixteen steps come within a hundredth of the margins' spread."""
    batch = rollout(9, [40, 60, 50, 30], [1.0, -0.6, 0.4, -0.9])
    expected, _ = median_margins(batch)
    found = token_coefficients(batch.features, batch.advantages, batch.starts, refinements=0, centroid="median")
    mean = token_coefficients(batch.features, batch.advantages, batch.starts, refinements=0)
    error = np.abs(found.margins - expected).max()
    assert error < 0.01 * expected.std()
    assert np.abs(mean.margins - expected).max() > expected.std()  # the mean is far from it here


def test_the_median_heeds_a_far_token_less() -> None:
    batch = rollout(10, [40, 60, 50, 30], [1.0, -0.6, 0.4, -0.9])
    far = Rollout(batch.hidden.copy(), batch.logp, batch.advantages, batch.starts)
    far.hidden[0] += 1e4

    def moved(centroid: CentroidKind) -> float:
        one, other = (
            token_coefficients(each.features, each.advantages, each.starts, refinements=0, centroid=centroid)
            for each in (batch, far)
        )
        return float(np.abs(one.margins - other.margins)[1:].max())

    assert moved("median") < 0.1 * moved("mean")
