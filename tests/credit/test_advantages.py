"""Advantages by hand, by their definitions and by what must not change them."""

from __future__ import annotations

import statistics

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from delta_cli.credit import group_advantages
from delta_cli.credit.advantages import ADVANTAGES

FEW = settings(max_examples=30, deadline=None)
REWARDS = st.lists(st.tuples(st.sampled_from([0.0, 0.1, 0.5, 1.0, -1.0]), st.integers(0, 3)), min_size=1, max_size=16)


def literal(rewards: list[float], groups: list[int], kind: str) -> list[float]:
    result = []
    for i, (reward, group) in enumerate(zip(rewards, groups, strict=True)):
        members = [r for r, g in zip(rewards, groups, strict=True) if g == group]
        others = [r for j, (r, g) in enumerate(zip(rewards, groups, strict=True)) if g == group and j != i]
        mean, std = (statistics.fmean(members), statistics.stdev(members)) if others else (0.0, 1.0)
        if kind == "leave_one_out":
            result.append(reward - (statistics.fmean(others) if others else 0.0))
        else:
            result.append((reward - mean) / (std + 1e-6 if kind == "group_normalised" else 1))
    return result


def test_by_hand() -> None:
    """Rewards 1, 0, 0, 1 have mean 1/2 and unbiased variance 4·(1/4)/3 = 1/3."""
    groups = [5, 5, 5, 5]
    expected = 0.5 / (np.sqrt(1 / 3) + 1e-6)
    np.testing.assert_allclose(
        group_advantages([1, 0, 0, 1], groups), [expected, -expected, -expected, expected], rtol=1e-14
    )
    np.testing.assert_allclose(group_advantages([1, 0, 0, 1], groups, "mean_removed"), [0.5, -0.5, -0.5, 0.5])
    np.testing.assert_allclose(
        group_advantages([1, 0, 0, 1], groups, "leave_one_out"), [2 / 3, -2 / 3, -2 / 3, 2 / 3], rtol=1e-14
    )


def test_a_group_of_one_has_mean_0_and_std_1() -> None:
    assert group_advantages([0.7, 1, 0], [3, 1, 1])[0] == pytest.approx(0.7 / (1 + 1e-6), rel=1e-14)
    for kind in ("mean_removed", "leave_one_out"):
        assert group_advantages([0.7, 1, 0], [3, 1, 1], kind)[0] == 0.7


@pytest.mark.parametrize("kind", ADVANTAGES)
@pytest.mark.parametrize("reward", [0.1, 1 / 3, 0.7, 1.0, -0.1, 1e6 + 0.1])
@pytest.mark.parametrize("size", [2, 3, 7, 16])
def test_equal_rewards_are_exactly_zero(kind: str, reward: float, size: int) -> None:
    assert not group_advantages([reward] * size + [5.0, 2.0], [0] * size + [1, 1], kind)[:size].any()


@FEW
@given(REWARDS)
@pytest.mark.parametrize("kind", ADVANTAGES)
def test_definition(kind: str, batch: list[tuple[float, int]]) -> None:
    rewards, groups = [r for r, _ in batch], [g for _, g in batch]
    np.testing.assert_allclose(
        group_advantages(rewards, groups, kind), literal(rewards, groups, kind), rtol=1e-9, atol=1e-9
    )


@FEW
@given(REWARDS, st.randoms(use_true_random=False))
def test_order_and_names_of_groups_do_not_matter(batch: list[tuple[float, int]], random) -> None:  # type: ignore[no-untyped-def]
    rewards, groups = np.array([r for r, _ in batch]), np.array([g for _, g in batch])
    order = list(range(len(batch)))
    random.shuffle(order)
    names = np.array([40, -7, 3, 900])
    np.testing.assert_allclose(
        group_advantages(rewards[order], names[groups[order]]), group_advantages(rewards, groups)[order], atol=1e-12
    )


@pytest.mark.parametrize("kind", ADVANTAGES)
def test_a_constant_added_to_a_groups_rewards(kind: str) -> None:
    rewards, groups = np.array([1.0, 0, 0, 0.5, 1, 1]), np.array([0, 0, 0, 1, 1, 1])
    shifted = rewards + np.array([3.0, 3, 3, -2, -2, -2])
    np.testing.assert_allclose(
        group_advantages(shifted, groups, kind), group_advantages(rewards, groups, kind), rtol=1e-12
    )


def test_scale_of_the_rewards_is_normalised_away() -> None:
    rewards, groups = np.array([1.0, 0, 0, 1]), np.zeros(4, int)
    np.testing.assert_allclose(group_advantages(100 * rewards, groups), group_advantages(rewards, groups), rtol=1e-5)


def test_no_response() -> None:
    assert group_advantages([], []).shape == (0,)
