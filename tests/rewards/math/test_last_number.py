"""The last number of a response: every pair was decided by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delta_cli.data.problem import Problem
from delta_cli.errors import UserError
from delta_cli.recipe.reward import Reward
from delta_cli.rewards.grader import Grader
from delta_cli.rewards.math.last_number import last_number, number_reward
from delta_cli.rewards.verifiers import check_answers

FOUND = {
    "3 * 4 = 12. The answer is 12.": "12",
    "so 7": "7",
    "#### 18": "18",
    "18 eggs\n#### 9\nor was it 10?": "9",
    "#### 3\n#### 4": "4",
    "#### $1,234.50": "1234.50",
    "#### -3": "-3",
    "####5": "5",
    "It costs $70,000 in all": "70000",
    "The answer is -2": "-2",
    "x = -2": "-2",
    "= −2": "-2",
    "It is $-5": "-5",
    "It is -$5": "-5",
    "10 - 2 = 8": "8",
    "12/3 = 4": "4",
    "(8)": "8",
    "**8**": "8",
    "8 - which is right": "8",
    "5 apples": "5",
    "3/4": "3/4",
    "a 3 / 4 share": "3/4",
    "50%": r"50\%",
    "50 %": r"50\%",
    ".5": ".5",
    "0.50": "0.50",
    "2, 3 and 4": "4",
    "1.": "1",
    "x-axis, 4": "4",
    "a well-known 7": "7",
}
NONE = [
    "",
    "none",
    "####",
    "#### twelve",
    "7 #### twelve",
    "3 + 4",  # work that is left
    "10 - 2",
    "10 -2",
    "3 * 4",
    "3 × 4",
    "3 x 4",
    "12 = 3*4",
    "2^3",
    "2 = ",
    "4 +",
    "x2",  # a name
    "at 10:30",
    "1,2,3",  # a list without spaces, or a decimal comma
    "12,5",
    "1.2.3",
    "1/2/3",
    "5kg",  # 5k, 1e3, 2x: no word is read
    "1e3",
    "7th",
    "10-12",
]


@pytest.mark.parametrize(("text", "expected"), FOUND.items())
def test_the_number_that_is_the_answer(text: str, expected: str) -> None:
    assert last_number(text) == expected


@pytest.mark.parametrize("text", NONE)
def test_no_number_is_the_answer(text: str) -> None:
    assert last_number(text) is None


@pytest.mark.parametrize(
    ("gold", "response", "question", "right"),
    [
        ("18", "so 18.", "", True),
        ("18", "so 18.0", "", True),
        ("18", "18, no, 19", "", False),
        ("18", "#### 18 and 19 more", "", True),
        ("1234", "1,234", "", True),
        ("a long way #### 1,234", "1234", "", True),  # the gold as GSM8K writes it
        ("0.5", "1/2", "", True),
        ("4", "8/2", "", False),  # work that is left
        ("8/2", "4", "", True),
        ("50", "50%", "What percent is it?", True),
        ("50", "50%", "How many?", False),
        ("0.5", "50%", "", True),
        ("-3", "3", "", False),
        ("3", "", "", False),
        ("no number", "no number", "", False),
        ("5", "12,5", "", False),
        ("2", "10 - 2", "", False),
    ],
)
def test_verdicts(gold: str, response: str, question: str, right: bool) -> None:
    assert number_reward(response, gold, question) == right
    with Grader(Reward(kind="number")) as grader:
        verdict = grader.submit(response, Problem("p", question, gold), 3, False).result()
    assert (verdict.reward, verdict.correct, verdict.failure) == (float(right), right, None)


@given(st.integers(-(10**9), 10**9), st.integers(-(10**9), 10**9))
def test_integers_are_what_they_are(gold: int, given: int) -> None:
    """Whole and with commas; another integer is another answer."""
    for text in (f"The answer is {given}.", f"#### {given:,}", f"that makes {given:,} apples"):
        assert number_reward(text, str(gold)) == (gold == given)
        assert number_reward(text, str(given)) == 1.0


@given(st.text(alphabet="0123456789.,/-−+*^= x$%#(){}\\\n", max_size=60))
def test_whatever_stands_there_is_read_or_refused(text: str) -> None:
    found = last_number(text)
    assert found is None or number_reward(text, found) in (0.0, 1.0)


def test_the_bonus_for_form_is_for_a_marked_number() -> None:
    with Grader(Reward(kind="number", format_bonus=0.25)) as grader:
        problem = Problem("p", "", "4")
        rewards = [grader.submit(text, problem, 1, False).result().reward for text in ("4", "#### 4", "#### 4 #### 4")]
    assert rewards == [1.0, 1.25, 1.0]


def test_a_gold_answer_without_a_number_is_refused_by_name() -> None:
    check_answers("number", [Problem("a", "", "7"), Problem("b", "", "... #### 1,000")])
    for answer in ("none", {"type": "stdio"}):
        with pytest.raises(UserError, match=r"problem 'c' of own: .*no number"):
            check_answers("number", [Problem("a", "", "7"), Problem("c", "", answer, "own")])
