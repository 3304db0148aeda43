"""Sampling: the distribution of the tokens, where responses end, and what is recorded of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scipy.stats import chisquare

from backends.interface import Completions, Engine, Proxy, RolloutRequest, Sampling, Sequences
from backends.stop_strings import StopText

from .conftest import Make, Tolerance
from .oracle import Oracle, cut_down
from .tiny_model import EOS, VOCAB

PROMPTS = [np.array([5, 6, 7, 8]), np.array([21]), np.array([3, EOS, 9])]  # one token; an id beyond the tokenizer
SAMPLING = Sampling(max_tokens=8, stop_ids=(EOS, 11), samples=3, seed=4)


def responses(completions: Completions) -> list[list[int]]:
    return [part.tolist() for part in np.split(completions.tokens, completions.starts[1:-1])]


def as_sequences(completions: Completions, sampling: Sampling) -> Sequences:
    prompts = tuple(prompt for prompt in PROMPTS for _ in range(sampling.samples))
    return Sequences(prompts, completions.tokens, completions.starts, sampling.temperature)


TRUNCATIONS: list[dict[str, Any]] = [
    {"top_p": 0.6},
    {"top_k": 4},
    {"min_p": 0.2},
    {"top_p": 0.6, "top_k": 4},  # with this and the next, 0.6 of the total is more than what is left
    {"top_p": 0.6, "min_p": 0.4},
    {"top_p": 0.8, "top_k": 9, "min_p": 0.15},
]


def pvalue(counts: np.ndarray, p: np.ndarray) -> float:
    """The p-value of Pearson's chi-square test; ids expected fewer than five times are counted together."""
    expected = counts.sum() * p / p.sum()
    rare = expected < 5
    merged = [np.append(values[~rare], values[rare].sum()) for values in (counts, expected)]
    return float(chisquare(*(merged if rare.any() else (counts, expected))).pvalue)


@pytest.mark.parametrize(
    ("temperature", "truncation"),
    [(1.0, {}), (0.7, {}), (1.3, {"top_p": 0.8}), (1.3, {"top_k": 9, "min_p": 0.1}), (0.0, {}), (0.0, {"top_k": 2})],
    ids=str,
)
def test_engine_logprobs_equal_scored_ones(
    backend: Engine, temperature: float, truncation: dict[str, Any], tolerance: Tolerance
) -> None:
    """At the sampling temperature, and before truncation."""
    sampling = Sampling(max_tokens=8, stop_ids=(EOS,), samples=2, temperature=temperature, **truncation)
    completions = backend.rollout(RolloutRequest(tuple(PROMPTS), sampling, entropies=True))
    scored = backend.score(as_sequences(completions, sampling))
    assert completions.entropies is not None
    assert completions.logprobs.dtype == completions.entropies.dtype == np.float32
    np.testing.assert_allclose(completions.logprobs, scored.logprobs, atol=2 * tolerance.logprob, rtol=0)
    np.testing.assert_allclose(completions.entropies, scored.entropies, atol=2 * tolerance.logprob, rtol=0)
    assert backend.rollout(RolloutRequest(tuple(PROMPTS), sampling)).entropies is None, "nobody asked"


def test_responses_end_where_they_should(backend: Engine) -> None:
    """At the first stop id, which is kept, or at the limit, which truncates them."""
    completions = backend.rollout(RolloutRequest(tuple(PROMPTS), SAMPLING))
    assert completions.starts[0] == 0
    assert completions.starts[-1] == len(completions.tokens) == len(completions.logprobs)
    assert len(completions.truncated) == len(PROMPTS) * SAMPLING.samples
    assert 0 < completions.truncated.sum() < len(completions.truncated), "the seed should show both kinds"
    for tokens, truncated in zip(responses(completions), completions.truncated, strict=True):
        assert 1 <= len(tokens) <= SAMPLING.max_tokens
        assert not set(tokens[:-1]) & set(SAMPLING.stop_ids)
        assert truncated == (tokens[-1] not in SAMPLING.stop_ids)
        assert not truncated or len(tokens) == SAMPLING.max_tokens


# Texts of the ids: a string may lie in one token, or in parts of two or three.
TEXTS = [("a", "b", "c", "ab", "ca", "bcb")[token % 6] for token in range(VOCAB)]


def text_of(tokens: np.ndarray | list[int]) -> str:
    return "".join(TEXTS[token] for token in tokens)


@pytest.mark.parametrize(
    "strings",
    [pytest.param(("bb",), marks=pytest.mark.long), ("cab", "aaa"), pytest.param(("bcb",), marks=pytest.mark.long)],
)
@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_the_first_stop_string_ends_a_response(
    backend: Engine, make: Make, strings: tuple[str, ...], temperature: float
) -> None:
    """The tokens are those drawn without stop strings, up to and with the one that completes the first string."""
    plain = Sampling(max_tokens=12, stop_ids=(EOS,), temperature=temperature, samples=6, seed=9)
    if temperature == 0:
        plain = replace(plain, samples=1)
    whole = backend.rollout(RolloutRequest(tuple(PROMPTS), plain))
    expected, cut = [], []
    for tokens, truncated in zip(responses(whole), whole.truncated, strict=True):
        ends = [n for n in range(1, len(tokens) + 1) if any(string in text_of(tokens[:n]) for string in strings)]
        expected.append(tokens[: ends[0]] if ends else tokens)
        cut.append(bool(truncated) and not ends)
    if temperature:
        assert 0 < sum(len(a) < len(b) for a, b in zip(expected, responses(whole), strict=True)) < len(expected)
    stopped = replace(plain, stop=StopText.of(strings, text_of, VOCAB))
    reported: dict[int, list[int]] = {}
    for engine in (backend, make(rollout_batch=2)):  # alone, and with others that take the places of finished ones
        found = engine.rollout(RolloutRequest(tuple(PROMPTS), stopped), lambda row, t: reported.update({row: [*t]}))
        assert responses(found) == expected == [reported[row] for row in range(len(expected))]
        assert found.truncated.tolist() == cut
        scored = engine.score(
            Sequences(
                tuple(prompt for prompt in PROMPTS for _ in range(plain.samples)),
                found.tokens,
                found.starts,
                plain.temperature,
            )
        ).logprobs
        np.testing.assert_allclose(found.logprobs, scored, atol=1e-4, rtol=0)


def test_a_stop_string_with_the_last_token_allowed_is_not_truncation(backend: Engine) -> None:
    stop = StopText.of(("a", "b", "c"), text_of, VOCAB)
    completions = backend.rollout(RolloutRequest(tuple(PROMPTS), Sampling(1, (EOS,), stop=stop)))
    assert not completions.truncated.any()


def test_stopping_with_the_last_token_allowed_is_not_truncation(backend: Engine) -> None:
    everything = tuple(range(VOCAB))
    completions = backend.rollout(RolloutRequest(tuple(PROMPTS), Sampling(max_tokens=1, stop_ids=everything)))
    assert not completions.truncated.any()
    assert len(completions.tokens) == len(PROMPTS)


def test_each_response_is_reported_once_and_whole(backend: Engine) -> None:
    reported: dict[int, list[int]] = {}

    def on_finished(row: int, tokens: np.ndarray) -> None:
        assert row not in reported
        reported[row] = tokens.tolist()

    completions = backend.rollout(RolloutRequest(tuple(PROMPTS), SAMPLING), on_finished)
    assert [reported[row] for row in sorted(reported)] == responses(completions)


def test_the_seed_determines_the_responses(backend: Engine) -> None:
    first, again = (backend.rollout(RolloutRequest(tuple(PROMPTS), SAMPLING)) for _ in range(2))
    np.testing.assert_array_equal(first.tokens, again.tokens)
    np.testing.assert_array_equal(first.logprobs, again.logprobs)
    other = backend.rollout(RolloutRequest(tuple(PROMPTS), Sampling(max_tokens=8, stop_ids=(EOS,), samples=3, seed=5)))
    assert responses(other) != responses(first)
    assert len(set(map(tuple, responses(first)))) > len(PROMPTS), "the responses to one prompt should differ"


def test_other_responses_of_the_batch_change_no_response(make: Make, backend: Engine) -> None:
    alone = make(rollout_batch=2).rollout(RolloutRequest(tuple(PROMPTS), SAMPLING))
    assert responses(alone) == responses(backend.rollout(RolloutRequest(tuple(PROMPTS), SAMPLING)))


def test_temperature_zero_takes_the_likeliest_prompt_by_prompt(backend: Engine, oracle: Oracle) -> None:
    sampling = Sampling(max_tokens=6, stop_ids=(EOS,), temperature=0.0, samples=2)
    expected = [oracle.greedy(prompt, 6, (EOS,)) for prompt in PROMPTS]
    assert len(set(map(tuple, expected))) == len(PROMPTS)
    assert responses(backend.rollout(RolloutRequest(tuple(PROMPTS), sampling))) == [
        tokens for tokens in expected for _ in range(2)
    ]


@pytest.mark.parametrize(
    ("temperature", "truncation"),
    [(1.0, {}), (0.7, {}), *((t, each) for t, each in zip((1.0, 1.0, 0.7, 1.0, 1.0, 1.3), TRUNCATIONS, strict=True))],
    ids=str,
)
def test_tokens_come_as_often_as_they_should(
    backend: Engine, oracle: Oracle, temperature: float, truncation: dict[str, Any]
) -> None:
    """Single tokens: an id that truncation removes is never drawn, and neighbouring rows are independent."""
    sampling = Sampling(max_tokens=1, stop_ids=(EOS,), temperature=temperature, samples=1000, seed=1, **truncation)
    drawn = backend.rollout(RolloutRequest(tuple(PROMPTS[:1]), sampling)).tokens
    counts = np.bincount(drawn, minlength=VOCAB)
    p = cut_down(oracle.next_token(PROMPTS[0].tolist(), temperature), **truncation)
    assert set(np.flatnonzero(counts)) <= set(np.flatnonzero(p))
    assert not truncation or 1 < np.count_nonzero(p) < VOCAB - 1
    assert pvalue(counts[p > 0], p[p > 0]) > 1e-4
    agree = np.square(p).sum()  # how often two independent responses are equal
    assert abs(np.mean(drawn[::2] == drawn[1::2]) - agree) < 5 * np.sqrt(agree * (1 - agree) / 500)


def test_the_second_token_follows_the_first(backend: Engine, oracle: Oracle) -> None:
    """The second token's frequencies given a likely first one, so after a step of the cache."""
    sampling = Sampling(max_tokens=2, stop_ids=(EOS,), samples=1500, seed=2)
    drawn = [
        tokens
        for tokens in responses(backend.rollout(RolloutRequest(tuple(PROMPTS[1:2]), sampling)))
        if len(tokens) == 2
    ]
    first = int(np.bincount([tokens[0] for tokens in drawn]).argmax())
    counts = np.bincount([tokens[1] for tokens in drawn if tokens[0] == first], minlength=VOCAB)
    p = oracle.next_token([*PROMPTS[1].tolist(), first])
    assert pvalue(counts, p) > 1e-4


LONG = Sampling(max_tokens=12, stop_ids=(EOS, 11), samples=4, temperature=0.8, seed=3)
PROXIES = [Proxy("output_row"), Proxy("hidden_topk", 3), Proxy("hidden_exact")]


@pytest.mark.parametrize("proxy", PROXIES, ids=lambda proxy: proxy.kind)
@pytest.mark.parametrize("slots", [pytest.param(512, marks=pytest.mark.long), 5])
def test_features_of_drawn_responses_are_those_of_scoring(
    proxy: Proxy, slots: int, make: Make, oracle: Oracle, tolerance: Tolerance
) -> None:
    """In any order of drawing and finishing; the views begin inside responses, and one is empty."""
    backend = make(rollout_batch=slots)
    found = backend.rollout(RolloutRequest(tuple(PROMPTS), LONG, proxy=proxy))
    plain = backend.rollout(RolloutRequest(tuple(PROMPTS), LONG))
    assert plain.features is None, "nobody asked"
    np.testing.assert_array_equal(found.tokens, plain.tokens)
    assert found.features is not None
    expected = oracle.vectors(as_sequences(found, LONG), proxy)  # [N, H]
    count, rng = len(expected), np.random.default_rng(0)
    weights, direction = rng.standard_normal((2, count)), rng.standard_normal(expected.shape[1])
    for start, stop in ((0, count), (2, count - 3), (7, 7)):
        view, v, w = found.features.slice(start, stop), expected[start:stop], weights[:, start:stop]
        for one, other, whole in (
            (view.weighted_sum(w), w @ v, weights @ expected),
            (view.project(direction), v @ direction, expected @ direction),
            (view.squared_norms(), np.square(v).sum(1), 2 * np.square(expected).sum(1)),
        ):
            assert one.dtype == np.float64
            np.testing.assert_allclose(one, other, atol=2 * tolerance.feature * np.abs(whole).max(), rtol=0)
    found.features.close()
    found.features.close()


def test_features_live_within_their_budgets(name: str, make: Make, tolerance: Tolerance) -> None:
    """On the device, then on the host; if both are too small, no features are kept."""
    if name == "fake":
        pytest.skip("of feature_bytes nothing is asked")
    row, proxy = 16 * 4, Proxy("output_row")
    request = RolloutRequest(tuple(PROMPTS), LONG, proxy=proxy)
    whole = make().rollout(request)
    assert whole.features is not None
    count = len(whole.tokens)
    weights = np.random.default_rng(0).standard_normal((1, count))
    expected = whole.features.weighted_sum(weights)
    for device, host in ((count, 0), (count - 9, 9), (0, count), (7, count)):
        part = make(feature_bytes=device * row, feature_host_bytes=host * row).rollout(request).features
        assert part is not None
        np.testing.assert_allclose(part.weighted_sum(weights), expected, atol=1e-6 * np.abs(expected).max(), rtol=0)
    for device, host in ((0, 0), (count - 9, 8)):
        assert make(feature_bytes=device * row, feature_host_bytes=host * row).rollout(request).features is None
