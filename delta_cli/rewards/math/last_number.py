r"""Is the last number of a response the gold answer? For models too small, or tasks too plain, for a box.

The answer is the number after the last ``####``, or without one the last number of the response. As
everywhere, doubts are resolved against the response: a number that is part of an expression, of a
word, of a time of day or of a list without spaces is no answer, and no earlier one takes its place.
"""

from __future__ import annotations

import re

from delta_cli.rewards.math.verdict import same_number

MARK = "####"
NUMBER = re.compile(r"(?:\d{1,3}(?:,\d{3})+(?![\d,])|\d+)(?:\.\d+)?|\.\d+")
FRACTION = re.compile(r"(?:\d{1,3}(?:,\d{3})+(?![\d,])|\d+)\s?/\s?\d+(?![\d,.]*\d)")
BEFORE = 8  # characters before a number that say what it is part of
DRESS = r"[\s$€£({\[*_]*"

_SIGN = re.compile(r"(?:^|[^\w)\]}%\s]\s*|[^\W\d]\s+|^\s+)[-−][$€£]?$|[^\w)\]}%\s]\s*[$€£][-−]$|\s[$€£][-−]$")
_PART_OF_MORE = re.compile(
    r"(?:\w|\d[.,:]|\\|[\w)\]}%]\s*[-−]\s*[$€£(]?|[\d)\]}%]\s*[+*×·÷/^]\s*[$€£(]?|\w[+*/^]|\d\s+x\s+)$"
)
_GOES_ON = re.compile(r"[A-Za-z_^]|[,.:]\d|\s?[+×·÷/^=]|\s\*|\*\w|\s?[-−]\s?\d")


def number_reward(response: str, gold: str, question: str = "") -> float:
    """1.0 where the response's number equals the number that ``gold`` ends with, else 0.0.

    Where the ``question`` asks for a percentage, its sign may be left out or added.
    """
    truth, given = last_number(gold), last_number(response)
    return float(truth is not None and given is not None and bool(same_number(truth, given, question)))


def last_number(text: str) -> str | None:
    r"""The number a text gives as its answer, ``1234``, ``-0.5``, ``3/4``, ``50\%``; None without one, or in doubt."""
    marked = text.rfind(MARK)
    if marked >= 0:
        found = re.compile(rf"{DRESS}[-−]?{DRESS}(?=[\d.])").match(text, marked + len(MARK))
        return _number_at(text, NUMBER.match(text, found.end())) if found else None
    last = None
    for match in NUMBER.finditer(text):
        last = match
    fraction = re.search(r"(?:\d[\d,]*)\s?/\s?$", text[: last.start()][-24:]) if last else None
    if last and fraction:
        last = NUMBER.match(text, last.start() - len(fraction.group()))
    return _number_at(text, last)


def _number_at(text: str, match: re.Match[str] | None) -> str | None:
    """The number there in one spelling, with its sign, denominator and percent sign."""
    if match is None:
        return None
    match = FRACTION.match(text, match.start()) or match
    before = text[max(0, match.start() - BEFORE) : match.start()]
    sign = _SIGN.search(before)
    if (not sign and _PART_OF_MORE.search(before)) or _GOES_ON.match(text, match.end()):
        return None
    percent = re.compile(r"\s?\\?%").match(text, match.end())
    digits = re.sub(r"[,\s]", "", match.group())
    return ("-" if sign else "") + digits + (r"\%" if percent else "")
