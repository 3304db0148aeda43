r"""Verifier for numbers without a box: is the last number of a response the gold answer?

It suits models too small, or tasks too plain, for ``\boxed{}``. The answer is the number after the last
``####``, or without that mark the last number of the response. It counts only if it stands alone or ends
an equation. A number that belongs to an expression, a word, a time, a range or a tuple is no answer, and
no earlier number takes its place. Only a window of fixed size around the number is read, so a verdict
takes linear time.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from delta_cli.rewards.math.boxed import without_thinking
from delta_cli.rewards.math.literals import same_number

MARK = "####"
MAX_CHARACTERS = 400  # of a number; a longer one is no answer
BEFORE = 2 * MAX_CHARACTERS  # characters of the window to the left of the last digit
AFTER = 120  # and to its right

_WHOLE = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9,])|[0-9]+)"
_TOKEN = re.compile(
    r"(?P<number>\\[dt]?frac\s*\{\s*(?P<above>-?[0-9]+)\s*\}\s*\{\s*(?P<below>[0-9]+)\s*\}"
    r"|(?P<whole>[0-9]+)[ \t]+(?P<over>[0-9]+)\s?/\s?(?P<under>[0-9]+)"
    rf"|(?P<top>{_WHOLE})\s?/\s?(?P<bottom>[0-9]+)|(?P<decimal>{_WHOLE}(?:\.[0-9]+)?|\.[0-9]+))"
    r"|(?P<space>\\[,;:!> ]|\\q?quad(?![A-Za-z])|\s+)"
    r"|(?P<open>\\(?:boxed|fbox|text|textbf|textrm|mathbf|mathrm)\s*\{|\\[(\[]|[({\[])"
    r"|(?P<close>\\[)\]]|[)}\]])"
    r"|(?P<dress>[\"'“”‘’`]|\\?\$|[€£¥₹]|[*_]+|</?[A-Za-z_|]+>)"
    r"|(?P<equals>[=-]>|:=|(?<![<>!=~/])={1,2}(?!=)|[≈→⇒∴]|\\(?:approx|implies|[Rr]ightarrow|therefore)(?![A-Za-z]))"
    r"|(?P<minus>[-−﹣－‐‑–])|(?P<stop>[.,;:!?…—])"
    r"|(?P<word>[^\W\d_]+(?:['’-][^\W\d_]+)*)"
    r"|(?P<other>\\[A-Za-z]+|.)",
    re.DOTALL,
)

# Words directly before a number that make it part of something larger, or no answer.
_NOT_AFTER = frozenset(
    """
    not never isn't wasn't aren't cannot minus plus times over under above below beyond than except without positive
    point per mod modulo base power exponent index root sqrt cbrt log ln lg exp sin cos tan cot sec csc max min gcd lcm
    maximum minimum half third quarter twice thrice double triple quadruple squared cubed factorial choose divided
    multiplied one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen
    seventeen eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety hundred thousand million billion
    trillion dozen step equation line problem question page figure part case section chapter
    """.split()  # noqa: SIM905 (a list of strings reads worse)
)
_PHRASES = re.compile(
    r"(?:(?:divided|multiplied|times)\s+by|(?:out|root|half|third|quarter|tenth|percent|power|factorial|square|cube|log|"
    r"logarithm|sum|product|multiples?|reciprocal|inverse|negative|opposite|quotient|difference|max|min|maximum|minimum)"
    r"\s+of|[0-9]\s*(?:to|by|of|through|until)|between\s.*and"
    r"|\b(?!(?:equals?|comes?|amounts?|sums?|adds?|up|down|rounds?|rounded|simplifies|reduces|evaluates|increases|"
    r"decreases|leads)\s)\w+\s+to)$",
    re.IGNORECASE | re.DOTALL,
)
# Text after a number that changes it or takes it back. The last line: one letter that is no unit is a factor.
_CHANGED = re.compile(
    r"(?i:(?:hundred|thousand|million|billion|trillion|quadrillion|dozen|score|gross|lakh|crore|myriad|hal(?:f|ve)|third|"
    r"quarter|fourth|fifth|sixth|seventh|eighth|ninth|tenth|twentieth|hundredth|thousandth|millionth|point|pair)s?\b|(?:st|nd|rd|th|bn|mn|tn)\b"
    r"|(?:squared|cubed|factorial|plus|minus|times|over|divided|multiplied|choose|mod|modulo|pi|root|sqrt|raised|less"
    r"|to\s+the)\b|and\s+(?:a|an|one|two|three)\b"
    r"|(?:is|was|are|were|would\s+be|seems|looks)\s+(?:not|wrong|incorrect|false|too|an?\s+error)\b"
    r"|(?:isn|wasn|aren|doesn|didn|can)['’]t\b|(?:does|do|did)\s+not\b|cannot\b)"
    r"|[b-zB-HJ-Zα-ωΑ-Ω](?<![mgshlLtNJWVAKCF])(?![\w'’])"
)
_PERCENT = re.compile(r"\s?\\?%|\s(?:percent|per\s+cent)\b")
_CLOSERS = re.compile(
    r"(?:\s?(?:°|\^\s*\{?\s*\\circ(?![A-Za-z])\s*\}?|\\degree(?![A-Za-z])))?"
    r"(?:[\"'”’`*_]|\s?(?:[)\]}]|\\[)\]]|\\?\$)|</?[A-Za-z_|]+>|<[/|])*"
)
_SPACES = re.compile(r"(?:[^\S\n]|\\[,;: ]|\\q?quad(?![A-Za-z])|~)*")
# After a number and its brackets: the end, a new line, punctuation or a dash; or words, which are then looked at.
_ENDS = re.compile(r"$|\n|\\\\|\\end\{|[.,;:?…]+(?![\w.,])|—|[-–]+\s+(?=[A-Za-z]{2})")
_WORDS_FOLLOW = re.compile(r"\\(?:text|mathrm|textbf|textrm)\s*\{\s*(?=[A-Za-z])|(?=[^\W\d_]|[(\[\"'“‘])")


class _Token(NamedTuple):
    kind: str
    text: str


def number_reward(response: str, gold: str, question: str = "") -> float:
    """1.0 if the response's number equals the number at the end of ``gold``, else 0.0. Never raises.

    If ``question`` asks for a percentage, the percent sign may be left out or added.
    """
    truth, given = last_number(gold), last_number(response)
    return float(truth is not None and given is not None and bool(same_number(truth, given, question)))


def last_number(text: str) -> str | None:
    r"""The number that a text gives as its answer, as in ``1234``, ``-0.5``, ``3/4``, ``50\%``; None if in doubt."""
    text = without_thinking(text)
    marked = text.rfind(MARK)
    if marked >= 0:
        start = marked + len(MARK)
        stop = start + MAX_CHARACTERS
        match = next((each for each in _TOKEN.finditer(text, start, stop) if each["number"]), None)
    else:
        last = max(text.rfind(digit) for digit in "0123456789")
        if last < 0 or _has_other_digits(text[last + 1 :]):
            return None
        start, stop = max(0, last - BEFORE), last + AFTER
        match = None
        for each in _TOKEN.finditer(text, start, stop):
            match = each if each["number"] else match
    if match is None or len(match.group()) > MAX_CHARACTERS:
        return None
    before = [_Token(each.lastgroup or "", each.group()) for each in _TOKEN.finditer(text, start, match.start())]
    sign = _sign(before, whole=marked >= 0)
    rest = text[match.end() : match.end() + AFTER]
    percent = _PERCENT.match(rest)
    if sign is None or not _stands_alone(rest[percent.end() if percent else 0 :]):
        return None
    return _spelled(match, sign) + (r"\%" if percent else "")


def _has_other_digits(text: str) -> bool:
    """Whether a text has digits of other scripts, superscripts, or fractions such as ½."""
    return not text.isascii() and any(each.isdigit() or each in "¼½¾" or "⅐" <= each <= "⅞" for each in text)


def _spelled(match: re.Match[str], sign: str) -> str:
    part = {name: (value or "").replace(",", "") for name, value in match.groupdict().items()}
    if part["whole"]:
        return f"{sign}{int(part['whole']) * int(part['under']) + int(part['over'])}/{part['under']}"
    if part["above"]:
        negative = (sign == "-") != part["above"].startswith("-")
        return f"{'-' if negative else ''}{part['above'].lstrip('-')}/{part['below']}"
    return sign + (f"{part['top']}/{part['bottom']}" if part["top"] else part["decimal"])


def _sign(before: list[_Token], whole: bool) -> str | None:
    """The sign of a number after the tokens ``before``; None if it belongs to something larger.

    With ``whole``, nothing but dressing may stand before it.
    """
    left = [*before]
    sign, spaced = "", False
    while left:
        kind, text = left[-1]
        if kind in ("space", "open", "dress") and not (kind == "dress" and _is_operator(left, spaced)):
            if kind == "open" and not _opens_group(left):
                return None
            if "\n" in text and sign and spaced:
                return None  # "- 5" on a line of its own may be item of a list or a negative number
            spaced = kind == "space"
            left.pop()
        elif (kind == "minus" or text in ("+", "negative")) and not sign:
            sign, glued = text, not spaced
            left.pop()
            spaced = False
            if kind != "word" and not _is_sign(left, glued):
                return None
        else:
            break
    if left and (whole or not _may_precede(left, spaced)):
        return None
    return None if _is_inside(left) else "-" if sign not in ("", "+") else ""


def _is_operator(left: list[_Token], spaced: bool) -> bool:
    """Whether ``*`` or ``_`` at the end of ``left`` multiplies or indexes; glued on one side only, it is emphasis."""
    if left[-1].text[0] not in "*_":
        return False
    return spaced or (len(left) > 1 and left[-2].kind in ("number", "word", "close", "other"))


def _opens_group(left: list[_Token]) -> bool:
    """Whether the bracket at the end of ``left`` only groups: no function, fraction, power or index before it."""
    bracket = left[-1].text
    if len(left) == 1 or len(bracket) > 1:
        return True
    return left[-2].kind in ("space", "open", "dress", "equals", "stop", "minus")


def _is_sign(left: list[_Token], glued: bool) -> bool:
    """Whether a minus or plus after ``left`` is a sign; ``glued`` to the number, or with a space between."""
    if not left:
        return glued
    kind = left[-1].kind
    if kind in ("equals", "open", "dress") or (kind == "stop" and left[-1].text == ":"):
        return True
    if kind != "space":
        return False
    if "\n" in left[-1].text or len(left) == 1:
        return glued
    kind, text = left[-2]
    if kind == "equals" or (kind == "stop" and text == ":"):
        return True
    return glued and (kind in ("stop", "dress") or (kind == "word" and (len(text) > 1 or text in "aI")))


def _may_precede(left: list[_Token], spaced: bool) -> bool:
    """Whether a number may follow ``left`` and still stand alone."""
    kind, text = left[-1]
    if kind == "equals":
        return True
    if kind == "stop":
        before = [token.kind for token in left[-3:-1]]
        if text == "—" or before[-1:] == ["space"]:
            return spaced and "number" not in before
        digit = before[-1:] == ["number"]
        return (spaced or not digit) if text == ":" else spaced and not (digit and text == ",")
    if not spaced:
        return False
    if kind == "close":
        return _labels(left)
    if kind != "word" or not text.replace("'", "").replace("’", "").replace("-", "").isalpha():
        return False
    if text.lower() in _NOT_AFTER:
        return False
    if len(text) == 1 and text not in "aAI":
        return False
    return _PHRASES.search("".join(token.text for token in left[-8:]).rstrip()[-60:]) is None


def _labels(left: list[_Token]) -> bool:
    """Whether the bracket that closes at the end of ``left`` is a label or a remark, and no factor."""
    start = _opening(left[:-1])
    if start is None or (start > 0 and len(left[start].text) == 1 and left[start - 1].kind != "space"):
        return False
    inside = [token for token in left[start + 1 : -1] if token.kind != "space"]
    return len(inside) == 1 or any(token.kind == "word" and len(token.text) > 1 for token in inside)


def _opening(left: list[_Token]) -> int | None:
    """Where the innermost bracket opens that is still open after ``left``; None if there is none in its last line."""
    depth = 0
    for index in range(len(left) - 1, -1, -1):
        kind, text = left[index]
        if kind == "space" and "\n" in text:
            return None
        depth += (kind == "close") - (kind == "open")
        if depth < 0:
            return index
    return None


def _is_inside(left: list[_Token]) -> bool:
    """Whether an open bracket makes a number after ``left`` an argument, or one item of several."""
    start = _opening(left)
    if start is None:
        return False
    if not _opens_group(left[: start + 1]):
        return True
    inside = left[start + 1 :]
    equals = max((index for index, token in enumerate(inside) if token.kind == "equals"), default=-1)
    return any(token.kind == "number" or token.text in (",", ";") for token in inside[equals + 1 :])


def _stands_alone(rest: str) -> bool:
    """Whether nothing in the text after a number goes on with an expression or changes it."""
    closers = _CLOSERS.match(rest)
    glued = closers.end() if closers else 0
    spaces = _SPACES.match(rest, glued)
    start = spaces.end() if spaces else glued
    if _ENDS.match(rest, start):
        return True
    words = _WORDS_FOLLOW.match(rest, start)
    if words is None or (start == glued == words.end() and rest[start : start + 1] != "\\"):
        return False
    return _CHANGED.match(rest, words.end()) is None
