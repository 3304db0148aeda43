"""What may not change a coefficient (method, section 2), over random batches."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from delta_cli.credit import DenseFeatures, TokenCoefficients, features, token_coefficients

from .samples import Rollout, rollout

FEW = settings(max_examples=25, deadline=None)


@st.composite
def batches(draw: st.DrawFn) -> Rollout:
    """Responses of random lengths, at least one token on either side."""
    advantage = st.sampled_from([-2.0, -0.5, 0.0, 0.3, 1.0])
    rest = draw(st.lists(st.tuples(st.integers(0, 8), advantage), max_size=5))
    sides = [(draw(st.integers(1, 8)), 0.9), (draw(st.integers(1, 8)), -1.1)]
    lengths, advantages = zip(*(sides + rest), strict=True)
    return rollout(draw(st.integers(0, 2**32 - 1)), list(lengths), list(advantages), width=5)


def run(batch: Rollout, v: np.ndarray | None = None, **options: object) -> TokenCoefficients:
    held = batch.features if v is None else DenseFeatures(v)
    return token_coefficients(held, batch.advantages, batch.starts, **options)


def proxies(batch: Rollout) -> np.ndarray:
    return -np.expm1(batch.logp)[:, None] * batch.hidden.astype(np.float64)


def same(left: TokenCoefficients, right: TokenCoefficients) -> None:
    np.testing.assert_allclose(left.weights, right.weights, rtol=0, atol=1e-7)
    np.testing.assert_allclose(left.alpha, right.alpha, rtol=0, atol=1e-7)


@FEW
@given(batches(), st.integers(0, 3), st.floats(0.1, 3))
def test_an_empty_range_gives_the_base_objective(batch: Rollout, refinements: int, level: float) -> None:
    result = run(batch, refinements=refinements, lambda_min=level, lambda_max=level)
    np.testing.assert_allclose(result.weights, 1, rtol=1e-12)


@FEW
@given(batches(), st.integers(0, 3))
def test_weights_have_mean_one_and_keep_the_ranges_ratio(batch: Rollout, refinements: int) -> None:
    result = run(batch, refinements=refinements)
    assert result.weights.mean() == pytest.approx(1, abs=1e-12)
    assert result.weights.max() <= 1.5 * result.weights.min() * (1 + 1e-12)
    assert ((result.alpha >= 0) & (result.alpha <= 1)).all()


@FEW
@given(batches(), st.randoms(use_true_random=False))
def test_order_of_tokens_and_responses(batch: Rollout, random) -> None:  # type: ignore[no-untyped-def]
    rows = list(range(len(batch.advantages)))
    random.shuffle(rows)
    index = []
    for row in rows:
        tokens = list(range(batch.starts[row], batch.starts[row + 1]))
        random.shuffle(tokens)
        index += tokens
    starts = np.concatenate([[0], np.cumsum(np.diff(batch.starts)[rows])])
    moved = Rollout(batch.hidden[index], batch.logp[index], batch.advantages[rows], starts)
    plain, other = run(batch), run(moved)
    np.testing.assert_allclose(other.weights, plain.weights[index], rtol=0, atol=1e-9)
    np.testing.assert_allclose(other.margins, plain.margins[index], rtol=1e-9, atol=1e-8)


@FEW
@given(batches(), st.floats(-1e3, 1e3))
def test_translation(batch: Rollout, shift: float) -> None:
    v = proxies(batch)
    same(run(batch, v), run(batch, v + shift * np.arange(1, v.shape[1] + 1)))


@FEW
@given(batches(), st.integers(0, 2**32 - 1))
def test_rotation(batch: Rollout, seed: int) -> None:
    v = proxies(batch)
    turn, _ = np.linalg.qr(np.random.default_rng(seed).normal(size=(v.shape[1], v.shape[1])))
    same(run(batch, v), run(batch, v @ turn))


@FEW
@given(batches(), st.floats(0.5, 100))
def test_scaling(batch: Rollout, factor: float) -> None:
    """Out of the variance floor's reach: a side of one token has variance 0, so both get a second."""
    v = proxies(batch)
    per_token = np.repeat(batch.advantages, np.diff(batch.starts))
    if min(np.count_nonzero(per_token > 0), np.count_nonzero(per_token < 0)) < 2:
        return
    same(run(batch, v), run(batch, factor * v))


@FEW
@given(batches())
def test_swapping_the_sign_swaps_the_sides(batch: Rollout) -> None:
    flipped = Rollout(batch.hidden, batch.logp, -batch.advantages, batch.starts)
    same(run(batch), run(flipped))
    np.testing.assert_allclose(run(batch).margins, run(flipped).margins, rtol=1e-9, atol=1e-9)


@FEW
@given(batches(), st.floats(0.1, 50))
def test_scale_of_the_advantages(batch: Rollout, factor: float) -> None:
    scaled = Rollout(batch.hidden, batch.logp, factor * batch.advantages, batch.starts)
    same(run(batch), run(scaled))


@pytest.mark.parametrize("chunk", [1, 40, 200, 2**22])
def test_chunks_of_the_features(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = rollout(3, [5, 9, 3, 1, 12], [1.0, -0.5, 0.0, 0.3, -2.0])
    plain = run(batch)
    monkeypatch.setattr(features, "_CHUNK_BYTES", chunk)
    same(plain, run(batch))
    held, v = batch.features, proxies(batch)
    weights = np.random.default_rng(0).normal(size=(3, len(v)))
    np.testing.assert_allclose(held.weighted_sum(weights), weights @ v, rtol=1e-12, atol=1e-10)
    np.testing.assert_allclose(held.project(weights[0, :6]), v @ weights[0, :6], rtol=1e-12, atol=1e-10)
    np.testing.assert_allclose(held.squared_norms(), (v**2).sum(axis=1), rtol=1e-12)
    np.testing.assert_array_equal(held.slice(4, 9).squared_norms(), held.squared_norms()[4:9])
