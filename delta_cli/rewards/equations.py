r"""Finds numeric equations in a text, such as ``7+5=12`` or ``\frac{1}{2}+\frac{1}{3}=\frac{5}{6}``, and checks them.

Equations with an unknown, or in a form that is not plain arithmetic, are skipped rather than guessed
at. The text comes from a model, so it must not be able to make the check slow: length, nesting and
the size of every power are bounded before sympy computes anything.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

MAX_DIGITS = 40  # of a number
MAX_BITS = 20_000  # of a power
MAX_ROOT_BITS = 128  # of what a root is taken of
MAX_DEPTH = 8  # of nested brackets, fractions and powers
MAX_TERMS = 40  # numbers in one equation; together with MAX_DEPTH this bounds the work per character

_SPACE = r"(?:[ \t]|\\[,;:! ]){0,8}"
_TOKEN = re.compile(
    _SPACE + r"(?:(?P<number>\d{1,3}(?:(?:,|\{,\})\d{3})+(?!\d)(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)"
    r"|(?P<word>\\(?:cdot|times|div|[dt]?frac|sqrt|pi|left|right)(?![A-Za-z]))"
    r"|(?P<sign>\*\*|(?<!-)-(?!-)|[+*/^=(){}−×·÷]))"
)
_SPELLED = {"−": "-", "×": "*", "·": "*", r"\cdot": "*", r"\times": "*", "÷": "/", r"\div": "/", "**": "^"}
_SPELLED |= {r"\dfrac": r"\frac", r"\tfrac": r"\frac"}
_OPENING = (r"\frac", r"\dfrac", r"\tfrac", r"\sqrt")
_FACTOR = re.compile(r"\(|\\left\(|\\(?:sqrt|pi)(?![A-Za-z])")

# If one of these comes directly before the number, the number belongs to something larger: a letter, an
# operator, an index, a closing bracket, or a word such as "mod".
_PART_OF_MORE = re.compile(
    r"(?:[A-Za-z\d_.,\\)\]}!|^]|[-+*/^_×·÷−<>≤≥≡≈≠]\s*|\\(?!quad|qquad|implies|Rightarrow|therefore)[A-Za-z]+\s*"
    r"|\d\s+|\b(?:mod|choose|base|of)\s+)$"
)
# A dash at the start of a line or after an equation may be a bullet, filler or a sign: we try both readings.
_LEAD = re.compile(r"(?:^|[\n,;:.$(=])[ \t]*(?P<dash>[-−]+|[*+])[ \t]{0,4}$")
_AMBIGUOUS = re.compile(r"[ \t][-−](?![ \t])")
# If one of these follows, the expression continues, so what was parsed is not the whole equation.
_GOES_ON = re.compile(
    r"[ \t]{0,8}(?:(?<!-)-(?!-)|[+*/^_!%×·÷−]|\\(?:cdot|times|div|frac|sqrt|pi|pm|pmod|bmod|%)"
    r"|(?:remainder|mod|rem)\b|[A-Za-z](?![A-Za-z])"
    r"|\(\s*(?:\\?mod|\\bmod))|[\w({\\]"
)
_END = re.compile(r"[ \t]{0,8}\\(?:\)|\]|text|quad|qquad|implies|Rightarrow|therefore|\\)")


class _NotArithmeticError(Exception):
    """The text here is not an expression of plain numbers."""


@dataclass(frozen=True)
class Equation:
    """A chain of equalities between numbers, and whether all of them hold."""

    start: int  # character offsets in the text: [start, stop)
    stop: int
    text: str
    holds: bool


@lru_cache(maxsize=1024)
def find_equations(text: str) -> tuple[Equation, ...]:
    """All numeric equations in ``text``, in order, each one checked."""
    return tuple(_scan(text)) if "=" in text else ()


def _scan(text: str) -> Iterator[Equation]:
    position = done = 0  # where to continue searching; where the last equation ended
    while (token := _TOKEN.search(text, position)) is not None:
        position = token.end()
        if not (token["number"] or token["word"] in _OPENING or token["sign"] == "("):
            continue
        found = _found_at(text, token.start(token.lastgroup or 0), done)
        if found is not None:
            yield found
            position = done = found.stop


def _found_at(text: str, start: int, done: int) -> Equation | None:
    """The equation whose first number is at ``start``, or None if that number belongs to something larger."""
    before = text[max(start - 24, done) : start]
    lead = _LEAD.search(before)
    if lead is None:
        return None if _PART_OF_MORE.search(before) else _chain(text, start)
    plain = _chain(text, start)
    if plain is not None and not plain.holds and lead["dash"] in ("-", "−"):
        negative = _chain(text, start - len(before) + lead.start("dash"))
        return negative if negative is not None and negative.holds else plain
    return plain


def _chain(text: str, start: int) -> Equation | None:
    """The equation that starts at ``start``, or None if there is none."""
    parser = _ArithmeticParser(text, start)
    try:
        sides = [parser.side()]
        while parser.take("="):
            sides.append(parser.side())
    except (_NotArithmeticError, ZeroDivisionError):
        return None
    stop = parser.position
    unfinished = _GOES_ON.match(text, stop) and not _END.match(text, stop)
    if len(sides) < 2 or unfinished or all(side.plain for side in sides):
        return None  # "18 = 6" is part of a sentence, not arithmetic gone wrong
    holds = all(_equal(sides[0], side) for side in sides[1:])
    if not holds and _AMBIGUOUS.search(text, start, stop):
        return None  # "7+8=15 -4+3=-1" could be one equation or two
    return Equation(start, stop, text[start:stop], holds)


@dataclass(frozen=True)
class _Side:
    """The value of one side. ``decimals`` counts the decimals of a lone decimal number, which may be rounded."""

    value: Any  # a sympy number or expression without symbols
    plain: bool  # whether the side is a single number
    decimals: int = 0


def _equal(first: _Side, second: _Side) -> bool:
    """Equal exactly, to 20 digits if roots are involved, or to the decimals that a rounded side shows."""
    import sympy

    difference = first.value - second.value
    if not difference.is_Rational:
        difference = sympy.N(difference, 30, maxn=200)
        if abs(difference) < sympy.Float("1e-20") * (1 + abs(sympy.N(first.value, 30))):
            return True
    if difference == 0:
        return True
    decimals = max(first.decimals, second.decimals)
    return bool(decimals and abs(difference) < sympy.Rational(1, 10**decimals))


class _ArithmeticParser:
    """Recursive descent over plain and LaTeX arithmetic that evaluates as it parses."""

    def __init__(self, text: str, position: int) -> None:
        self.text = text
        self.position = position
        self._terms = 0

    def side(self) -> _Side:
        """Parse one side of an equation."""
        start = self.position
        value = self._sum(0)
        alone = _TOKEN.fullmatch(self.text, start, self.position)
        literal = alone["number"] if alone else None
        decimals = len(literal.partition(".")[2]) if literal else 0
        return _Side(value, literal is not None, decimals)

    def take(self, *wanted: str) -> str | None:
        """Consume and return the next token if it is one of ``wanted``, else return None."""
        token = _TOKEN.match(self.text, self.position)
        if token is None or token["number"]:
            return None
        found = token["word"] or token["sign"]
        found = _SPELLED.get(found, found)
        if found not in wanted:
            return None
        self.position = token.end()
        return found

    def _sum(self, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise _NotArithmeticError
        negative = self.take("-") is not None
        value = self._product(depth)
        value = -value if negative else value
        while sign := self.take("+", "-"):
            term = self._product(depth)
            value = value + term if sign == "+" else value - term
        return value

    def _product(self, depth: int) -> Any:
        value = self._power(depth)
        while True:
            if sign := self.take("*", "/"):
                value = self._times(value, self._power(depth, signed=True), sign)
            elif self._opens_factor():
                value = self._times(value, self._power(depth), "*")
            else:
                return value

    def _opens_factor(self) -> bool:
        """Whether an implicit factor follows, as in 2(3) or 2\\pi. A mixed number is not one."""
        return _FACTOR.match(self.text, self.position) is not None

    def _times(self, first: Any, second: Any, sign: str) -> Any:
        if sign == "*":
            return first * second
        if second == 0:
            raise ZeroDivisionError
        return first / second

    def _power(self, depth: int, signed: bool = False) -> Any:
        if depth > MAX_DEPTH:
            raise _NotArithmeticError
        if signed and self.take("-"):
            return -self._power(depth + 1)
        base = self._atom(depth)
        if not self.take("^"):
            return base
        if self.take("{"):
            exponent = self._sum(depth + 1)
            self._need("}")
        else:
            exponent = self._power(depth + 1, signed=True)
        return self._raise(base, exponent)

    def _raise(self, base: Any, exponent: Any) -> Any:
        """``base**exponent``, only if the result is known to stay small."""
        if not (base.is_Rational and exponent.is_Rational):
            raise _NotArithmeticError
        bits = max(int(base.p).bit_length(), int(base.q).bit_length())
        if abs(exponent) * bits > MAX_BITS or (not exponent.is_Integer and bits > MAX_ROOT_BITS):
            raise _NotArithmeticError
        if exponent.q > 12 or (base < 0 and exponent.q > 1):
            raise _NotArithmeticError
        if base == 0 and exponent < 0:
            raise ZeroDivisionError
        return base**exponent

    def _atom(self, depth: int) -> Any:
        import sympy

        token = _TOKEN.match(self.text, self.position)
        if token is not None and token["number"]:
            self._terms += 1
            digits = token["number"].replace("{,}", "").replace(",", "")
            if len(digits) > MAX_DIGITS or self._terms > MAX_TERMS:
                raise _NotArithmeticError
            self.position = token.end()
            return sympy.Rational(digits)
        if self.take(r"\frac"):
            return self._times(self._braces(depth), self._braces(depth), "/")
        if self.take(r"\sqrt"):
            return self._raise(self._braces(depth), sympy.Rational(1, 2))
        if self.take(r"\pi"):
            return sympy.pi
        wrapped = self.take(r"\left") is not None
        self._need("(")
        value = self._sum(depth + 1)
        if wrapped:
            self._need(r"\right")
        self._need(")")
        return value

    def _braces(self, depth: int) -> Any:
        self._need("{")
        value = self._sum(depth + 1)
        self._need("}")
        return value

    def _need(self, wanted: str) -> None:
        if not self.take(wanted):
            raise _NotArithmeticError
