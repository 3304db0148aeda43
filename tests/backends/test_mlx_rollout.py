"""Drawing with mlx-lm's batch generator: which rows leave when, and which tokens may be drawn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("mlx.core", reason="MLX is not installed")

import mlx.core as mx
from mlx_lm.generate import BatchGenerator
from mlx_lm.models.cache import BatchKVCache

from backends.interface import RolloutRequest, Sampling, Sequences
from backends.mlx.rollout import BLOCK, CANDIDATES, inverse_cdf, nucleus, truncate
from tests.backends.mlx_engine import VOCAB, create, write_small


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small(tmp_path_factory.mktemp("mlx") / "model")


def test_the_token_that_ends_a_response_is_kept_with_its_logprob(folder: Path) -> None:
    """Where every id but one ends a response, so does nearly every first token."""
    backend = create(folder)
    prompt = np.array([3, 4, 5])
    drawn = backend.rollout(
        RolloutRequest((prompt,), Sampling(max_tokens=5, stop_ids=tuple(range(1, VOCAB)), samples=20))
    )
    assert all(drawn.tokens[drawn.starts[1:] - 1] != 0)
    assert not drawn.truncated.any()
    scored = backend.score(Sequences((prompt,) * 20, drawn.tokens, drawn.starts)).logprobs
    np.testing.assert_allclose(drawn.logprobs, scored, atol=1e-5)


def test_finished_responses_leave_together(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and values are copied when an eighth of the batch is finished, not at each end; other responses stay."""
    prompts = (np.array([3, 4, 5]), np.array([6, 2]))
    request = RolloutRequest(prompts, Sampling(max_tokens=40, stop_ids=(0, 3), samples=16, seed=2))
    responses = len(request)
    expected = create(folder, rollout_batch=1).rollout(request)
    removals: list[int] = []
    remove, extract = BatchGenerator.remove, BatchKVCache.extract

    def counting(self: BatchGenerator, uids: list[int], *rest: Any) -> Any:
        removals.append(len(uids))
        return remove(self, uids, *rest)

    extracted: list[int] = []

    def extracting(self: BatchKVCache, index: int) -> Any:
        extracted.append(index)
        return extract(self, index)

    monkeypatch.setattr(BatchGenerator, "remove", counting)
    monkeypatch.setattr(BatchKVCache, "extract", extracting)
    found = create(folder, rollout_batch=responses).rollout(request)
    np.testing.assert_array_equal(found.tokens, expected.tokens)
    np.testing.assert_array_equal(found.truncated, expected.truncated)
    assert len(set(np.diff(found.starts))) > 10, "ragged"
    assert removals[0] > 1
    assert len(removals) < responses / 3
    assert len(extracted) < responses / 4, "those of prompts"


def test_nucleus_is_the_fewest_likeliest_tokens_that_reach_top_p() -> None:
    rng = np.random.default_rng(0)
    p = rng.dirichlet(np.full(30, 0.3), size=50).astype(np.float32)
    kept = np.array(truncate(mx.array(p), Sampling(1, (), top_p=0.7)))
    for row, result in zip(p, kept, strict=True):
        total, expected = 0.0, set()
        for token in np.argsort(-row):
            if total >= 0.7:
                break
            expected.add(token)
            total += float(row[token])
        assert set(np.flatnonzero(result)) == expected
        np.testing.assert_allclose(result[list(expected)], row[list(expected)], rtol=1e-5)


@pytest.mark.parametrize("flat", [False, True])
def test_a_large_vocabulary_is_sorted_for_flat_distributions_only(flat: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The nucleus is that of numpy's sort; neighbours among the likeliest tokens, a last block that is not full."""
    rng, size = np.random.default_rng(0), CANDIDATES * BLOCK + 5 * BLOCK + 7
    logits = rng.normal(size=(6, size)) * 8
    logits[0, -100:] += 24  # more of the likeliest in two blocks than elsewhere
    logits[1] = 0.01 * rng.normal(size=size) if flat else logits[1]
    p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    widths, sort = [], mx.sort
    monkeypatch.setattr(mx, "sort", lambda array, axis: widths.append(array.shape[axis]) or sort(array, axis=axis))
    kept = np.array(nucleus(mx.array(p.astype(np.float32)), mx.full((6, 1), 0.9)))
    assert (size in widths) == flat
    for row, result in zip(p, kept, strict=True):
        order = np.argsort(-row)
        expected = set(order[: np.searchsorted(np.cumsum(row[order]), 0.9) + 1])
        found = set(np.flatnonzero(result))
        assert len(found ^ expected) <= (1 if len(expected) > CANDIDATES else 0)  # float32 sums of thousands
        both = list(found & expected)
        np.testing.assert_allclose(result[both], row[both], rtol=1e-5)
    assert (np.count_nonzero(kept[1]) > CANDIDATES) == flat


@pytest.mark.parametrize(("uniform", "token"), [(0.0, 1), (0.249, 1), (0.2501, 3), (0.7, 3), (1.0, 3)])
def test_inverse_cdf_never_draws_a_token_without_weight(uniform: float, token: int) -> None:
    """Weights 1 : 3 on tokens 1 and 3 of six, at the ends of the unit interval too."""
    weights = mx.array([[0.0, 0.2, 0.0, 0.6, 0.0, 0.0]])
    assert inverse_cdf(weights, mx.array([uniform])).item() == token
