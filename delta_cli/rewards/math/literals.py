"""Plainly written numbers, compared exactly: integers, decimals, fractions, percentages, scientific notation."""

from __future__ import annotations

import re
from fractions import Fraction

MAX_CHARACTERS = 2000  # of a number; Python refuses to parse an integer of more than 4,300 digits
MAX_QUESTION = 20_000  # characters of a question that are searched
MIN_DIGITS = 6  # that a rounded decimal must show to be accepted for a number whose decimals do not end

_ASKS_PERCENT = re.compile(
    r"(?:what|which|how many|the|as(?: a)?|in) (?:percent|per cent|\\?%)|percentage", re.IGNORECASE
)
_INTEGER = r"[+-]?\s?\d+"
_LITERAL = re.compile(
    r"(?:(?P<sign>[+-]?)\s?(?P<decimal>\d+(?:\.\d*)?|\.\d+)"
    rf"|(?P<outer>-?)\s?\\frac\{{(?P<over>{_INTEGER})\}}\{{(?P<under>{_INTEGER})\}}"
    rf"|(?P<above>{_INTEGER})\s?/\s?(?P<below>\d+)"
    r"|(?P<mantissa>-?[1-9](?:\.\d+)?)\s*\\(?:times|cdot)\s*10\^(?:(?P<power>\d)|\{(?P<exponent>-?\d{1,3})\}))"
    r"\s*(?P<percent>\\%)?",
    re.ASCII,
)


def same_number(gold: str, given: str, question: str) -> bool | None:
    """Whether two plain numbers are equal; None if one of them is not a plain number. Never raises.

    If ``question`` asks for a percentage, the percent sign may be left out or added.
    """
    same = same_literal(gold, given)
    if same is not False or gold.endswith("%") == given.endswith("%"):
        return same
    if _ASKS_PERCENT.search(question[:MAX_QUESTION]):
        return same_literal(gold.removesuffix(r"\%"), given.removesuffix(r"\%"))
    return False


def same_literal(gold: str, given: str) -> bool | None:
    """Whether two plain numbers are equal; None if one of them is not a plain number.

    Integers, decimals, fractions and percentages are compared exactly. A decimal also matches a number
    whose decimals do not end if it is that number correctly rounded and shows at least six decimals, six
    of them significant. A whole number written as a division is unfinished, so it only matches such a gold.
    """
    first, second = _match(gold), _match(given)
    if first is None or second is None:
        return None
    try:
        a, b = _value(first), _value(second)
    except ZeroDivisionError:
        return False
    if _is_division(second, b) and not _is_division(first, a):
        return False  # 168/2 is not yet 84
    return a == b or rounds_to(a, given, b) or rounds_to(b, gold, a)


def is_plain(text: str) -> bool:
    """Whether a text is a plainly written number."""
    return _match(text) is not None


def plain_value(text: str) -> Fraction | None:
    """The exact value of a plainly written number; None for any other text, and for a division by zero."""
    match = _match(text)
    try:
        return _value(match) if match else None
    except ZeroDivisionError:
        return None


def decimal_value(text: str) -> Fraction | None:
    """The exact value of a decimal with a decimal point; None for any other text."""
    match = _match(text)
    return _value(match) if match and "." in (match["decimal"] or "") and not match["percent"] else None


def rounds_to(exact: Fraction, text: str, rounded: Fraction) -> bool:
    """Whether ``exact``, whose decimals do not end, correctly rounds to the decimal ``text`` of value ``rounded``."""
    digits = re.fullmatch(r"[+-]?\s?\d*\.(\d+)", text)
    if digits is None or _terminates(exact):
        return False
    places, significant = len(digits[1]), len(re.sub(r"\D", "", text).lstrip("0"))
    return min(places, significant) >= MIN_DIGITS and abs(exact - rounded) * 10**places * 2 <= 1


def _match(text: str) -> re.Match[str] | None:
    return _LITERAL.fullmatch(text) if len(text) <= MAX_CHARACTERS else None


def _is_division(match: re.Match[str], value: Fraction) -> bool:
    return value.denominator == 1 and bool(match["over"] or match["above"]) and not match["percent"]


def _terminates(value: Fraction) -> bool:
    rest = value.denominator
    for prime in (2, 5):
        while rest % prime == 0:
            rest //= prime
    return rest == 1


def _value(match: re.Match[str]) -> Fraction:
    """The value of a literal. Raises ZeroDivisionError."""
    part = {name: re.sub(r"\s", "", text or "") for name, text in match.groupdict().items()}
    if part["decimal"]:
        value = Fraction(part["sign"] + part["decimal"].rstrip("."))
    elif part["mantissa"]:
        value = Fraction(part["mantissa"]) * Fraction(10) ** int(part["power"] or part["exponent"])
    elif part["over"]:
        value = Fraction(int(part["outer"] + "1") * int(part["over"]), int(part["under"]))
    else:
        value = Fraction(int(part["above"]), int(part["below"]))
    return value / 100 if part["percent"] else value
