"""Estimators against brute force over all subsets, hand-worked numbers, scipy and simulation."""

from __future__ import annotations

from fractions import Fraction
from itertools import combinations

import numpy as np
import pytest
from scipy import stats

from delta_cli.evaluation import statistics as measure


@pytest.mark.parametrize("samples", range(1, 8))
def test_pass_at_k_is_the_share_of_subsets_with_a_right_answer(samples: int) -> None:
    for correct in range(samples + 1):
        outcomes = [True] * correct + [False] * (samples - correct)
        for k in range(1, samples + 1):
            subsets = list(combinations(outcomes, k))
            expected = sum(any(subset) for subset in subsets) / len(subsets)
            assert measure.pass_at_k(samples, correct, k) == pytest.approx(expected, abs=1e-15)


def test_pass_at_k_is_exact_where_floating_binomials_overflow() -> None:
    """1 − C(1999, k)/C(2000, k) is k/2000; C(2000, 1000) is far beyond float64."""
    assert measure.pass_at_k(2000, 1, 1000) == 0.5
    assert measure.pass_at_k(10**5, 1, 3) == float(Fraction(3, 10**5))


@pytest.mark.parametrize(("samples", "correct", "k"), [(4, 5, 1), (4, -1, 1), (4, 2, 0), (4, 2, 5)])
def test_pass_at_k_refuses_impossible_counts(samples: int, correct: int, k: int) -> None:
    with pytest.raises(ValueError, match="pass@"):
        measure.pass_at_k(samples, correct, k)


@pytest.mark.parametrize(
    ("answers", "gold", "expected"),
    [
        (["7", "7", "8"], {"7"}, 1.0),
        (["7", "8", "8"], {"7"}, 0.0),
        (["7", "8"], {"7"}, 1 / 2),  # a tie of two
        (["7", "8", "9"], {"7"}, 1 / 3),  # a tie of three
        (["7", "8", "8", "9", "7"], {"7"}, 1 / 2),
        (["1/2", "0.5", "3", "3"], {"1/2", "0.5"}, 1 / 2),  # two spellings of the right answer vote together
        (["x + 1", "x+1", "2", "2", "2"], {"2"}, 1.0),
        (["x + 1", "x+1", "2"], {"2"}, 0.0),  # white space does not split a wrong answer's votes
        ([None, None, None, "7"], {"7"}, 1.0),  # no answer, no vote
        ([None, None], {"7"}, 0.0),
    ],
)
def test_majority(answers: list[str | None], gold: set[str], expected: float) -> None:
    assert measure.majority(answers, [answer in gold for answer in answers]) == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize(("right", "problems"), [(0, 30), (1, 30), (7, 30), (15, 30), (30, 30), (1, 1), (2, 5)])
def test_one_sample_a_problem_gives_wilsons_interval(right: int, problems: int) -> None:
    values = np.array([1.0] * right + [0.0] * (problems - right))
    expected = stats.binomtest(right, problems).proportion_ci(0.95, method="wilson")
    got = measure.estimate(values, samples=1)
    assert got.mean == pytest.approx(right / problems)
    assert (got.low, got.high) == pytest.approx((expected.low, expected.high), abs=1e-12)


def test_equal_problems_give_wilsons_interval_of_all_samples() -> None:
    """Without any difference between problems every sample counts as a draw of its own."""
    expected = stats.binomtest(240, 480).proportion_ci(0.95, method="wilson")
    got = measure.estimate(np.full(30, 0.5), samples=16)
    assert (got.low, got.high) == pytest.approx((expected.low, expected.high), abs=1e-12)


def test_standard_error_is_that_of_the_problem_means() -> None:
    values = np.array([0.0, 0.25, 0.5, 1.0])
    assert measure.estimate(values, 4).standard_error == pytest.approx(stats.sem(values), abs=1e-15)


def test_the_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    """2,000 simulated benchmarks of 30 clustered problems; treating samples as independent would cover about 0.56."""
    rng = np.random.default_rng(1)
    skill = rng.beta(0.5, 1.5, size=(2000, 30))
    correct = rng.random((2000, 30, 16)) < skill[..., None]
    intervals = [measure.estimate(row, 16) for row in correct.mean(axis=2)]
    covered = np.mean([each.low <= 0.25 <= each.high for each in intervals])
    assert 0.93 <= covered <= 0.97


def test_weighted_average_is_the_mean_over_questions_with_errors_inside_benchmarks() -> None:
    first, second = np.array([1.0, 0.0, 0.5, 0.5]), np.array([0.0, 0.25])
    got = measure.weighted_average([measure.estimate(first, 4), measure.estimate(second, 4)], [4, 2], 4)
    variance = (4 / 6) ** 2 * np.var(first, ddof=1) / 4 + (2 / 6) ** 2 * np.var(second, ddof=1) / 2
    assert got.mean == pytest.approx(2.25 / 6)
    assert got.standard_error == pytest.approx(np.sqrt(variance))
    assert got.low < got.mean < got.high


def test_the_papers_average_of_delta_8b() -> None:
    """Table 1: the printed benchmark means weighted 30, 30, 30, 30, 30, 33, 30 give the printed 28.40."""
    printed = [43.13, 26.46, 28.12, 18.33, 18.54, 20.27, 44.79]
    estimates = [measure.Estimate(value / 100, 0.01, 0, 1) for value in printed]
    assert 100 * measure.weighted_average(estimates, [30] * 5 + [33, 30], 16).mean == pytest.approx(28.40, abs=0.005)


def test_suite_scores_are_the_whole_suite_at_each_sample_index() -> None:
    first = np.array([[1, 0, 1], [1, 0, 0]], dtype=bool)
    second = np.array([[0, 0, 1]], dtype=bool)
    np.testing.assert_allclose(measure.suite_scores([first, second]), [2 / 3, 0, 2 / 3])


def test_paired_bootstrap_agrees_with_scipys() -> None:
    """Independent resampling of each benchmark, weighted mean, percentile: scipy's two-sample bootstrap."""
    rng = np.random.default_rng(0)
    first, second = rng.normal(0.1, 0.3, 40), rng.normal(-0.05, 0.2, 20)

    def weighted(one: np.ndarray, other: np.ndarray, axis: int) -> np.ndarray:
        return (one.sum(axis=axis) + other.sum(axis=axis)) / 60

    expected = stats.bootstrap(
        (first, second),
        weighted,
        n_resamples=10_000,
        method="percentile",
        vectorized=True,
        random_state=np.random.default_rng(5),
    )
    got = measure.paired_bootstrap([first, second], seed=1)
    assert got.mean == pytest.approx((first.sum() + second.sum()) / 60)
    assert got.standard_error == pytest.approx(expected.standard_error, rel=0.03)
    assert got.low == pytest.approx(expected.confidence_interval.low, abs=0.004)
    assert got.high == pytest.approx(expected.confidence_interval.high, abs=0.004)
    assert got == measure.paired_bootstrap([first, second], seed=1)


def test_paired_bootstrap_is_the_same_in_parts() -> None:
    """A large benchmark is resampled in parts; its interval is still that of the normal limit."""
    values = np.random.default_rng(2).normal(0, 1, 3000)
    got = measure.paired_bootstrap([values], resamples=4000)
    assert got.high - got.low == pytest.approx(2 * 1.96 * stats.sem(values), rel=0.05)


def exact_p_value(first: np.ndarray, second: np.ndarray) -> float:
    """P(U >= observed) over all ways to name the first sample among the pooled values."""
    pooled = np.concatenate([first, second])

    def u(chosen: tuple[int, ...]) -> float:
        mine = pooled[list(chosen)]
        rest = np.delete(pooled, list(chosen))
        return float((mine[:, None] > rest).sum() + 0.5 * (mine[:, None] == rest).sum())

    observed = u(tuple(range(len(first))))
    ways = [u(chosen) for chosen in combinations(range(len(pooled)), len(first))]
    return float(np.mean([value >= observed for value in ways]))


def test_mann_whitney_against_all_permutations() -> None:
    rng = np.random.default_rng(3)
    for _ in range(5):
        first, second = rng.normal(0.5, 1, 5), rng.normal(0, 1, 6)
        got = measure.mann_whitney(first, second)
        assert got.method == "exact"
        assert got.p_value == pytest.approx(exact_p_value(first, second), abs=1e-12)


def test_mann_whitney_with_ties_is_asymptotic_and_one_sided() -> None:
    first, second = np.array([0.4, 0.5, 0.5, 0.6, 0.7, 0.7]), np.array([0.3, 0.4, 0.4, 0.5, 0.5, 0.6])
    better, worse = measure.mann_whitney(first, second), measure.mann_whitney(second, first)
    assert better.method == "asymptotic"
    assert better.statistic == 2 + 4 + 4 + 5.5 + 6 + 6  # by hand, one score of the first after another
    assert better.p_value == pytest.approx(exact_p_value(first, second), abs=0.02)
    assert worse.p_value > 0.9


def test_equal_scores_are_no_evidence() -> None:
    assert measure.mann_whitney(np.full(16, 0.5), np.full(16, 0.5)).p_value == 1.0
