r"""The outer structure of an answer: lists, sets, tuples, intervals, equations, units.

A list is not a tuple, a tuple is not an interval, and a name belongs to its value. A verifier that must
not accept a wrong answer keeps these apart. This module reads the outside of an answer; ``expression``
reads the expressions inside.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from delta_cli.rewards.math.brackets import closing, split, trim
from delta_cli.rewards.math.budget import spend
from delta_cli.rewards.math.errors import UnreadableError
from delta_cli.rewards.math.latex import FUNCTIONS
from delta_cli.rewards.math.units import split_unit


@dataclass(frozen=True)
class Words:
    """A name, a choice, yes or no: compared as words."""

    text: str


@dataclass(frozen=True)
class Scalar:
    """One expression or matrix, as LaTeX, with its unit."""

    text: str
    unit: str = ""


@dataclass(frozen=True)
class Collection:
    """Several answers.

    ``kind`` is the brackets of a tuple, interval or set; ``,``, ``and`` or ``or`` for a list without brackets;
    ``∪``, ``∩`` or ``∖`` for an operation on sets.
    """

    kind: str
    items: tuple[ParsedAnswer, ...]


@dataclass(frozen=True)
class Relation:
    """An equation or inequality, or a chain of them: one more side than signs."""

    sides: tuple[str, ...]
    signs: tuple[str, ...]


ParsedAnswer = Words | Scalar | Collection | Relation

LISTS = (",", "and", "or")
UNORDERED = (*LISTS, "{}", "∪")
LIST = re.compile(r"[,;]|\\lor(?![A-Za-z])|\\land(?![A-Za-z])")
SET_OPERATIONS = {
    "∪": re.compile(r"\\cup(?![A-Za-z])"),
    "∖": re.compile(r"\\setminus(?![A-Za-z])|-(?=\s*\\\{)"),
    "∩": re.compile(r"\\cap(?![A-Za-z])"),
}
SIGN = re.compile(r"=|<|>|\\not\s*\\in(?![A-Za-z])|\\(?:le|ge|ne|approx|equiv|in|notin)(?![A-Za-z])")
THOUSANDS = re.compile(r"(?<![\d,.A-Za-z])\d{1,3}(?:,\d{3})+(?!\d|,\d)")
PLUS_MINUS = re.compile(r"\\(?:pm|mp)(?![A-Za-z])")
MATRIX = re.compile(r"\s*\\begin\{(array|matrix|smallmatrix)\}(?:(?!\\begin|\\end).)*\\end\{\1\}\s*")
FUNCTION = re.compile(rf"(?:{'|'.join(FUNCTIONS)})\s")
CHOICE = re.compile(r"\(?\s*([A-Z])\s*\)?[.:]?")
MIXED = re.compile(r"(?<![\d.}^_])(\d+)(?:\s*\\frac\{(\d+)\}\{(\d+)\}|\s+(\d+)\s?/\s?(\d+))(?![\d}])")
BUILDER = re.compile(r"\s*([A-Za-z])\s*(?:\\in\s*\\mathbb\{R\}\s*)?(?:\||:)\s*(.+)", re.DOTALL)
_CONTENT = r"(?:\{[lcr|]*\})?((?:(?!\\begin|\\end).)*)\\end\{\1\}"
ROWS = re.compile(rf"\\begin\{{(cases|aligned|array|gathered)\}}{_CONTENT}", re.DOTALL)
CLOCK = re.compile(r"(\d{1,2})\s*:\s*(\d{2})\s*(?:\\text\{)?\s*([AaPp])\.?\s?[Mm]\.?\s*\}?")
RATIO = re.compile(r"\s*(?::|\\text\{\s*(?:to|:)\s*\}|(?<=\d)\s+to\s+(?=\d))\s*")

VECTOR = re.compile(rf"\(?\s*\\begin\{{([pb]?matrix|smallmatrix|array)\}}{_CONTENT}\s*\)?", re.DOTALL)

# Phrases that are compared as what they say.
PHRASES: dict[str, Words | Scalar] = {
    **dict.fromkeys(("all real numbers", "all reals", "all real x", "the set of all real numbers", "the real numbers",
                     "any real number", "every real number", "all real values", "real numbers"), Scalar(r"\mathbb{R}")),
    **dict.fromkeys(("no solution", "no solutions", "no real solution", "no real solutions", "there is no solution",
                     "there are no solutions", "there is no real solution", "there are no real solutions",
                     "empty set", "the empty set"), Scalar(r"\emptyset")),
    **dict.fromkeys(("dne", "does not exist", "doesn't exist", "the limit does not exist"), Words("does not exist")),
    **dict.fromkeys(("infinity", "positive infinity", "plus infinity"), Scalar(r"\infty")),
    **dict.fromkeys(("negative infinity", "minus infinity"), Scalar(r"-\infty")),
    "zero": Scalar("0"), "one": Scalar("1"), "two": Scalar("2"), "three": Scalar("3"), "four": Scalar("4"),
    "five": Scalar("5"), "six": Scalar("6"), "seven": Scalar("7"), "eight": Scalar("8"), "nine": Scalar("9"),
    "ten": Scalar("10"), "eleven": Scalar("11"), "twelve": Scalar("12"),
}  # fmt: skip
_INTEGER = r"\s*(?:(?:an?|any|all|some)\s+)?integers?\s*"
_CLAUSE = r"\\text\{\s*(?:for|with|where"
_CLAUSES: list[tuple[re.Pattern[str], str]] = [
    (re.compile(rf"{_CLAUSE}){_INTEGER}\}}\s*([a-z])\s*$"), r", \1\\in\\mathbb{Z}"),
    (re.compile(rf"{_CLAUSE})\s*\}}\s*([a-z])\s*\\text\{{\s*is{_INTEGER}\}}$"), r", \1\\in\\mathbb{Z}"),
    (re.compile(rf"{_CLAUSE}|for all|for any|for some|for every)\s*\}}(?=\s*[a-z]\s*\\in)"), ","),
    (re.compile(r"\s*\(\s*([a-z]\s*\\in\s*\\mathbb\{[A-Z]\})\s*\)\s*$"), r", \1"),
]


def read(text: str) -> ParsedAnswer:
    """The structure of a normalised answer. Raises UnreadableError."""
    text = trim(text)
    if not text:
        raise UnreadableError
    spend(20 + len(text))
    special = _words(text) or _clock_or_ratio(text)
    if special is not None:
        return special
    text = trim(_as_list(text))
    if not text:
        raise UnreadableError
    if not re.search(r"[(\[]|\\\{", text):
        text = THOUSANDS.sub(lambda match: match.group().replace(",", ""), text)
    parts, separators = split(text, LIST)
    if len(parts) > 1:
        kind = next((name for name in ("or", "and") if rf"\l{name}" in separators), ",")
        return Collection(kind, _items(parts))
    for kind, pattern in SET_OPERATIONS.items():
        parts, _ = split(text, pattern)
        if len(parts) > 1:
            return Collection(kind, tuple(map(read, parts)))
    sides, signs = split(text, SIGN)
    if signs:
        return _relation(sides, signs)
    return _bracketed(text) or _scalar(text)


def as_tuple(answer: ParsedAnswer) -> ParsedAnswer:
    """A column or row vector as the tuple of its entries; any other answer as it is."""
    vector = VECTOR.fullmatch(answer.text) if isinstance(answer, Scalar) and not answer.unit else None
    if vector is None:
        return answer
    rows = [row for row in re.split(r"\\\\", vector[2]) if row.strip()]
    entries = rows if all("&" not in row for row in rows) else rows[0].split("&") if len(rows) == 1 else []
    return Collection("()", tuple(map(read, entries))) if len(entries) > 1 else answer


def _as_list(text: str) -> str:
    """Rows of equations, and clauses such as ``for integer k``, as items of a list."""
    if text.startswith("\\{") and text.count("\\{") > text.count("\\}"):
        text = text[2:].strip()  # the brace before the rows of a system
    rows = ROWS.fullmatch(text)
    if rows and "&" not in rows[2].replace("&=", "="):
        text = rows[2].replace("&", "")
    if "\\begin" not in text and "\\\\" in text:
        text = ",".join(filter(str.strip, text.split("\\\\")))
    for pattern, replacement in _CLAUSES:
        text = pattern.sub(replacement, text)
    return text


def _words(text: str) -> ParsedAnswer | None:
    upright = re.sub(r"\\(?:text|mathbf)\{([^{}]*)\}", r" \1 ", text).strip()
    if FUNCTION.match(upright):
        return None
    choice = CHOICE.fullmatch(upright)
    if choice:
        return Words(choice[1])
    if not re.fullmatch(r"[^\W\d_]+(?:[ ,'.-]+[^\W\d_]+)*\.?", upright):
        return None
    phrase = PHRASES.get(" ".join(upright.rstrip(".").casefold().split()))
    if phrase is not None:
        return phrase
    if "," not in upright and ("\\text" in text or len(upright) >= 3):
        return Words(" ".join(upright.rstrip(".").split()))
    return None


def _clock_or_ratio(text: str) -> ParsedAnswer | None:
    """A time of day, or a ratio of whole numbers: compared as it is written."""
    clock = CLOCK.fullmatch(text)
    if clock:
        return Words(f"{int(clock[1])}:{clock[2]} {clock[3].upper()}M")
    parts = RATIO.split(text)
    if len(parts) > 1 and all(re.fullmatch(r"\d+(?:\.\d+)?", part) for part in parts):
        return Words(":".join(parts))
    return None


def _items(parts: list[str]) -> tuple[ParsedAnswer, ...]:
    """The items of a list; an item with a single ± gives two."""
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
    spelled = {r"\equiv": "="}
    return Relation(tuple(sides), tuple(r"\notin" if "not" in sign else spelled.get(sign, sign) for sign in signs))


def _bracketed(text: str) -> ParsedAnswer | None:
    """A tuple, interval or set if brackets enclose the whole text; parentheses around one thing are dropped."""
    opening = 2 if text.startswith("\\{") else 1 if text[0] in "([" else 0
    if not opening or closing(text, 0) != len(text) - 1:
        return None
    ending = 2 if text.endswith("\\}") else 1
    kind, inside = text[opening - 1] + text[-1], text[opening:-ending]
    if kind == "{}" and (builder := BUILDER.fullmatch(inside)):
        return read(builder[2])
    parts, _ = split(inside, LIST)
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
    if unit.startswith("base"):
        return Scalar(core, unit)
    if re.search(r"\d\s+[\d.]|\d[eE]\d", MIXED.sub("0", core)) or not core:
        raise UnreadableError  # 1 2 is neither 12 nor a product; 1e3 is no mathematics
    return Scalar(trim(MIXED.sub(_mixed, core)), unit)


def _mixed(match: re.Match[str]) -> str:
    whole, above, below = (int(group) for group in match.groups() if group)
    if above >= below:
        return rf"{whole}\cdot\frac{{{above}}}{{{below}}}"
    return rf"\frac{{{whole * below + above}}}{{{below}}}"
