"""Answers that a verifier cannot use are named before a run, not after it trained on nothing."""

from __future__ import annotations

from typing import Any

import pytest

from delta_cli.data.problem import Problem
from delta_cli.errors import UserError
from delta_cli.rewards.code.verdict import _same_value
from delta_cli.rewards.verifiers import check_answers

TESTS = {"type": "asserts", "code": "assert f(1) == 2"}


@pytest.mark.parametrize(
    ("kind", "answer", "message"),
    [
        ("code", "85", "need a 'type'"),
        ("code", {"type": "asserts", "code": "x = 1"}, "nothing to count"),
        ("math", {"a": 1}, "is an object"),
        ("math", TESTS, 'reward.kind = "code"'),
    ],
)
def test_an_answer_of_the_wrong_kind_is_named(kind: Any, answer: object, message: str) -> None:
    problems = [Problem("good", "q", TESTS if kind == "code" else "5", "file"), Problem("bad", "q", answer, "file")]
    with pytest.raises(UserError, match=message) as caught:
        check_answers(kind, problems)
    assert str(caught.value).startswith("problem 'bad' of file: ")


def test_answers_of_the_right_kind_pass() -> None:
    check_answers("code", [Problem("p", "q", TESTS)])
    check_answers("math", [Problem("p", "q", "5")])
    check_answers("custom", [Problem("p", "q", {"anything": 1})])


def test_an_integer_beyond_every_float_is_compared() -> None:
    assert not _same_value(10**400, 1.5)
    assert not _same_value(1.5, 10**400)
    assert _same_value(10**400, 10**400)
