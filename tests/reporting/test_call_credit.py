"""The credit of calls: means over the tokens that a hand-made turn puts into each call and argument."""

from __future__ import annotations

import numpy as np
import pytest

from delta_cli.reporting.call_credit import CallCredit, call_credits

JSON = [
    "I look",
    ". ",
    "<tool_call>",
    '{"name": "',
    "search",
    '", "arguments": {',
    '"query": "',
    "a b",
    '", "li',
    'mit": ',
    "5",
    "}}",
    "</tool_call>",
]


def numbered(pieces: list[str]) -> list[CallCredit]:
    """The calls, if the coefficient of a token is its place."""
    return call_credits(pieces, np.arange(len(pieces), dtype=np.float64))


def test_a_call_as_json() -> None:
    """The call is tokens 3 to 11, the query 6 to 8 with both quotation marks, the limit token 10 alone."""
    (call,) = numbered(JSON)
    assert call == CallCredit("search", pytest.approx(7.0), {"query": pytest.approx(7.0), "limit": pytest.approx(10.0)})
    assert str(call) == "search(query 7.000, limit 10.000) 7.000"


def test_two_calls_and_values_that_are_nested() -> None:
    pieces = ['{"name":"a","parameters":{"x":', ' [1, {"y": "}"}]', "}}", " then ", '{"name":"b","arguments":{}}']
    first, second = numbered(pieces)
    assert first == CallCredit("a", pytest.approx(1.0), {"x": pytest.approx(1.0)})
    assert second == CallCredit("b", pytest.approx(4.0), {})
    (call,) = numbered(['{"name":"c",', '"arguments":"{\\"x\\": 1}"}'])
    assert call == CallCredit("c", pytest.approx(0.5), {})


@pytest.mark.parametrize(
    "pieces",
    [
        ["<tool_call>", "<function=search>", "<parameter=query>", "a b", "</parameter>", "</function>", "</tool_call>"],
        ["?", "<tool_call>search", "<arg_key>query</arg_key><arg_value>", "a b", "</arg_value>", "</tool_call>"],
    ],
    ids=["function", "arg_key"],
)
def test_calls_as_tags(pieces: list[str]) -> None:
    (call,) = numbered(pieces)
    assert call.name == "search"
    assert call.arguments == {"query": pytest.approx(3.0)}
    assert call.coefficient == pytest.approx(3.0)


@pytest.mark.parametrize(
    "text", ["", "{", '{"name": 3, "arguments": {}}', '{"x": {"y": 1}}', "<function=a>", "{" * 5000]
)
def test_what_is_no_call(text: str) -> None:
    assert numbered([text]) == []
