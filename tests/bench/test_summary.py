"""The bench's statistics against scipy, hand-worked numbers and simulated experiments."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from delta_cli.bench.summary import compare, holm, summarise


def test_differences_are_paired_by_seed() -> None:
    rng = np.random.default_rng(0)
    seeds = [3, 1, 4, 15, 9]
    first, second = rng.normal(0.5, 0.1, 5), rng.normal(0.45, 0.1, 5)
    found = compare(dict(zip(seeds, first, strict=True)) | {77: 9.0}, dict(zip(seeds, second, strict=True)) | {78: 0.0})
    assert found is not None
    expected = stats.ttest_rel(first, second)
    interval = expected.confidence_interval(0.95)
    assert found.p == pytest.approx(expected.pvalue, rel=1e-9)
    assert found.p_greater == pytest.approx(stats.ttest_rel(first, second, alternative="greater").pvalue, rel=1e-9)
    assert found.difference.mean == pytest.approx(np.mean(first - second))
    assert (found.difference.low, found.difference.high) == pytest.approx((interval.low, interval.high))
    assert found.difference.seeds == 5


def test_one_seed_and_equal_values() -> None:
    assert compare({1: 0.5}, {1: 0.4}) is None
    same = compare({1: 0.5, 2: 0.6}, {1: 0.5, 2: 0.6})
    assert same is not None
    assert (same.p, same.p_greater, same.difference.mean) == (1.0, 0.5, 0.0)


def test_the_detectable_difference_is_found_in_about_80_of_100_repetitions() -> None:
    """Experiments with 16 seeds and known spread, whose true difference is what ``compare`` calls detectable."""
    rng = np.random.default_rng(1)
    spread, seeds = 0.02, range(16)
    quantiles = stats.t.ppf([0.975, 0.8], 15).sum()
    true = quantiles * spread / 4
    rejected, detectable = [], []
    for _ in range(600):
        found = compare({s: float(true + rng.normal(0, spread)) for s in seeds}, dict.fromkeys(seeds, 0.0))
        assert found is not None
        rejected.append(found.p < 0.05)
        detectable.append(found.detectable)
    assert np.mean(rejected) == pytest.approx(0.8, abs=0.05)
    assert np.mean(detectable) == pytest.approx(true, rel=0.05)


def test_holm_by_hand() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, 0.9]) == pytest.approx([1.0, 1.0])


def records(arm: str, areas: list[float], question: str = "learning", **numbers: float) -> list[dict[str, object]]:
    costs = {"seconds_credit": 1.0, "seconds_step": 2.0, "final": 0.5}
    about = {"question": question, "task": "addition", "arm": arm, "adapter": "full"}
    return [about | {"seed": seed, "area": area} | costs | numbers for seed, area in enumerate(areas)]


def test_a_task_says_whether_it_tells_good_from_bad() -> None:
    rng = np.random.default_rng(2)
    dapo = [0.5 + 0.01 * float(x) for x in rng.normal(size=8)]
    good = [x + 0.05 + 0.005 * float(e) for x, e in zip(dapo, rng.normal(size=8), strict=True)]
    bad = [x - 0.05 + 0.005 * float(e) for x, e in zip(dapo, rng.normal(size=8), strict=True)]
    middle = [x + 0.005 * float(e) for x, e in zip(dapo, rng.normal(size=8), strict=True)]
    everything = [
        *records("dapo", dapo),
        *records("solver", good),
        *records("solver, flipped", bad),
        *records("random", middle),
        *records("dapo", dapo, "gradient", ratio=4.0, cosine=0.5),
        *records("random", middle, "gradient", ratio=5.0, cosine=0.4),
    ]
    (task,) = summarise(everything)
    assert all(found.p_greater < 0.01 for found in task.told_apart.values())
    assert set(task.told_apart) == {"solver, flipped", "random"}
    assert task.fit is not None
    assert task.fit.p < 1e-4
    rows = {row.arm: row for row in task.rows}
    assert rows["solver"].verdict == "above DAPO"
    assert rows["solver, flipped"].verdict == "below DAPO"
    assert rows["random"].verdict.startswith("no difference seen; 8 seeds detect ")
    assert rows["random"].noise is not None
    assert rows["random"].noise.mean == pytest.approx(1.25)
    assert rows["random"].cosine is not None
    assert rows["random"].cosine.mean == pytest.approx(-0.1)
    (least, most) = (records("dapo", dapo, peak_memory=size) for size in (1.0, 3.0))
    assert summarise([*records("dapo", dapo), *least, *most])[0].rows[0].peak_memory == 2.0
    assert rows["dapo"].peak_memory is None
    (worse,) = summarise([*records("solver", bad), *records("solver, flipped", good), *records("dapo", dapo)])
    assert all(found.p_greater > 0.5 for found in worse.told_apart.values())
