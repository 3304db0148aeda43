r"""The outer structure of an answer: lists, sets, tuples, intervals, equations, units.

A list is no tuple, a tuple no interval, and a name belongs to its value; a verifier that must not
accept a wrong answer keeps these apart. The outside of an answer is read here, the expressions
inside by ``expression``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from delta_cli.rewards.math.expression import DERIVATIVE, UnreadableError
from delta_cli.rewards.math.latex import closing, split, trim
from delta_cli.rewards.math.units import split_unit


@dataclass(frozen=True)
class Words:
    """A name, a choice, yes or no: compared letter by letter."""

    text: str


@dataclass(frozen=True)
class Scalar:
    """One expression, or a matrix, as LaTeX."""

    text: str
    unit: str = ""


@dataclass(frozen=True)
class Collection:
    """Several answers. ``kind`` is the brackets, ``,`` for a bare list, ``∪`` for a union."""

    kind: str
    items: tuple[ParsedAnswer, ...]


@dataclass(frozen=True)
class Relation:
    """An equation or inequality, or a chain of them: one more side than signs."""

    sides: tuple[str, ...]
    signs: tuple[str, ...]


ParsedAnswer = Words | Scalar | Collection | Relation

UNORDERED = (",", "{}", "∪")
LIST = re.compile("[,;]")
UNION = re.compile(r"\\cup(?![A-Za-z])")
SIGN = re.compile(r"=|<|>|\\(?:le|ge|ne|approx|equiv|in)(?![A-Za-z])")
THOUSANDS = re.compile(r"(?<![\d,.A-Za-z])\d{1,3}(?:,\d{3})+(?!\d|,\d)")
PLUS_MINUS = re.compile(r"\\(?:pm|mp)(?![A-Za-z])")
LENGTHS = re.compile(r"\|[A-Z]{2}\||\\frac\{\s*[A-Z]{2}\s*\}\{\s*[A-Z]{2}\s*\}|[A-Z]{2}\s*/\s*[A-Z]{2}")
MATRIX = re.compile(r"\s*\\begin\{array\}(?:(?!\\begin|\\end).)*\\end\{array\}\s*")
CHOICE = re.compile(r"\(?\s*([A-Z])\s*\)?[.:]?")
MIXED = re.compile(r"(?<![\d.}^_])(\d+)(?:\s*\\frac\{(\d+)\}\{(\d+)\}|\s+(\d+)/(\d+))(?![\d}])")


def read(text: str) -> ParsedAnswer:
    """The structure of a normalised answer. Raises UnreadableError."""
    text = trim(text)
    if not text:
        raise UnreadableError
    words = _words(text)
    if words is not None:
        return words
    if not re.search(r"[(\[]|\\\{", text):
        text = THOUSANDS.sub(lambda match: match.group().replace(",", "{,}"), text)
    parts, _ = split(text, LIST)
    if len(parts) > 1:
        return Collection(",", _items(parts))
    parts, _ = split(text, UNION)
    if len(parts) > 1:
        return Collection("∪", tuple(read(part) for part in parts))
    sides, signs = split(text, SIGN)
    if signs:
        return _relation(sides, signs)
    return _bracketed(text) or _scalar(text)


def is_name(text: str) -> bool:
    """Whether a side of an equation only names the answer: x, f(x), AB, \\text{area}, (x, y), AB/CD."""
    if text == "e" or LENGTHS.fullmatch(text):
        return text != "e"
    bare = re.sub(rf"{DERIVATIVE}|d[a-z]/d[a-z]", "x", text)
    bare = re.sub(r"_(?:\{[^{}]*\}|\w)|\\text\{[^{}]*\}|'", "x", bare)
    return bool(bare) and not re.search(
        r"[\d+*/^|-]|\\(?:frac|sqrt|cdot|times|pi|infty|sum|int|log|ln|sin|cos|tan)", bare
    )


def _words(text: str) -> Words | None:
    upright = re.sub(r"\\text\{([^{}]*)\}", r"\1", text).strip()
    choice = CHOICE.fullmatch(upright)
    if choice:
        return Words(choice.group(1))
    letters = re.fullmatch(r"[^\W\d_]+(?:[ '.-]+[^\W\d_]+)*\.?", upright)
    if letters and (upright != text or len(upright) >= 3):
        return Words(" ".join(upright.rstrip(".").casefold().split()))
    return None


def _items(parts: list[str]) -> tuple[ParsedAnswer, ...]:
    """The members of a list; one with a single ± stands for two."""
    items: list[ParsedAnswer] = []
    for part in parts:
        item = read(part)
        items += item.items if isinstance(item, Collection) and item.kind == "," else (item,)
    return tuple(items)


def _relation(sides: list[str], signs: list[str]) -> ParsedAnswer:
    sides = [trim(side) for side in sides]
    if not sides[0] and signs[0] in ("=", r"\approx"):
        sides, signs = sides[1:], signs[1:]
    if not all(sides):
        raise UnreadableError
    if not signs:
        return read(sides[-1])
    return Relation(tuple(sides), tuple("=" if sign == r"\equiv" else sign for sign in signs))


def _bracketed(text: str) -> ParsedAnswer | None:
    """A tuple, interval or set, when brackets enclose the whole text; parentheses around one thing are dropped."""
    opening = 2 if text.startswith("\\{") else 1 if text[0] in "([" else 0
    if not opening or closing(text, 0) != len(text) - 1:
        return None
    ending = 2 if text.endswith("\\}") else 1
    kind = text[opening - 1] + text[-1]
    parts, _ = split(text[opening:-ending], LIST)
    if len(parts) == 1 and (kind == "()" or (kind == "[]" and MATRIX.fullmatch(parts[0]))):
        return read(parts[0])
    if kind not in ("()", "[]", "(]", "[)", "{}"):
        raise UnreadableError
    return Collection(kind, _items(parts) if kind == "{}" else tuple(read(part) for part in parts))


def _scalar(text: str) -> ParsedAnswer:
    if len(PLUS_MINUS.findall(text)) == 1:
        both = [PLUS_MINUS.sub(sign, text) for sign in (" + ", " - ")]
        return Collection(",", tuple(read(re.sub(r"^\s*\+", "", part)) for part in both))
    core, unit = split_unit(text)
    core = re.sub(r"\{,\}", "", core)
    if re.search(r"\d\s+[\d.]|\d[eE]\d", MIXED.sub("0", core)) or not core:
        raise UnreadableError  # 1 2 is neither 12 nor a product; 1e3 is no mathematics
    return Scalar(trim(MIXED.sub(_mixed, core)), unit)


def _mixed(match: re.Match[str]) -> str:
    whole, *parts = (int(group) for group in match.groups() if group)
    numerator, denominator = parts
    if numerator >= denominator:
        return rf"{whole}\cdot\frac{{{numerator}}}{{{denominator}}}"
    return rf"\frac{{{whole * denominator + numerator}}}{{{denominator}}}"
