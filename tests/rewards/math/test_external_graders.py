"""External graders against tables worked by hand and against direct calls of the library."""

from __future__ import annotations

import re

import pytest

from delta_cli.data.problem import Problem
from delta_cli.recipe.reward import Reward
from delta_cli.rewards import math_reward
from delta_cli.rewards.grader import Grader
from delta_cli.rewards.math import external_graders
from delta_cli.rewards.math.external_graders import math_verify_reward, public_reward

# response, gold, then the verdicts of our verifier, math-verify and the public rule
TABLE = [
    (r"\boxed{5}", "5", 1, 1, 1),
    (r"\boxed{6}", "5", 0, 0, 0),
    (r"\boxed{50\%}", "50", 0, 1, 1),
    (r"\boxed{5}", r"5\%", 0, 1, 1),
    (r"so \boxed 5", "5", 0, 1, 0),
    ("The answer is 5.", "5", 0, 1, 0),
    ("$5$", "5", 0, 1, 0),
    (r"\boxed{\frac12}", "0.5", 1, 1, 1),
    (r"\boxed{1,000}", "1000", 1, 1, 1),
    (r"\boxed{2^{3}}", "8", 0, 1, 1),
    (r"\boxed{2\sqrt{2}}", r"\sqrt{8}", 1, 1, 1),
    (r"\boxed{(1,2]}", "(1,2)", 0, 0, 0),
    (r"\boxed{(1, \frac{4}{2})}", "(1,2)", 0, 1, 1),
    (r"\boxed{\text{even}}", "even", 1, 1, 1),
    (r"\boxed{\text{odd}}", "even", 0, 0, 0),
    ("", "5", 0, 0, 0),
]


@pytest.mark.parametrize(("response", "gold", "ours", "library", "public"), TABLE)
def test_the_three_graders(response: str, gold: str, ours: int, library: int, public: int) -> None:
    assert (math_reward(response, gold), math_verify_reward(response, gold), public_reward(response, gold)) == (
        ours,
        library,
        public,
    )


@pytest.mark.parametrize(("response", "gold"), [row[:2] for row in TABLE])
def test_math_verify_is_the_librarys_own_verdict(response: str, gold: str) -> None:
    """Called as its own metric does: boxed gold, raw response, default extraction."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    truth = parse(f"\\boxed{{{gold}}}", [LatexExtractionConfig()])
    given = parse(response, [ExprExtractionConfig(), LatexExtractionConfig()])
    assert math_verify_reward(response, gold) == float(bool(truth and given) and verify(truth, given))


def transcribed(response: str, gold: str) -> bool:
    """The public rule for integers, decimals and fractions only, with exact arithmetic instead of sympy."""
    from fractions import Fraction

    found = re.findall(r"\\boxed\{((?:[^{}]|\{[^{}]*\})*)\}", response)
    if not found:
        return False
    values = []
    for text in (gold, found[-1]):
        bare = re.sub(r"[\\%$,\s]|left|right", "", text.replace("\\%", ""))
        fraction = re.fullmatch(r"(-?)[dt]?frac\{(-?\d+)\}\{(-?\d+)\}", bare)
        if fraction:
            values.append(Fraction(int(fraction[2]), int(fraction[3])) * (-1 if fraction[1] else 1))
        else:
            values.append(Fraction(bare))
    return values[0] == values[1]


@pytest.mark.parametrize("gold", ["50", "0.5", r"\frac{3}{4}", "-12", r"25\%", "1000", r"-\frac{1}{3}"])
@pytest.mark.parametrize(
    "answer", ["50", r"50\%", "0.50", r"\frac{6}{8}", r"\dfrac{3}{4}", "-12", r"25\%", "25", "1,000", r"\$1000", "0.25"]
)
def test_the_public_rule_on_numbers_is_its_transcription(answer: str, gold: str) -> None:
    response = f"So $\\boxed{{1}}$, no, \\boxed{{{answer}}}."
    assert public_reward(response, gold) == float(transcribed(response, gold))


@pytest.mark.parametrize("answer", ["test()", "exit()", "__import__", "9**9**9**9", "x.y", "preview(x)", "(" * 200])
def test_nothing_of_an_answer_is_run(answer: str) -> None:
    assert public_reward(f"\\boxed{{{answer}}}", "5") == 0.0


@pytest.mark.parametrize("kind", ["math-verify", "public"])
def test_the_grader_uses_them_in_its_workers(kind: str) -> None:
    problem = Problem("1", "?", "50")
    with Grader(Reward(verifier=kind, workers=1, timeout=60.0)) as grader:  # type: ignore[arg-type]
        verdict = grader.submit(r"\boxed{50\%}", problem, 3, False).result()
        wrong = grader.submit(r"\boxed{51}", problem, 3, False).result()
    assert (verdict.correct, verdict.failure) == (True, None)
    assert (wrong.correct, wrong.failure) == (False, None)


@pytest.mark.parametrize(
    ("given", "truth", "accepting"),
    [("abc.", "abc", "_same_text"), ("2**3", "8", "_same_symbols"), ("ab", "b*a", "_same_by_library")],
)
def test_each_of_the_public_rules_graders_suffices(given: str, truth: str, accepting: str) -> None:
    graders = ("_same_text", "_same_symbols", "_same_by_library")
    assert [name for name in graders if getattr(external_graders, name)(truth, given)] == [accepting]
    assert public_reward(f"\\boxed{{{given}}}", truth) == 1.0
