r"""Which letter a response chooses: every way to write one letter is read; several letters are no answer."""

from __future__ import annotations

import time

import pytest

from delta_cli.data.problem import Problem
from delta_cli.recipe.reward import Reward
from delta_cli.rewards.choice import choice_reward, chosen
from delta_cli.rewards.grader import Grader


@pytest.mark.parametrize(
    "answer",
    [
        *("C", "(C)", "C.", "C)", "(C).", "[C]", r"\text{C}", r"\text{(C)}", r"\textbf{C}", r"\mathrm{C}", "$C$"),
        *(r"\left( C \right)", "**C**", "(C) 4 m/s", "C. 4 m/s", "C) A cat and a dog", r"(C)\ \text{iron}", " C \n"),
        *(
            "(C) I would say so",
            "C: 5 apples",
            "(C) none of the above",
            "C) not enough data",
            "(C) a red ball",
            "C) f(x)",
        ),
        *("(C) false", r"(C) $\frac{a}{b}$", "C) 3 g"),
    ],
)
def test_a_letter_is_read_however_it_is_written(answer: str) -> None:
    assert chosen(f"So it must be this.\n\\boxed{{{answer}}}") == "C"


@pytest.mark.parametrize(
    "answer",
    [
        *("A, C", "A and C", "AC", "(A)(C)", "(C) or (D)", "C. 42 A. 43", "C/D", "C, D", "C) 4 m/s, or D) 5 m/s"),
        *("", "42", "Carbon", "c", "K", "4 (C)", r"\text{A or C}", "not C", "C or B", "ABCDEFGHIJ", "(C) or B"),
        *(
            "C) or (d)",
            "(C) or d",
            "C) and d)",
            "(C) and (b)",
            "C) or [d]",
            "C. or d.",
            "(C) or maybe d",
            "(C)/(d)",
            "(C)(d)",
        ),
        *("C) 4 m/s (d) 5 m/s", "C) 4; d) 5", r"C) or \textbf{d}", "(C) is wrong", "(C) is not right", "C) isn't it"),
    ],
)
def test_several_letters_or_none_are_no_answer(answer: str) -> None:
    assert chosen(f"\\boxed{{{answer}}}") is None


@pytest.mark.parametrize(
    ("response", "letter"),
    [
        ("(A) is wrong. The answer is (C).", "C"),
        ("Answer: C", "C"),
        ("The correct answer is: **C**\n", "C"),
        ("The answer is A. No, wait: the answer is D.", "D"),
        ("\\boxed{A} is tempting, but \\boxed{B}", "B"),
        ("The answer is C, D or E.", None),
        ("The answer is (C), since (A) and (B) fail.", None),
        ("The answer is (C). (A) and (B) fail.", "C"),
        ("the answer is A or B.", None),
        ("I choose C", None),
        ("The answer is \\boxed{C", None),
        ("<think>The answer is C</think> It depends.", None),
        ("<think>The answer is A</think> The answer is C.", "C"),
        ("<think>\\boxed{A}</think> \\boxed{C}", "C"),
        ("The answer is C. \\boxed{", None),
        ("", None),
    ],
)
def test_without_a_box_the_last_statement_counts(response: str, letter: str | None) -> None:
    assert chosen(response) == letter


def test_the_reward_compares_letters() -> None:
    assert choice_reward(r"\boxed{\text{B}}", "B") == 1.0
    assert choice_reward(r"\boxed{B}", "(B)") == 1.0
    assert choice_reward(r"\boxed{B}", "C") == 0.0
    assert choice_reward("nothing", "nothing") == 0.0  # no response is right for a gold that names no letter


def test_the_grader_knows_the_verifier() -> None:
    problem = Problem("1", "Which?", "D")
    with Grader(Reward(kind="choice", workers=1, timeout=20.0)) as grader:
        right = grader.submit(r"\boxed{(D)}", problem, 5, False).result()
        wrong = grader.submit(r"\boxed{(C), (D)}", problem, 5, False).result()
    assert (right.correct, right.reward, right.failure) == (True, 1.0, None)
    assert (wrong.correct, wrong.failure) == (False, None)


def test_a_hostile_response_takes_no_time() -> None:
    start = time.process_time()
    boxes = ["\\boxed{" + text * 100_000 + "}" for text in ("(", "C", "C ", "(C)", " ", "\\text")]
    for text in ("answer is " * 20_000, "answer" + " " * 200_000, "answer is (C" * 9999, *boxes):
        chosen(text)
    assert time.process_time() - start < 1.0
