"""Do two expressions have the same values? Asked of numbers exactly, of expressions with letters at chosen points.

Rational arithmetic is exact; everything else is computed to DIGITS digits by mpmath. All sizes are bounded, so
that no expression of a bounded length takes long: what would grow beyond the bounds has no value here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Any  # a value: a Fraction, mpmath's mpf or mpc, or its matrix; mpmath has no types

import mpmath

from delta_cli.rewards.math.expression import Expression

DIGITS = 100
MAX_BITS = 20_000  # of a rational number

MAX_FACTORIAL = 1000
# What letters stand for, in turn: both signs, near zero and far from it.
POINTS = tuple(
    Fraction(*pair)
    for pair in (
        *((3, 7), (17, 13), (-5, 11), (29, 9), (113, 10), (5, 23), (-19, 8), (41, 3)),
        *((11, 12), (67, 31), (-2, 19), (8, 5), (131, 4), (1, 29), (-37, 6), (43, 17)),
    )
)
STRIDE = 5  # coprime to the number of points: up to sixteen letters have different values
ENOUGH = 3  # points at which two expressions must have been compared

context = mpmath.MPContext()
context.dps = DIGITS
TOLERANCE = context.mpf(10) ** -60  # relative
LARGEST = context.mpf(10) ** 40  # of a number that is not rational
SMALLEST = context.mpf(10) ** -80
Value = Any


class NoValueError(ValueError):
    """The expression has no value there: a pole, a root of a negative number, or a size out of bounds."""


def names(tree: Expression) -> frozenset[str]:
    """The letters of an expression."""
    return frozenset(node.text for node in tree.walk() if node.op == "name")


def same_values(gold: Expression, given: Expression) -> bool:
    """Whether two expressions agree wherever both have values; ``given`` may bring no letter of its own."""
    letters = names(gold)
    if not names(given) <= letters:
        return False
    if not letters:
        return _same_numbers(gold, given)
    compared = 0
    for first, second in _pairs((gold, given), letters):
        if not close(first, second):
            return False
        compared += 1
    return compared >= ENOUGH


def _same_numbers(gold: Expression, given: Expression) -> bool:
    try:
        return close(number(gold), number(given))
    except NoValueError:
        return False


def same_ratio(gold: tuple[Expression, Expression], given: tuple[Expression, Expression], positive: bool) -> bool:
    """Whether the differences of two pairs of sides are the same up to a constant factor.

    That makes ``2x - y + 1 = 0`` of ``y = 2x + 1``. Relations without letters, or whose difference
    is a constant, have no such factor.
    """
    letters = names(gold[0]) | names(gold[1])
    if not letters or names(given[0]) | names(given[1]) != letters:
        return False
    ratios, differences = [], []
    for a, b, c, d in _pairs((*gold, *given), letters):
        if any(isinstance(side, context.matrix) for side in (a, b, c, d)):
            return False
        first, second = _plus(a, -b), _plus(c, -d)
        if first == 0 or second == 0:
            if first != second:
                return False
            continue
        ratios.append(_divided(first, second))
        differences.append(first)
    if len(ratios) < ENOUGH or all(close(each, differences[0]) for each in differences):
        return False
    same = all(close(each, ratios[0]) for each in ratios)
    return same and (not positive or (not isinstance(ratios[0], context.mpc) and ratios[0] > 0))


@lru_cache(maxsize=1024)
def number(tree: Expression) -> Value:
    """The value of an expression without letters. Raises NoValueError."""
    return _Evaluation({}, real=False).value(tree)


def as_rational(value: Value) -> Fraction | None:
    """The rational number with a small denominator that a value is, to all its digits; else None."""
    if isinstance(value, Fraction):
        return value
    if not isinstance(value, context.mpf):
        return None
    near = _fraction(value).limit_denominator(10**6)
    return near if close(value, near) else None


def to_fraction(value: Value) -> Fraction | None:
    """A real value as a fraction, to all its digits."""
    return value if isinstance(value, Fraction) else _fraction(value) if isinstance(value, context.mpf) else None


def endless(value: Value) -> Fraction | None:
    """A real value as a fraction; one that is not rational as a fraction whose decimals do not end either."""
    exact = to_fraction(value)
    if exact is None or as_rational(value) is not None:
        return as_rational(value)
    return exact + Fraction(1, 3 * 10 ** (DIGITS - 10))


def close(first: Value, second: Value) -> bool:
    """Equal: exactly where both are rational, else to within the tolerance, entry by entry in matrices."""
    if isinstance(first, context.matrix) or isinstance(second, context.matrix):
        if not (isinstance(first, context.matrix) and isinstance(second, context.matrix)):
            return False
        shapes = (first.rows, first.cols) == (second.rows, second.cols)
        return shapes and all(map(close, first, second))
    if isinstance(first, Fraction) and isinstance(second, Fraction):
        return first == second
    a, b = _inexact(first), _inexact(second)
    return bool(abs(a - b) <= TOLERANCE * max(abs(a), abs(b)))


def _pairs(trees: Sequence[Expression], letters: Iterable[str]) -> Iterable[tuple[Value, ...]]:
    """The values of several expressions at every point where all of them have one.

    With letters and without i, values are looked for among the real numbers.
    """
    order = sorted(letters)
    imaginary = any(node.op == "constant" and node.text == "i" for tree in trees for node in tree.walk())
    for index in range(len(POINTS)):
        at = {letter: POINTS[(index + STRIDE * i) % len(POINTS)] for i, letter in enumerate(order)}
        evaluation = _Evaluation(at, real=not imaginary)
        try:
            yield tuple(evaluation.value(tree) for tree in trees)
        except NoValueError:
            continue


def _fraction(value: Value) -> Fraction:
    sign, mantissa, exponent, _ = value._mpf_
    return Fraction(-int(mantissa) if sign else int(mantissa)) * Fraction(2) ** int(exponent)


def _inexact(value: Value) -> Value:
    return context.mpf(value.numerator) / value.denominator if isinstance(value, Fraction) else value


class _Evaluation:
    """Values with the letters at one point."""

    def __init__(self, at: dict[str, Fraction], real: bool) -> None:
        self.at = at
        self.real = real

    def value(self, tree: Expression) -> Value:
        """Raises NoValueError."""
        try:
            return self._bounded(self._value(tree))
        except (ZeroDivisionError, OverflowError, TypeError, ValueError, RecursionError, mpmath.libmp.ComplexResult):
            raise NoValueError from None

    def _bounded(self, value: Value) -> Value:
        if isinstance(value, Fraction):
            if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
                raise NoValueError
            return value
        if isinstance(value, context.matrix):
            return value
        if isinstance(value, context.mpc):
            if self.real:
                raise NoValueError
            if abs(value.imag) <= TOLERANCE * abs(value):
                value = value.real
        size = abs(value)
        if not context.isfinite(value) or size > LARGEST or 0 < size < SMALLEST:
            raise NoValueError
        return value

    def _value(self, tree: Expression) -> Value:
        if tree.op == "number":
            return _decimal(tree.text)
        if tree.op == "name":
            return self.at[tree.text]
        if tree.op == "constant":
            return CONSTANTS[tree.text]()
        if tree.op == "matrix":
            return context.matrix([[_inexact(self.value(entry)) for entry in row.parts] for row in tree.parts])
        values = [self.value(part) for part in tree.parts]
        if tree.op == "call":
            return _call(tree.text, values)
        return OPERATIONS[tree.op](*values)


def _decimal(text: str) -> Fraction:
    match = re.fullmatch(r"(\d*)\.(\d*)\\overline\s*\{\s*(\d+)\s*\}", text)
    if match is None:
        return Fraction(text.removesuffix("."))
    whole, fixed, period = match.groups()
    repeated = Fraction(int(period), (10 ** len(period) - 1) * 10 ** len(fixed))
    return Fraction(int(whole or "0")) + Fraction(int(fixed or "0"), 10 ** len(fixed)) + repeated


def _plus(*values: Value) -> Value:
    total = values[0]
    for value in values[1:]:
        if isinstance(total, context.matrix) != isinstance(value, context.matrix):
            raise NoValueError
        total = total + value if type(total) is type(value) else _inexact(total) + _inexact(value)
    return total


def _times(*values: Value) -> Value:
    result = values[0]
    for value in values[1:]:
        exact = isinstance(result, Fraction) and isinstance(value, Fraction)
        result = result * value if exact else _inexact(result) * _inexact(value)
        if exact and result.numerator.bit_length() > MAX_BITS:
            raise NoValueError
    return result


def _divided(above: Value, below: Value) -> Value:
    exact = isinstance(above, Fraction) and isinstance(below, Fraction)
    if isinstance(below, context.matrix):
        raise NoValueError
    return above / below if exact else _inexact(above) / _inexact(below)


def _power(base: Value, exponent: Value) -> Value:
    if isinstance(base, context.matrix):
        raise NoValueError
    if isinstance(exponent, Fraction) and exponent.denominator == 1 and isinstance(base, Fraction):
        size = max(base.numerator.bit_length(), base.denominator.bit_length())
        if size * abs(exponent) > MAX_BITS:
            raise NoValueError
        return base ** int(exponent)
    if base == 0:
        return Fraction(0) if _inexact(exponent).real > 0 else Fraction(1) / 0
    a, b = _inexact(base), _inexact(exponent)
    if abs(context.log(abs(a)) * b) > 200:
        raise NoValueError
    return context.power(a, b)


def _root(radicand: Value, index: Value) -> Value:
    """The real root where there is one: of a negative number too, for an odd index."""
    whole = isinstance(index, Fraction) and index.denominator == 1 and 0 < index <= 100
    value = _inexact(radicand)
    if whole and int(index) % 2 and not isinstance(value, context.mpc) and value < 0:
        return -context.root(-value, int(index))
    return context.root(value, int(index)) if whole else _power(radicand, 1 / index)


def _factorial(value: Value) -> Value:
    if isinstance(value, Fraction) and value.denominator == 1:
        if not 0 <= value <= MAX_FACTORIAL:
            raise NoValueError
        return Fraction(math.factorial(int(value)))
    if abs(value) > 50:
        raise NoValueError
    return context.gamma(_inexact(value) + 1)


def _binomial(above: Value, below: Value) -> Value:
    whole = all(isinstance(value, Fraction) and value.denominator == 1 for value in (above, below))
    if whole:
        if not (0 <= below <= MAX_FACTORIAL and 0 <= above <= MAX_FACTORIAL):
            raise NoValueError
        return Fraction(math.comb(int(above), int(below)))
    return _divided(_factorial(above), _times(_factorial(below), _factorial(above - below)))


def _logarithm(value: Value, base: Value) -> Value:
    return context.log(_inexact(value)) / context.log(_inexact(base))


def _absolute(value: Value) -> Value:
    if isinstance(value, context.matrix):
        raise NoValueError
    return abs(value)


def _call(name: str, values: list[Value]) -> Value:
    function = FUNCTIONS.get(name)
    if function is not None:
        (value,) = values
        return function(_inexact(value))
    # A function nobody defined: some smooth one that is its name's own.
    seed = sum((i + 1) * ord(letter) for i, letter in enumerate(name))
    return context.sin(seed + sum((i + context.sqrt(seed + 2)) * _inexact(value) for i, value in enumerate(values)))


OPERATIONS: dict[str, Callable[..., Value]] = {
    "+": _plus, "*": _times, "/": _divided, "^": _power, "root": _root, "log": _logarithm, "!": _factorial,
    "binom": _binomial, "abs": _absolute, "neg": lambda value: -value,
    "%": lambda value: _divided(value, Fraction(100)),
    "floor": lambda value: Fraction(math.floor(to_fraction(value))),  # type: ignore[arg-type]  # TypeError: no value
    "ceil": lambda value: Fraction(math.ceil(to_fraction(value))),  # type: ignore[arg-type]
}  # fmt: skip
FUNCTIONS: dict[str, Callable[[Value], Value]] = {
    "sin": context.sin, "cos": context.cos, "tan": context.tan, "cot": context.cot, "sec": context.sec,
    "csc": context.csc, "arcsin": context.asin, "arccos": context.acos, "arctan": context.atan,
    "arccot": context.acot, "sinh": context.sinh, "cosh": context.cosh, "tanh": context.tanh, "coth": context.coth,
    "log": context.log, "lg": context.log10, "exp": context.exp,
}  # fmt: skip
CONSTANTS: dict[str, Callable[[], Value]] = {
    "π": lambda: +context.pi,
    "e": lambda: +context.e,
    "i": lambda: context.mpc(0, 1),
    "°": lambda: context.pi / 180,
}
