"""Weight functions against loops written here, and what they may not return."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from delta_cli.credit import DenseFeatures
from delta_cli.credit.distributed import HeldFeatures
from delta_cli.credit.weight_functions import (
    WEIGHT_FUNCTIONS,
    BatchFeatures,
    CreditInput,
    WeightFunction,
    normalised,
)
from tests.credit.ranks import ThreadRanks, on_ranks

LENGTHS = (3, 1, 4, 2)
STARTS = np.cumsum([0, *LENGTHS])
ADVANTAGES = np.array([1.5, -0.5, 0.0, -1.0])


def batch() -> CreditInput:
    rng = np.random.default_rng(7)
    return CreditInput(
        logprobs=-rng.uniform(0.01, 3, 10),
        entropies=rng.uniform(0, 2, 10),
        advantages=ADVANTAGES,
        groups=np.array([0, 0, 1, 1]),
        starts=STARTS,
        tokens=np.arange(10),
    )


def test_surprisal_and_entropy_are_proportional_and_have_mean_1() -> None:
    given = batch()
    for name, values in (("surprisal", [-x for x in given.logprobs]), ("entropy_weight", list(given.entropies))):
        mean = sum(values) / len(values)
        np.testing.assert_allclose(WEIGHT_FUNCTIONS[name](given), [x / mean for x in values], rtol=1e-14)


def test_position_is_a_line_in_each_response() -> None:
    third = 0.4 / 3
    expected = [0.8, 1.0, 1.2, 0.8, 0.8, 0.8 + third, 0.8 + 2 * third, 1.2, 0.8, 1.2]
    np.testing.assert_allclose(WEIGHT_FUNCTIONS["position"](batch()), expected, rtol=1e-14)


def test_random_numbers_come_from_the_batchs_generator() -> None:
    given = replace(batch(), rng=np.random.default_rng(3))
    expected = [0.8 + 0.4 * np.random.default_rng(3).random(10)[i] for i in range(10)]
    np.testing.assert_allclose(WEIGHT_FUNCTIONS["random"](given), expected, rtol=1e-12)


def scalars(given: CreditInput) -> list[tuple[float, float, float, float]]:
    """Advantage, hint gain, entropy and log-probability of each token."""
    assert given.hinted_logprobs is not None
    advantages = [a for a, length in zip(ADVANTAGES, LENGTHS, strict=True) for _ in range(length)]
    gains = [float(b - a) for a, b in zip(given.logprobs, given.hinted_logprobs, strict=True)]
    return list(zip(advantages, gains, given.entropies, given.logprobs, strict=True))


def hinted() -> CreditInput:
    given = batch()
    moved = given.logprobs + np.array([0.05, -0.1, 3.0, -700.0, 0.3, 0.0, -0.2, 0.1, 700.0, -0.15])
    return replace(given, hinted_logprobs=moved, hidden_residuals=np.array([1.0, 3, 2, 0, 1, 1, 1, 5, 4, 0]))


@pytest.mark.parametrize(("step", "share"), [(0, 0.5), (20, 0.3), (50, 0.0), (80, 0.0)])
def test_rlsd_follows_the_hint_in_the_direction_of_the_advantage(step: int, share: float) -> None:
    given = replace(hinted(), step=step)
    expected = []
    for advantage, gain, _, _ in scalars(given):
        sign = int(advantage > 0) - int(advantage < 0)
        ratio = 1.2 if sign * gain > 0.5 else 0.8 if sign * gain < -0.5 else np.exp(sign * gain)
        expected.append((1 - share) + share * min(max(ratio, 0.8), 1.2))
    np.testing.assert_allclose(WEIGHT_FUNCTIONS["rlsd"](given), expected, rtol=1e-12)


def test_cort_and_arca_have_mean_1_in_each_response() -> None:
    given = hinted()
    raw = [1 + 0.5 * np.tanh(gain) for _, gain, _, _ in scalars(given)]
    assert given.hidden_residuals is not None
    for name, values in (("cort", raw), ("arca", given.hidden_residuals.tolist())):
        expected: list[float] = []
        for start, stop in itertools.pairwise(STARTS):
            total = sum(values[start:stop])
            expected += [value * (stop - start) / total if total else 1.0 for value in values[start:stop]]
        np.testing.assert_allclose(WEIGHT_FUNCTIONS[name](given), expected, rtol=1e-12)


def test_eapo_standardises_the_entropies_of_tokens_that_learn() -> None:
    given = replace(batch(), entropies=np.array([0.1, 9.0, 0.3, 0.2, 7.0, 7.0, 7.0, 7.0, 0.4, 0.0]))
    own = [0.1, 9.0, 0.3, 0.2, 0.4, 0.0]
    mean = sum(own) / 6
    spread = (sum((x - mean) ** 2 for x in own) / 6) ** 0.5
    expected = [1 + 0.2 * min(max((x - mean) / spread, -2), 2) for x in given.entropies]
    assert max(expected) == pytest.approx(1.4)
    np.testing.assert_allclose(WEIGHT_FUNCTIONS["eapo"](given), expected, rtol=1e-12)


@pytest.mark.parametrize(("name", "key"), [("rlsd", "hint"), ("cort", "hint"), ("arca", "hidden_residuals")])
def test_a_credit_without_its_second_forward_pass(name: str, key: str) -> None:
    with pytest.raises(ValueError, match=f"set method.{key}"):
        WEIGHT_FUNCTIONS[name](batch())


@pytest.mark.parametrize("kind", [None, "batch", "side", "budget"])
@pytest.mark.parametrize("negative", [1.0, 0.25, 0.0])
def test_normalised_weights_have_the_sums_they_should(kind: str | None, negative: float) -> None:
    given = batch()
    weights = np.random.default_rng(1).uniform(0, 5, 10)
    found = normalised(weights, given.logprobs, given.token_advantages, kind, negative)  # type: ignore[arg-type]
    per_token = [a for a, length in zip(ADVANTAGES, LENGTHS, strict=True) for _ in range(length)]
    factor = []
    for a in per_token:
        if kind is None:
            factor.append(1.0)
        elif kind == "batch":
            factor.append(10 / sum(weights))
        elif a == 0:
            factor.append(1.0)
        else:
            side = [i for i in range(10) if per_token[i] * a > 0]
            size = [abs(per_token[i]) * (1 - np.exp(given.logprobs[i])) if kind == "budget" else 1.0 for i in range(10)]
            factor.append(sum(size[i] for i in side) / sum(size[i] * weights[i] for i in side))
    expected = [w * f * (negative if a < 0 else 1) for w, f, a in zip(weights, factor, per_token, strict=True)]
    np.testing.assert_allclose(found, expected, rtol=1e-12)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (np.ones(9), r"f returned shape \[9\]; it must return one weight for each of the 10 tokens, \[10\]"),
        (np.r_[np.ones(9), np.nan], "f gave token 9 the weight nan"),
        (np.r_[-1.0, np.ones(9)], "f gave token 0 the weight -1.0; weights must be finite and at least 0"),
        (None, "f returned shape"),
        ("text", "f returned str; it must return one number a token"),
    ],
)
def test_what_is_no_weight_is_refused(returned: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        WeightFunction("f", lambda batch: returned)(batch(), None)  # type: ignore[arg-type, return-value]


def test_a_second_parameter_asks_for_features() -> None:
    assert not WeightFunction("f", lambda batch: batch.logprobs).reads_features
    assert WeightFunction("f", lambda batch, features: batch.logprobs).reads_features


@pytest.mark.parametrize("split", [((0, 1, 2, 3),), ((0, 2), (1, 3)), ((), (0, 1, 2, 3))])
def test_features_are_those_of_the_whole_batch_on_any_number_of_ranks(split: tuple[tuple[int, ...], ...]) -> None:
    rng = np.random.default_rng(0)
    hidden, weights, direction = rng.normal(size=(10, 5)), rng.normal(size=(2, 10)), rng.normal(size=5)

    def work(ranks: ThreadRanks) -> tuple[np.ndarray, np.ndarray]:
        index = np.concatenate([np.arange(0), *(np.arange(STARTS[r], STARTS[r + 1]) for r in split[ranks.rank])])
        features = BatchFeatures(HeldFeatures(DenseFeatures(hidden[index]), index, 10, ranks))
        return features.weighted_sum(weights), features.project(direction)

    for sums, products in on_ranks(len(split), work):
        np.testing.assert_allclose(
            sums, [[sum(w[t] * hidden[t, h] for t in range(10)) for h in range(5)] for w in weights]
        )
        np.testing.assert_allclose(products, [sum(hidden[t] * direction) for t in range(10)])
