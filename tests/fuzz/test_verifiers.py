"""Any response gets a verdict quickly, without an exception and without a reward for a wrong answer."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from delta_cli.data.problem import Problem
from delta_cli.errors import UserError
from delta_cli.recipe.reward import Reward
from delta_cli.rewards import code_reward, math_reward
from delta_cli.rewards.grader import Grader
from delta_cli.rewards.math.last_number import number_reward
from delta_cli.rewards.math.latex import normalise
from tests.rewards.responses import responses

TEXT = r"""
0 1 2 5 9 10 0.5 1/2 x y n a e i f(x) A AB + - * / ^ _ = < > ! , ; : . | ' " & ( ) [ ] { } % $ ~ ° π ∞
\frac{1}{2} \frac \sqrt \sqrt[3]{ \pi \cdot \times \div \pm \approx \le \ge \ne \in \cup \infty \sum_{k=1}^{9}
\int_0^1 \lim \max \det \binom \sin \cos \ln \log_2 \exp \overline{36} \left( \right) \{ \} \text{cm} \text{and}
\begin{pmatrix} \end{pmatrix} \\ \boxed{ \frac{dy}{dx} \circ \mathbb{Z} \ldots \% \$ ^{2} ^{-1} _{3} cm eggs or
"""
PIECES = TEXT.split()
LATEX = st.lists(st.sampled_from(PIECES), max_size=25).map("".join)
ANSWERS = LATEX | st.text(max_size=30)
NUMBERS = st.integers(-(10**6), 10**6)


def verdict(answer: str, gold: str) -> float:
    """The reward, which must take less than a second."""
    started = time.process_time()
    reward = math_reward(rf"\boxed{{{answer}}}", gold, "How many eggs, in percent?")
    assert time.process_time() - started < 1.0
    return reward


@given(ANSWERS, ANSWERS)
def test_any_answer_has_a_verdict(answer: str, gold: str) -> None:
    assert verdict(answer, gold) in (0.0, 1.0)
    assert verdict(gold, gold) in (0.0, 1.0)


@given(LATEX)
def test_no_answer_is_right_for_two_golds(answer: str) -> None:
    assert sum(verdict(answer, gold) for gold in ("85", "86", r"\frac{85}{2}")) <= 1


@given(NUMBERS, NUMBERS, LATEX)
def test_a_number_with_something_behind_it(number: int, other: int, rest: str) -> None:
    assume(number != other)
    assert verdict(f"{number}", f"{other}") == 0.0
    if verdict(f"{number}{rest}", f"{number}") and verdict(f"{number}{rest}", f"{other}"):
        raise AssertionError(f"{number}{rest} is {number} and {other}")


@given(
    st.lists(
        st.sampled_from([r"\frac{1}{", r"\sin(", r"\sqrt{", "x^{", "(", r"\ln(", "|", "-(", r"\binom{9}{"]), max_size=24
    )
)
def test_any_nesting(opened: list[str]) -> None:
    closing = {"{": "}", "(": ")", "|": "|"}
    text = "".join(opened) + "x" + "".join(closing[each[-1]] for each in reversed(opened))
    assert verdict(text, text) == (1.0 if normalise(text) else 0.0)
    verdict(text, text + "+1")


@given(st.sampled_from(PIECES), st.sampled_from(PIECES), st.sampled_from(PIECES), st.integers(1, 900), st.booleans())
def test_long_repetitions_stay_within_the_budget(first: str, second: str, last: str, times: int, blocks: bool) -> None:
    text = (first * times + second * times if blocks else (first + second) * times)[:1990] + last
    for gold in ("85", r"\frac{x+1}{2}", r"(-\infty,2)\cup(5,\infty)", r"5\text{ cm}", text):
        verdict(text, gold)


# ------------------------------------------------------------- right and wrong answers, by an independent oracle

FRACTIONS = st.fractions(min_value=-500, max_value=500, max_denominator=60)
STYLES = st.lists(
    st.sampled_from(
        [
            *("{%s}", r"\mathbf{%s}", r"\textcolor{red}{%s}", r"\boxed{%s}", "$%s$", r"\left(%s\right)", "(%s)", "%s."),
            *(r"\displaystyle %s", r"\underline{%s}", r"\Large %s", r"\,%s\,", '"%s"', r"{\color{blue}%s}", "x=%s"),
        ]
    ),
    max_size=3,
    unique=True,
)
# What changes a number, or says something else about it.
CHANGES = [
    *(r"%s\text{5}", r"%s\text{/5}", r"%s\text{ ft 5 in}", r"%s\text{^2}", r"%s\text{ million}", r"%s\text{ per}"),
    *(r"%s{5}",),
    *(r"%s\mathbf{5}", "%s+1", "%s,5", "%s;5", r"%s\text{ or }5000", r"%s\pm1", "%s_7", "%sx", r"%s\pi"),
    *("%s!!",),
    *(r"\text{not }%s", r"\neq %s", r"x\not=%s", r"\neg x=%s", r"\sin x=%s", r"\lfloor x\rfloor=%s", "2x=%s", "-x=%s"),
    *(r"\text{half of }%s", "x>%s", r"x\in%s", r"\{%s,5000\}", "(%s,5000)", r"\cancel{%s}", "%s=5000", "5000=%s"),
    *("%s...",),
]


def spellings(value: Fraction) -> list[str]:
    """Ways to write a number, for its value alone."""
    sign, size = "-" if value < 0 else "", abs(value)
    above, below = size.numerator, size.denominator
    if below == 1:
        return [f"{value}", f"{sign}{above:,}", f"{value}.0", rf"{sign}{above}{{,}}0" if above == 0 else f"{value}"]
    ways = [f"{sign}{above}/{below}", rf"{sign}\frac{{{above}}}{{{below}}}", rf"\frac{{{sign}{above}}}{{{below}}}"]
    ways += [rf"{sign}\dfrac{{{3 * above}}}{{{3 * below}}}", rf"{sign}{{{above} \over {below}}}"]
    if above > below:
        ways.append(rf"{sign}{above // below}\frac{{{above % below}}}{{{below}}}")
    if 10**6 % below == 0:
        ways.append(f"{float(value):f}")
    return ways


def styled(text: str, styles: list[str]) -> str:
    for style in styles:
        text = style % text
    return text


@given(st.data(), FRACTIONS, FRACTIONS, STYLES)
def test_numbers_are_right_if_and_only_if_they_are_equal(
    data: Any, value: Fraction, other: Fraction, styles: list[str]
) -> None:
    gold = data.draw(st.sampled_from(spellings(value)))
    for each in (value, other):
        answer = styled(data.draw(st.sampled_from(spellings(each))), styles)
        if styles.count("x=%s") < 2 and '"%s"' not in styles[:-1]:
            assert verdict(answer, gold) == float(each == value)
        elif each != value:
            assert verdict(answer, gold) == 0.0


@given(st.data(), FRACTIONS, st.sampled_from(CHANGES), STYLES)
def test_what_changes_a_number_is_refused(data: Any, value: Fraction, change: str, styles: list[str]) -> None:
    assume(value not in (0, 5, 5000))
    answer = styled(change % data.draw(st.sampled_from(spellings(value))), [each for each in styles if "=" not in each])
    assert verdict(answer, data.draw(st.sampled_from(spellings(value)))) == 0.0


ROOTS = st.lists(st.integers(-9, 9), min_size=1, max_size=4)


def expanded(roots: list[int], scale: int) -> list[int]:
    """The coefficients of ``scale`` times the product of ``x - root``, highest first."""
    coefficients = [scale]
    for root in roots:
        shifted = [*coefficients, 0]
        coefficients = [a - root * b for a, b in zip(shifted, [0, *coefficients], strict=True)]
    return coefficients


@given(ROOTS, ROOTS, st.integers(1, 9), st.permutations(range(5)))
def test_polynomials_are_right_if_and_only_if_their_coefficients_are(
    roots: list[int], others: list[int], scale: int, order: list[int]
) -> None:
    terms = expanded(roots, scale)
    degree = len(terms) - 1
    written = [f"{'+' if c >= 0 else '-'}{abs(c)}x^{{{degree - i}}}" for i, c in enumerate(terms)]
    gold = "".join(written[i] for i in order if i < len(written)).lstrip("+")
    answer = f"{scale}" + "".join(f"(x{'-' if root >= 0 else '+'}{abs(root)})" for root in others)
    assert verdict(answer, gold) == float(expanded(others, scale) == terms)


PIECE = st.tuples(st.integers(-9, 9), st.integers(1, 6), st.sampled_from(["()", "[]", "[)", "(]"]))


def contains(pieces: list[tuple[int, int, str]], doubled: int) -> bool:
    """Whether half of ``doubled`` lies in one of the intervals."""
    return any(
        (2 * low < doubled or (2 * low == doubled and kind[0] == "["))
        and (doubled < 2 * (low + length) or (doubled == 2 * (low + length) and kind[1] == "]"))
        for low, length, kind in pieces
    )


@given(st.lists(PIECE, min_size=1, max_size=3), st.lists(PIECE, min_size=1, max_size=3))
def test_unions_are_right_if_and_only_if_they_have_the_same_numbers(first: Any, second: Any) -> None:
    gold = r"\cup".join(f"{kind[0]}{low},{low + length}{kind[1]}" for low, length, kind in first)
    signs = {"[": r"\le ", "(": "<", "]": r"\le ", ")": "<"}
    parts = [f"{low}{signs[kind[0]]}x{signs[kind[1]]}{low + length}" for low, length, kind in second]
    answer = r"\text{ or }".join(parts)
    same = all(contains(first, each) == contains(second, each) for each in range(-30, 40))
    assert verdict(answer, gold) == float(same)


# --------------------------------------------------------------------------------------- numbers without a box


PROSE = ["so", "the", "answer", "is", "not", "than", "of", "or", "negative", "hundred", "####", "<think>", "</think>"]
TEXTS = st.lists(st.sampled_from([*PIECES, *PROSE]))
ALONE = [
    "so %s",
    "The answer is %s.",
    "x = %s",
    "#### %s",
    "**%s**",
    "$%s$",
    "= %s apples",
    "it is (%s)",
    r"\boxed{%s}",
]
BEFORE = st.lists(st.sampled_from(["and", "eggs", ".", "so,", "\n", "12 = 3*4."]), max_size=5).map(" ".join)
IN_MORE = [
    *("2^{%s}", r"5\cdot %s", "max(5, %s)", "%s hundred", "1 %s", "f(%s)", "5 + %s", "x > %s", "(5, %s)", "%s!"),
    *("%s x",),
    *("not %s", "half of %s", "5 to %s", r"\sqrt{%s}", r"%s\pi", "x_{%s}", "%s is wrong", "10:%s", "<think>%s</think>"),
]


@given(TEXTS.map(" ".join) | TEXTS.map("".join) | st.text(max_size=60), NUMBERS, NUMBERS)
def test_any_text_has_one_number_or_none(text: str, number: int, other: int) -> None:
    started = time.process_time()
    assume(number != other)
    assert number_reward(text, str(number)) + number_reward(text, str(other)) <= 1
    assert time.process_time() - started < 0.2


@given(st.integers(11, 10**6), st.integers(11, 10**6), st.sampled_from(ALONE), st.sampled_from(IN_MORE), BEFORE)
def test_a_number_counts_only_where_it_stands_alone(
    number: int, other: int, alone: str, more: str, before: str
) -> None:
    assert number_reward(before + " " + alone % number, str(number)) == 1.0
    assert number_reward(before + " " + alone % number, str(other)) == float(number == other)
    assert number_reward(before + " " + more % number, str(number)) == 0.0


# ----------------------------------------------------------------------------------------------- programs

LINES = st.sampled_from(
    [
        "def f(x): return x",
        "def f(x): return x + 1",
        "def f(x): raise StopIteration",
        "import os; os._exit(0)",
        "f = 3",
        "class A:\n    __eq__ = lambda *_: True",
        "def f(x): return A()",
        "while True: pass",
        "print(85)",
        "x = (",
        "\0",
        "import sys; sys.exit(0)",
        "def f(x): return f",
        "def f(x): yield x",
        "raise SystemExit",
        "```",
        "math = len = f",
        "def f(x): return {x: [x, (x, None)]}",
        "import math",
        "from dataclasses import *",
        "f = lambda *a, **k: 85",
    ]
)
CHECKS = st.sampled_from(
    [
        "assert f(84) == 85",
        "for x in (1, 2):\n    assert f(x) == 'no'",
        "def test_f():\n    assert f(1) == 'no'",
        "import unittest\nclass T(unittest.TestCase):\n    def test(self): self.assertEqual(f(2), 'no')",
        "assert all(map(f, [0, 'no'])) == 'no'",
        "try:\n    f(1)\n    assert False\nexcept KeyError: pass",
        "x = 1",
        "(",
    ]
)


TABLE_KEYS = st.sampled_from(["type", "code", "cases", "entry_point", "input", "output", "args", "expected"])
TABLES = st.recursive(
    st.none() | st.integers() | st.text(max_size=8) | st.sampled_from(["asserts", "stdio", "calls"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TABLE_KEYS, inner, max_size=4),
    max_leaves=8,
)


def reward_of(response: str, tests: Any, seconds: float) -> float | None:
    """The reward, or None if the tests are refused with an error of one line."""
    try:
        return code_reward(response, tests, seconds=seconds)
    except UserError as error:
        if "\n" in str(error):
            raise AssertionError(str(error)) from error
        return None


@pytest.mark.usefixtures("sandbox")
@given(st.lists(LINES, max_size=4).map("\n".join) | st.text(max_size=30), st.lists(CHECKS, min_size=1).map("\n".join))
@settings(max_examples=8)
def test_programs(code: str, checks: str) -> None:
    started = time.monotonic()
    reward = reward_of(f"```python\n{code}\n```", {"type": "asserts", "code": checks}, 0.7)
    assert time.monotonic() - started < 5.0
    assert reward in (0.0, 1.0, None)
    assert not reward or "'no'" not in checks


PAIRWISE = [
    "for a, b in zip(f(), {0}):\n    assert a == b",
    "for a, b in zip({0}, f()):\n    assert a == b",
    "assert all(a == b for a, b in zip(f(), {0}))",
    "def test():\n    for i, (a, b) in enumerate(zip(f(), {0})):\n        assert a == b, i",
]


@pytest.mark.usefixtures("sandbox")
@given(st.lists(st.integers(0, 3), min_size=1, max_size=4), st.lists(st.integers(0, 3), max_size=5), st.data())
@settings(max_examples=60 if os.environ.get("DELTA_FUZZ") else 4)
def test_pairs_are_equal_only_if_none_is_missing(expected: list[int], returned: list[int], data: Any) -> None:
    """More elements than expected pass, as ``zip`` has it; fewer do not."""
    if data.draw(st.booleans()):
        returned = expected[: len(returned)]
    checks = data.draw(st.sampled_from(PAIRWISE)).format(expected)
    code = f"```python\ndef f(): return {returned}\n```"
    assert reward_of(code, {"type": "asserts", "code": checks}, 20) == (returned[: len(expected)] == expected)


@given(TABLES)
@example({"type": "asserts", "code": "assert 0", "cases": "0"})
@example({"type": "asserts", "code": "assert 0", "cases": None})
def test_any_table_of_tests(tests: Any) -> None:
    assert reward_of("no program", tests, 0.7) in (0.0, None)


# ------------------------------------------------------------------------------------------ forged answers


@given(st.integers(0, 2**31))
@settings(max_examples=30 if os.environ.get("DELTA_FUZZ") else 1)
def test_forged_answers_of_a_program(seed: int) -> None:
    """The judge against a program that says anything: only the right answer is rewarded."""
    command = [sys.executable, "-m", "tests.rewards.code.forged", str(seed), "200", "40"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(["", *sys.path])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert len(done.stdout.splitlines()) == 1, done.stdout


@given(st.integers(0, 2**31), st.sampled_from(["math", "number", "format"]))
def test_any_response_is_graded_at_once_or_handed_on(seed: int, kind: Any) -> None:
    with Grader(Reward(kind=kind, format_bonus=0.5)) as grader:
        for response in responses(seed, 10):
            started = time.process_time()
            grader.submit(response, Problem("p", "How many, in percent?", "85"), 1, truncated=False)
            assert time.process_time() - started < 0.5
