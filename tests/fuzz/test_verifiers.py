"""Any response gets a verdict quickly, without an exception and without a reward for a wrong answer."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import Any

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from delta_cli.data.problem import Problem
from delta_cli.errors import UserError
from delta_cli.recipe.reward import Reward
from delta_cli.rewards import code_reward, math_reward
from delta_cli.rewards.grader import Grader
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
    """An answer that is right for two different numbers would be right for any."""
    assert sum(verdict(answer, gold) for gold in ("85", "86", r"\frac{85}{2}")) <= 1


@given(NUMBERS, NUMBERS, LATEX)
def test_a_number_with_a_suffix(number: int, other: int, rest: str) -> None:
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
