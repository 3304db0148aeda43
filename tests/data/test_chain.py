"""Chains of sums: solutions that add up, and mistakes judged by what the response says before them."""

from __future__ import annotations

import numpy as np
import pytest

from delta_cli.data import chain
from delta_cli.data.loading import load_problems
from delta_cli.data.problem import Problem
from delta_cli.errors import UserError
from delta_cli.recipe.data import DataSection

PROBLEM = Problem("a4b7c2", "a4b7c2=?", "3", "chain")
RIGHT = "then take b: 4+7=11; and now c: 1+2=3! \\boxed{3}"


def test_solutions_are_right_and_worded_in_several_ways() -> None:
    rng = np.random.default_rng(0)
    texts = {chain.solution(PROBLEM, rng) for _ in range(40)}
    assert len(texts) > 30
    for text in texts:
        assert chain.wrong_characters(PROBLEM, text) == []
        assert text.endswith(f"\\boxed{{{(4 + 7 + 2) % 10}}}")


def test_a_wrong_sum_is_carried_on() -> None:
    text = chain.solution(PROBLEM, np.random.default_rng(0), lambda a, b: a + b + 3)
    assert "4+7=14" in text
    assert "4+2=9" in text


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        (RIGHT, ""),
        (
            RIGHT.replace("=11", "=15"),
            "51",
        ),  # the sum, and the operand that is not the last digit of the result before it
        (RIGHT.replace("=11", "=15").replace("1+2=3", "5+2=7").replace("{3}", "{7}"), "5"),
        (RIGHT.replace("=11", "=9").replace("1+2=3", "9+2=11").replace("{3}", "{1}"), "9"),
        (RIGHT.replace("=11", "=1"), "1"),  # the last digit is right, the sum is not
        (RIGHT.replace("4+7=11", "4+6=10").replace("1+2=3", "0+2=2").replace("{3}", "{2}"), "6"),
        (RIGHT.replace("{3}", "{4}"), "4"),
        (RIGHT.replace("and now c", "and c"), "a"),  # no such wording: the step's first character
        ("then take b: 4+7=1;", "t"),
        ("", ""),
    ],
)
def test_mistakes_are_local(text: str, wrong: str) -> None:
    assert "".join(text[place : place + 1] for place in chain.wrong_characters(PROBLEM, text)) == wrong


def test_results_and_operands_are_the_characters_that_decide() -> None:
    assert "".join(RIGHT[place] for place in chain.result_characters(RIGHT)) == "4711123"


def test_the_splits_share_no_problem_and_steps_are_the_recipes() -> None:
    data = load_problems(DataSection(source="chain", steps=3, limit=200, held_out=0.25), seed=1)
    assert (len(data.problems), len(data.held_out)) == (150, 50)
    assert not {each.question for each in data.problems} & {each.question for each in data.held_out}
    assert {len(chain.digits_of(each)) for each in data.problems} == {4}
    for problem in data.problems[:20]:
        assert int(problem.answer) == sum(int(c) for c in problem.question if c.isdigit()) % 10


def test_too_few_problems_is_one_line() -> None:
    with pytest.raises(UserError, match=r"data.steps = 1: the split 'held_out' has too few problems for the 90"):
        chain.problems(1, 90, 0, "held_out")
    with pytest.raises(UserError, match="does not come from the source 'chain'"):
        chain.digits_of(Problem("x", "1+2=?", "3", "arithmetic"))
