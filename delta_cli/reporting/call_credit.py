"""The credit of each tool call that the model wrote, and of each of its arguments."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from backends.arrays import Doubles

# Calls as tags: Qwen3-Coder and others write <function=NAME><parameter=KEY>VALUE, GLM <tool_call>NAME<arg_key>KEY.
FUNCTION = re.compile(r"<function=([^>\s]+)>(.*?)</function>", re.DOTALL)
PARAMETER = re.compile(r"<parameter=([^>\s]+)>(.*?)</parameter>", re.DOTALL)
TAGGED = re.compile(r"<tool_call>\s*([\w.-]+)\s*(<arg_key>.*?)?</tool_call>", re.DOTALL)
ARGUMENT = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)

Place = tuple[int, int]  # characters of a text: the first, and one past the last
_JSON = json.JSONDecoder()


@dataclass(frozen=True)
class CallCredit:
    """A call, with the mean coefficient of its tokens and of those of each argument's value."""

    name: str
    coefficient: float
    arguments: dict[str, float]

    def __str__(self) -> str:
        inside = ", ".join(f"{name} {value:.3f}" for name, value in self.arguments.items())
        return f"{self.name}({inside}) {self.coefficient:.3f}"


def call_credits(pieces: Sequence[str], coefficients: Doubles) -> list[CallCredit]:
    """The calls in a turn of the model, whose tokens have these texts and coefficients.

    Calls are JSON objects with a name and arguments, or the tags <function=…> and <arg_key>; other forms are not
    recognised. A token that is only partly in a call or an argument counts.
    """
    stops = np.cumsum([len(piece) for piece in pieces], dtype=np.int64)
    starts = stops - [len(piece) for piece in pieces]

    def mean(place: Place) -> float | None:
        inside = (stops > place[0]) & (starts < place[1])
        return float(coefficients[inside].mean()) if inside.any() else None

    found = []
    for name, place, arguments in _calls("".join(pieces)):
        whole, each = mean(place), {key: mean(value) for key, value in arguments.items()}
        if whole is not None:
            found.append(CallCredit(name, whole, {key: value for key, value in each.items() if value is not None}))
    return found


def _calls(text: str) -> Iterator[tuple[str, Place, dict[str, Place]]]:
    """Name, place and places of the arguments of each call in a text."""
    for pattern, inner in ((FUNCTION, PARAMETER), (TAGGED, ARGUMENT)):
        for call in pattern.finditer(text):
            start, stop = call.span(2)
            arguments = {each[1].strip(): each.span(2) for each in inner.finditer(text, max(start, 0), max(stop, 0))}
            yield call[1], call.span(), arguments
    at = text.find("{")
    while at >= 0:
        end = _call_end(text, at)
        if end is not None:
            members = _members(text, at)
            name = json.loads(text[slice(*members["name"])])
            key = "arguments" if "arguments" in members else "parameters"
            value = members[key][0]
            yield name, (at, end), _members(text, value) if text[value] == "{" else {}
        at = text.find("{", at + 1 if end is None else end)


def _call_end(text: str, at: int) -> int | None:
    """Where the JSON object that begins at a place ends, if it is a call; otherwise None."""
    try:
        found, end = _JSON.raw_decode(text, at)
    except (ValueError, RecursionError):
        return None
    arguments = found.get("arguments", found.get("parameters"))
    return end if isinstance(found.get("name"), str) and isinstance(arguments, dict | str) else None


def _members(text: str, at: int) -> dict[str, Place]:
    """The places of the values of a JSON object, which is known to be valid; a later duplicate wins."""
    found, at = {}, _skip(text, at + 1)
    while text[at] != "}":
        name, at = _JSON.raw_decode(text, at)
        at = _skip(text, _skip(text, at) + 1)  # past the colon
        _, end = _JSON.raw_decode(text, at)
        found[name] = (at, end)
        at = _skip(text, end)
        at = _skip(text, at + 1) if text[at] == "," else at
    return found


def _skip(text: str, at: int) -> int:
    """The next place that is not white space."""
    while text[at] in " \t\n\r":
        at += 1
    return at
