from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delta_cli.data.problem import Problem
from delta_cli.data.prompt_order import batch


def numbered(count: int) -> list[Problem]:
    return [Problem(str(i), f"question {i}", i) for i in range(count)]


@given(count=st.integers(1, 30), size=st.integers(1, 40), seed=st.integers(0, 5))
def test_every_problem_comes_once_an_epoch(count: int, size: int, seed: int) -> None:
    pool = numbered(count)
    drawn = [problem.id for step in range(3 * count) for problem in batch(pool, step, size, seed)]
    assert len(drawn) == 3 * count * size
    for start in range(0, len(drawn) - count + 1, count):
        assert Counter(drawn[start : start + count]) == Counter(problem.id for problem in pool)


def test_a_step_depends_on_nothing_but_its_arguments() -> None:
    pool = numbered(10)
    later = batch(pool, 7, 4, seed=1)
    assert later == [batch(pool, step, 4, seed=1) for step in range(8)][7]
    assert later != batch(pool, 7, 4, seed=2)


def test_epochs_are_shuffled_differently() -> None:
    pool = numbered(50)
    assert batch(pool, 0, 50, seed=0) != batch(pool, 1, 50, seed=0)


def test_nothing_to_draw_from() -> None:
    with pytest.raises(ValueError, match="no problems"):
        batch([], 0, 4, 0)
