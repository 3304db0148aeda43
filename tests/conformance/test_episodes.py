"""Episodes: tokens of an environment are context and nothing else, and drawing goes on where a turn ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from backends.interface import (
    Completions,
    Engine,
    Floats,
    Ids,
    Proxy,
    RolloutRequest,
    Sampling,
    Sequences,
)
from backends.regions import ResponseRegions
from delta_cli.credit import PRESETS, MiniBatch, Surrogate, method, token_coefficients
from tests.credit import oracle as method_oracle

from .conftest import OPTIMIZER, Make, Tolerance
from .objectives import Clipped, exported, largest_difference
from .oracle import Oracle
from .tiny_model import EOS, VOCAB, make_sequences

LEARNING_RATE = 0.002


def make_episodes(seed: int = 0, temperature: float = 0.7) -> Sequences:
    """The sequences of the other tests, with tokens of an environment put between those of the model.

    Before the first, between two, several at a time, after the last, and none at all.
    """
    plain, rng = make_sequences(seed, temperature), np.random.default_rng(seed + 1)
    ids, own = [], []
    for row in range(len(plain)):
        marks = [True] * int(plain.lengths[row])
        for place in sorted(rng.integers(0, len(marks) + 1, size=row % 4), reverse=True):
            marks[place:place] = [False] * int(rng.integers(1, 4))
        region = rng.integers(1, VOCAB, size=len(marks))
        region[np.array(marks, dtype=bool)] = plain.response(row)
        ids.append(region.astype(np.int64))
        own.append(np.array(marks, dtype=bool))
    return replace(plain, regions=ResponseRegions.of(ids, own))


@pytest.mark.parametrize(
    "proxy",
    [Proxy("output_row"), pytest.param(Proxy("hidden_topk", k=5), marks=pytest.mark.long), Proxy("hidden_exact")],
    ids=str,
)
def test_scores_of_own_tokens(make: Make, either: Path, proxy: Proxy, tolerance: Tolerance) -> None:
    """Log-probabilities, entropies and features exist for the model's tokens alone, and see the environment's."""
    episodes, oracle = make_episodes(), Oracle(either)
    with torch.no_grad():
        expected = oracle.distributions(episodes)
    vectors = oracle.vectors(episodes, proxy)
    for settings in ({}, {"micro_batch_tokens": 20, "head_chunk_tokens": 3, "feature_bytes": 5 * 64}):
        scores = make(either, **settings).score(episodes, proxy)
        np.testing.assert_allclose(scores.logprobs, expected.logprobs, atol=tolerance.logprob, rtol=0)
        np.testing.assert_allclose(scores.entropies, expected.entropies, atol=tolerance.logprob, rtol=0)
        assert scores.features is not None
        found = scores.features.weighted_sum(np.eye(len(vectors)))
        assert np.abs(found - vectors).max() < tolerance.feature * np.abs(vectors).max()


def test_update_learns_from_own_tokens_alone(make: Make, either: Path, tolerance: Tolerance, tmp_path: Path) -> None:
    episodes, oracle = make_episodes(), Oracle(either)
    surrogate = Clipped(episodes, oracle.distributions(episodes).logprobs.detach())
    loss, norm = oracle.update(episodes, surrogate.torch, OPTIMIZER, LEARNING_RATE, steps=1)
    for name, settings in (("whole", {}), ("split", {"micro_batch_tokens": 20, "head_chunk_tokens": 3})):
        backend = make(either, **settings)
        assert backend.accumulate(episodes, surrogate) == pytest.approx(loss, abs=10 * tolerance.logprob)
        assert backend.step(LEARNING_RATE) == pytest.approx(norm, rel=tolerance.gradient)
        assert largest_difference(exported(backend, tmp_path / name), oracle.weights()) < tolerance.weight


def scored_and_updated(backend: Engine, batch: Sequences) -> tuple[Floats | float, ...]:
    """Log-probabilities, entropies and features of a batch, and the loss and gradient norm of an update on it."""
    scores = backend.score(batch, Proxy())
    assert scores.features is not None
    loss = backend.accumulate(batch, Clipped(batch, scores.logprobs))
    sums = scores.features.weighted_sum(np.eye(len(batch.tokens)))
    return scores.logprobs, scores.entropies, sums, loss, backend.step(LEARNING_RATE)


def test_regions_without_an_environment_change_no_bit(make: Make, sequences: Sequences) -> None:
    marked = replace(
        sequences,
        regions=ResponseRegions(sequences.tokens, np.ones(len(sequences.tokens), dtype=bool), sequences.starts),
    )
    found = [scored_and_updated(make(), batch) for batch in (sequences, marked)]
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one, other)


def test_what_no_later_token_attends_to_changes_nothing(make: Make) -> None:
    """Other text of the environment after the last token of a response: scores, loss and gradient stay."""
    first = make_episodes()
    assert first.regions is not None
    ids, own = first.regions.ids.copy(), first.regions.own
    after = np.zeros(len(ids), dtype=bool)
    for start, stop in zip(first.regions.starts, first.regions.starts[1:], strict=False):
        last = np.flatnonzero(own[start:stop]).max(initial=-1)
        after[start + last + 1 : stop] = last >= 0
    assert after.sum() > 1
    ids[after] = (ids[after] + 5) % VOCAB
    other = replace(first, regions=ResponseRegions(ids, own, first.regions.starts))
    found = [scored_and_updated(make(), batch) for batch in (first, other)]
    for one, two in zip(*found, strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-6, atol=1e-7)


SHORT = ("delta", "dapo_ft", "fipo", "gspo")  # of `make test`: weights, entropies, a scale, sequence ratios


@pytest.mark.parametrize(
    "preset", [pytest.param(name, marks=() if name in SHORT else pytest.mark.long) for name in sorted(PRESETS)]
)
def test_every_preset_against_an_independent_transcription(
    make: Make, folder: Path, preset: str, tolerance: Tolerance
) -> None:
    """Coefficients, loss and gradient: all positions of a region in float64, of which the mask keeps the model's."""
    episodes, oracle = make_episodes(temperature=1.0), Oracle(folder)
    assert episodes.regions is not None
    rng = np.random.default_rng(3)
    advantages = np.array([1.2, -0.7, 0.0, -1.4, 0.9, -0.3])
    found = oracle.distributions(episodes)
    count = len(episodes.tokens)
    old = found.logprobs.detach().numpy() + 0.1 * rng.standard_normal(count)
    # Independent: arrays over whole regions, in which the environment's positions hold garbage.
    whole = np.where(episodes.regions.own, 0.0, np.nan)
    hidden = np.full((len(whole), found.hidden.shape[1]), np.nan)
    hidden[episodes.regions.own] = found.hidden.detach().numpy()
    whole[episodes.regions.own] = old
    kept = ~np.isnan(whole)
    starts = [0]
    for row in range(len(episodes)):
        part = kept[episodes.regions.starts[row] : episodes.regions.starts[row + 1]]
        starts.append(starts[-1] + sum(map(bool, part)))
    weights = None
    if PRESETS[preset].credit == "delta":
        expected = method_oracle.coefficients(hidden[kept], whole[kept], advantages.tolist(), starts)
        weights = torch.tensor(expected.weights, dtype=torch.float64)
    entropies = found.entropies.detach()
    batch = method_oracle.Batch(
        logp=found.logprobs.detach(),
        logp_old=torch.from_numpy(whole[kept]),
        advantages=advantages.tolist(),
        starts=starts,
        weights=weights,
        entropies=entropies,
        max_length=40,
    )
    loss, slopes = method_oracle.loss_and_gradient(preset, batch)

    backend = make()
    scores = backend.score(episodes, Proxy())
    assert scores.features is not None
    own = None
    if weights is not None:
        features = _Scaled(found.hidden.detach().numpy(), old)
        own = token_coefficients(features, advantages, episodes.starts).weights
        np.testing.assert_allclose(own, weights, atol=1e-9)
    surrogate = Surrogate(
        method(preset),
        MiniBatch(old, advantages, episodes.starts, own, entropies.numpy(), max_length=40),
    )
    seen: dict[int, Floats] = {}

    def objective(logp: Floats, rows: Ids) -> tuple[float, Floats]:
        value, gradient = surrogate(logp, rows)
        places = np.concatenate([np.arange(episodes.starts[row], episodes.starts[row + 1]) for row in rows])
        seen.update(zip(places.tolist(), gradient, strict=True))
        return value, gradient

    assert backend.accumulate(episodes, objective) * surrogate.scale == pytest.approx(loss, abs=20 * tolerance.logprob)
    assert sorted(seen) == list(range(count)), "a slope for every token of the model, and for no other"
    for place, slope in seen.items():
        assert slope * surrogate.scale == pytest.approx(slopes[place], abs=30 * tolerance.logprob)


class _Scaled:
    """Output-row features from float64 hidden states."""

    def __init__(self, hidden: np.ndarray, logp: np.ndarray) -> None:
        self.vectors = -np.expm1(logp)[:, None] * hidden

    def weighted_sum(self, weights: np.ndarray) -> np.ndarray:
        return np.asarray(weights @ self.vectors)

    def project(self, direction: np.ndarray) -> np.ndarray:
        return np.asarray(self.vectors @ direction)


# ------------------------------------------------------------------------------------- drawing


PROMPTS = (np.array([5, 6, 7, 8]), np.array([21]), np.array([3, EOS, 9]))
SAMPLING = Sampling(max_tokens=24, stop_ids=(EOS, 11, 4), samples=3, seed=4)


class Script:
    """Answers a turn with ids that depend on the row and on what was written; late by a few polls if asked."""

    def __init__(self, delay: int = 0, turns: int = 4, limit: int = SAMPLING.max_tokens) -> None:
        self.delay, self.turns, self.limit = delay, turns, limit
        self.pending: list[tuple[int, int, Ids | None]] = []  # polls left, row, answer
        self.ended: dict[int, list[list[int]]] = {}
        self.restarted: list[int] = []

    def turn_ended(self, row: int, region: Ids) -> None:
        self.ended.setdefault(row, []).append(region.tolist())
        size = 1 + (row + len(region)) % 3
        answer = (np.arange(size) + int(region.sum())) % (VOCAB - 12) + 12
        over = len(self.ended[row]) >= self.turns or len(region) + size >= self.limit
        self.pending.append((self.delay * (row % 3), row, None if over else answer.astype(np.int64)))

    def answers(self, wait: bool) -> Sequence[tuple[int, Ids | None]]:
        if wait:
            self.pending = [(0, row, answer) for _, row, answer in self.pending]
        ready = [(row, answer) for polls, row, answer in self.pending if polls <= 0]
        self.pending = [(polls - 1, row, answer) for polls, row, answer in self.pending if polls > 0]
        return ready

    def restart(self, row: int) -> None:
        self.restarted.append(row)
        self.ended[row] = []


def drawn(backend: Engine, script: Script, sampling: Sampling = SAMPLING, proxy: Proxy | None = None) -> Completions:
    request = RolloutRequest(PROMPTS, sampling, entropies=True, proxy=proxy, turns=script)
    return backend.rollout(request)


def as_sequences(found: Completions, sampling: Sampling = SAMPLING) -> Sequences:
    prompts = tuple(prompt for prompt in PROMPTS for _ in range(sampling.samples))
    return Sequences(prompts, found.tokens, found.starts, sampling.temperature, found.regions)


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
def test_drawn_numbers_equal_scored_ones(backend: Engine, temperature: float, tolerance: Tolerance) -> None:
    """Across turns: log-probabilities, entropies and features are those of one forward over the whole episode."""
    script, sampling = Script(), replace(SAMPLING, temperature=temperature)
    found = drawn(backend, script, sampling, Proxy())
    assert found.regions is not None
    assert max(map(len, script.ended.values())) > 1, "the seed should show several turns"
    np.testing.assert_array_equal(found.tokens, found.regions.own_tokens)
    np.testing.assert_array_equal(found.starts, found.regions.own_starts)
    scored = backend.score(as_sequences(found, sampling), Proxy())
    np.testing.assert_allclose(found.logprobs, scored.logprobs, atol=2 * tolerance.logprob, rtol=0)
    assert found.entropies is not None
    np.testing.assert_allclose(found.entropies, scored.entropies, atol=2 * tolerance.logprob, rtol=0)
    assert found.features is not None
    assert scored.features is not None
    one, other = (each.weighted_sum(np.eye(len(found.tokens))) for each in (found.features, scored.features))
    assert np.abs(one - other).max() < 5 * tolerance.feature * np.abs(other).max()


def test_regions_hold_what_was_written_in_order(backend: Engine) -> None:
    script = Script()
    found = drawn(backend, script)
    assert found.regions is not None
    for row, regions in script.ended.items():
        ids, own = found.regions.region(row)
        for before, region in zip([[], *regions], regions, strict=False):
            assert region[: len(before)] == before
            assert ids[: len(region)].tolist() == region
            assert own[len(region) - 1], "a turn ends with a token of the model"
        ends = np.isin(ids, SAMPLING.stop_ids) & own
        assert int(ends.sum()) == len(regions)
    for row, truncated in enumerate(found.truncated):
        ids, own = found.regions.region(row)
        assert truncated == (len(ids) == SAMPLING.max_tokens and not (own[-1] and ids[-1] in SAMPLING.stop_ids))


@pytest.mark.parametrize("batch", [pytest.param(9, marks=pytest.mark.long), 2])
def test_tokens_do_not_depend_on_when_environments_answer(make: Make, batch: int) -> None:
    """Nor on how many responses are drawn at a time; and each is reported once, with its whole region."""
    results, backend = [], make(rollout_batch=batch)
    for delay in (0, 3, 7):
        reported: dict[int, list[int]] = {}
        script = Script(delay)
        request = RolloutRequest(PROMPTS, SAMPLING, turns=script)
        found = backend.rollout(request, lambda row, ids, into=reported: into.update({row: ids.tolist()}))
        assert found.regions is not None
        assert sorted(reported) == list(range(9))
        for row, ids in reported.items():
            assert found.regions.region(row)[0].tolist() == ids
        results.append((found.regions.ids.tolist(), found.regions.own.tolist()))
    assert results[0] == results[1] == results[2]


def test_an_environment_that_never_answers_anything_changes_no_bit(backend: Engine) -> None:
    """Episodes of one turn are the responses of a rollout without turns."""
    plain = backend.rollout(RolloutRequest(PROMPTS, SAMPLING, entropies=True))
    episodes = drawn(backend, Script(turns=1))
    np.testing.assert_array_equal(plain.tokens, episodes.tokens)
    np.testing.assert_array_equal(plain.logprobs, episodes.logprobs)
    np.testing.assert_array_equal(plain.truncated, episodes.truncated)
