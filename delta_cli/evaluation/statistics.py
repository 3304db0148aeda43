"""Accuracy of a policy from sampled responses, with its uncertainty.

Each of the P problems of a benchmark has k samples; ``correct`` [P, k] holds their outcomes. Samples of one problem
are not independent, so standard errors, intervals and resampling always treat the problem as the unit, never the
sample. All numbers are float64 shares in [0, 1].
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from backends.arrays import Bools, Doubles

Z = NormalDist().inv_cdf(0.975)  # half the width of a 95 % interval, in standard errors


@dataclass(frozen=True)
class Estimate:
    """A mean over problems with its standard error and 95 % interval."""

    mean: float
    standard_error: float
    low: float
    high: float


@dataclass(frozen=True)
class RankTest:
    """A one-sided Mann–Whitney U test that the first of two samples tends to be larger."""

    statistic: float  # pairs in which the first is larger, ties counting one half
    p_value: float
    method: str  # "exact" or "asymptotic"
    first: int  # scores in each sample
    second: int


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """The chance that at least one of k samples is right: 1 − C(n−c, k) / C(n, k).

    Unbiased (Chen et al. 2021, eq. 1). Computed in integers and divided once, so it is exact to rounding for any n.
    Raises ValueError unless 0 ≤ c ≤ n and 1 ≤ k ≤ n.
    """
    if not (0 <= correct <= samples and 1 <= k <= samples):
        raise ValueError(f"pass@{k} needs 0 <= correct <= samples and 1 <= k <= samples, got {correct} of {samples}")
    draws = math.comb(samples, k)
    return (draws - math.comb(samples - correct, k)) / draws


def majority(answers: Sequence[str | None], correct: Sequence[bool]) -> float:
    """maj@k of one problem over its k samples: is the most frequent answer correct?

    All answers graded correct count as one answer. Wrong answers are distinguished by their text without white space.
    Samples without an answer do not vote. If m answers tie for first place, each is chosen with probability 1/m, so the
    result is 0, 1/m or 1.
    """
    right = sum(correct)
    wrong = Counter(
        "".join(answer.split())
        for answer, good in zip(answers, correct, strict=True)
        if answer is not None and not good
    )
    if right == 0 or right < max(wrong.values(), default=0):
        return 0.0
    return 1 / (1 + sum(votes == right for votes in wrong.values()))


def estimate(values: Doubles, samples: int) -> Estimate:
    """The mean of ``values`` [P], one share in [0, 1] for each problem, from ``samples`` draws of each.

    The standard error is the standard deviation over problems divided by √P, which includes the noise of sampling
    and of the choice of problems. The interval is Wilson's with the effective number of
    draws mean·(1 − mean)/SE² in place of a count (Franco et al. 2019), kept between P and P·samples:
    with one sample a problem it is exactly Wilson's, and it is sensible at 0 and 1, where the normal and the
    bootstrap interval have no width. A single problem gets the largest possible standard error.
    """
    mean = float(np.mean(values))
    if len(values) == 1:
        return _wilson(mean, math.sqrt(mean * (1 - mean)), 1, samples)
    return _wilson(mean, float(np.std(values, ddof=1)) / math.sqrt(len(values)), len(values), samples)


def weighted_average(estimates: Sequence[Estimate], questions: Sequence[int], samples: int) -> Estimate:
    """The average of benchmarks weighted by their number of questions (the paper's "Avg").

    The benchmarks are fixed; only their problems are a random sample: SE² = Σ w²·SE_b².
    """
    weights = np.array(questions) / sum(questions)
    mean = float(weights @ [each.mean for each in estimates])
    error = math.sqrt(float(weights**2 @ [each.standard_error**2 for each in estimates]))
    return _wilson(mean, error, sum(questions), samples)


def _wilson(mean: float, error: float, questions: int, samples: int) -> Estimate:
    spread = max(mean * (1 - mean), 0.0)
    most = questions * samples if spread > 0 else questions  # all right or all wrong: more samples add no information
    draws = min(max(spread / error**2, questions), most) if error > 0 else most
    centre = (mean + Z**2 / (2 * draws)) / (1 + Z**2 / draws)
    half = Z / (1 + Z**2 / draws) * math.sqrt(spread / draws + Z**2 / (4 * draws**2))
    return Estimate(mean, error, max(centre - half, 0.0), min(centre + half, 1.0))


def suite_scores(outcomes: Sequence[Bools]) -> Doubles:
    """The scores [k] of a whole suite, one for each sample index, from ``correct`` [P_b, k] of each benchmark.

    Each is the score with one sample per problem, weighted by questions.
    """
    scores: Doubles = np.concatenate([np.asarray(correct, dtype=bool) for correct in outcomes]).mean(axis=0)
    return scores


def paired_bootstrap(differences: Sequence[Doubles], seed: int = 0, resamples: int = 10_000) -> Estimate:
    """The question-count weighted mean of paired differences, with a percentile bootstrap over problems.

    ``differences`` holds, for each benchmark, the difference in the share of right answers of each problem
    [P_b]. Problems are resampled with replacement within their benchmark, so its weight stays the same.
    The standard error is the standard deviation of the resampled means.
    """
    rng = np.random.default_rng(seed)
    totals = np.zeros(resamples)
    for values in differences:
        for part in np.array_split(np.arange(resamples), max(1, resamples * len(values) // 1_000_000)):  # bounds memory
            totals[part] += rng.choice(values, size=(len(part), len(values))).sum(axis=1)
    everything = np.concatenate(differences)
    means = totals / len(everything)
    low, high = np.percentile(means, [2.5, 97.5])
    return Estimate(float(everything.mean()), float(means.std(ddof=1)), float(low), float(high))


def mann_whitney(first: Doubles, second: Doubles) -> RankTest:
    """Does ``first`` tend to be larger than ``second``? One-sided Mann–Whitney U (scipy).

    Exact if all scores differ, otherwise the normal approximation corrected for ties and continuity. If all scores
    are equal, the p-value is 1.
    """
    from scipy import stats  # takes a second to import; training and evaluating do not need it

    pooled = np.concatenate([first, second])
    method = "exact" if len(np.unique(pooled)) == len(pooled) else "asymptotic"
    result = stats.mannwhitneyu(first, second, alternative="greater", method=method)
    p_value = 1.0 if np.ptp(pooled) == 0 else float(result.pvalue)
    return RankTest(float(result.statistic), p_value, method, len(first), len(second))
