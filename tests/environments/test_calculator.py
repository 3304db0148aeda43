"""The calculator: results of exact arithmetic, refusals in words, and equations completed in running text."""

from __future__ import annotations

import random
from fractions import Fraction

import pytest

from delta_cli.environments.calculator import RunningCalculator, calculate
from delta_cli.environments.turn import ToolError, Turn


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("12 * (3 + 4)", "84"),
        ("7/2", "3.5"),
        ("10 / 3", "3.333333"),
        ("-4 - -6", "2"),
        ("0.1 + 0.2", "0.3"),
        ("1,200 × 3", "3600"),
        ("$8 ÷ 2", "4"),
    ],
)
def test_results(expression: str, result: str) -> None:
    assert calculate(expression) == result


def test_random_sums_equal_exact_fractions() -> None:
    rng = random.Random(0)
    for _ in range(300):
        numbers = [rng.randint(1, 99) for _ in range(4)]
        signs = [rng.choice("+-*") for _ in range(3)]
        text = f"({numbers[0]} {signs[0]} {numbers[1]}) {signs[1]} {numbers[2]} {signs[2]} {numbers[3]}"
        assert Fraction(calculate(text)) == eval(text)  # of digits and signs that were written above


@pytest.mark.parametrize(
    "expression",
    ["", "1 / 0", "2 ** 900", "__import__('os')", "9" * 300, "1 +", "(" * 150, "1e400", "9**9**9", "a", "True + 1"],
)
def test_refusals(expression: str) -> None:
    with pytest.raises(ToolError):
        calculate(expression)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (" 12 * 4 =", " 48"),
        ("7+8=", "15"),
        (" so 5 apples cost 5 * 3 =", " 15"),
        (", 10 + 1 =", " 11"),
        (" x =", " ?"),
        ("1/0=", "?"),
    ],
)
def test_running_text(text: str, answer: str) -> None:
    assert RunningCalculator().step(text) == Turn(answer)


@pytest.mark.parametrize("text", ["", " the answer is 5\n", "3 = 3", "no sum"])
def test_anything_else_ends_the_episode(text: str) -> None:
    assert RunningCalculator().step(text).done
