"""The value of an expression: exactly where it is rational, otherwise to DIGITS digits by mpmath.

All sizes are bounded and all work is counted, so that no expression takes long. What would grow beyond
the bounds has no value here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from functools import lru_cache
from typing import Any  # a value: a Fraction, mpmath's mpf or mpc, or its matrix; mpmath has no types

import mpmath

from delta_cli.rewards.math.budget import spend
from delta_cli.rewards.math.errors import DomainError, NoValueError, PoleError, UnreadableError
from delta_cli.rewards.math.expression import Expression

DIGITS = 60
MAX_BITS = 20_000  # of a rational number
MAX_FACTORIAL = 1000
MAX_MATRIX_POWER = 20

context = mpmath.MPContext()
context.dps = DIGITS
TOLERANCE = context.mpf(10) ** -40  # relative
LARGEST = context.mpf(10) ** 40  # of a number that is not rational
SMALLEST = context.mpf(10) ** -50
SMALLEST_RATIONAL = Fraction(1, 10**30)  # that is combined with numbers which are not rational
COSTS = {"number": 1, "name": 1, "constant": 3, "+": 4, "*": 6, "neg": 2, "/": 8, "matrix": 20}
COST_OF_FUNCTION = 120  # of a root, power, logarithm or other function
COST_OF_GAMMA = 1500
Value = Any


class Evaluation:
    """Evaluates expressions with letters at given values, among the real or the complex numbers."""

    def __init__(self, at: Mapping[str, Value], real: bool) -> None:
        self.at = at
        self.real = real

    def value(self, tree: Expression) -> Value:
        """The value. Raises NoValueError."""
        spend(COSTS.get(tree.op, COST_OF_FUNCTION))
        try:
            return self._bounded(self._value(tree))
        except (NoValueError, UnreadableError):
            raise
        except ZeroDivisionError:
            raise PoleError from None
        except mpmath.libmp.ComplexResult:
            raise DomainError from None
        except (OverflowError, TypeError, ValueError, AttributeError, RecursionError, context.NoConvergence):
            raise NoValueError from None

    def _bounded(self, value: Value) -> Value:
        if isinstance(value, Fraction):
            if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
                raise NoValueError
            return value
        if is_matrix(value):
            return value
        if isinstance(value, context.mpc):
            if abs(value.imag) <= TOLERANCE * abs(value):
                value = value.real
            elif self.real:
                raise DomainError
        size = abs(value)
        if not context.isfinite(value):
            raise PoleError
        if size > LARGEST or 0 < size < SMALLEST:
            raise NoValueError
        return value

    def _value(self, tree: Expression) -> Value:
        if tree.op == "number":
            return decimal(tree.text)
        if tree.op == "name":
            return self.at[tree.text]
        if tree.op == "constant":
            return CONSTANTS[tree.text]()
        if tree.op == "matrix":
            return context.matrix([[inexact(self.value(entry)) for entry in row.parts] for row in tree.parts])
        values = [self.value(part) for part in tree.parts]
        if tree.op == "*":
            return _product(values, tree.text)
        if tree.op == "call":
            return _call(tree.text, values)
        if tree.op == "^" and self.real:
            return _real_power(*values)
        operation = OPERATIONS.get(tree.op)
        if operation is None:  # an unresolved apply
            raise NoValueError
        return operation(*values)


@lru_cache(maxsize=1024)
def number(tree: Expression) -> Value:
    """The value of an expression without letters. Raises NoValueError."""
    return Evaluation({}, real=False).value(tree)


@lru_cache(maxsize=1024)
def decimal(text: str) -> Fraction:
    """The value of a number, which may have a repeating part."""
    match = re.fullmatch(r"(\d*)\.(\d*)\\overline\s*\{\s*(\d+)\s*\}", text)
    if match is None:
        return Fraction(text.removesuffix("."))
    whole, fixed, period = match.groups()
    repeated = Fraction(int(period), (10 ** len(period) - 1) * 10 ** len(fixed))
    return Fraction(int(whole or "0")) + Fraction(int(fixed or "0"), 10 ** len(fixed)) + repeated


def is_matrix(value: Value) -> bool:
    return isinstance(value, context.matrix)


def close(first: Value, second: Value) -> bool:
    """Equal: exactly if both are rational, else to within the tolerance, entry by entry for matrices."""
    if is_matrix(first) or is_matrix(second):
        if not (is_matrix(first) and is_matrix(second)):
            return False
        shapes = (first.rows, first.cols) == (second.rows, second.cols)
        return shapes and all(map(close, first, second))
    if isinstance(first, Fraction) and isinstance(second, Fraction):
        return first == second
    a, b = inexact(first), inexact(second)
    return bool(abs(a - b) <= TOLERANCE * max(abs(a), abs(b)))


def as_rational(value: Value) -> Fraction | None:
    """The rational number with a small denominator that a value is, to all its digits; else None."""
    if isinstance(value, Fraction):
        return value
    if not isinstance(value, context.mpf):
        return None
    near = _fraction(value).limit_denominator(10**6)
    return near if close(value, near) else None


def to_fraction(value: Value) -> Fraction | None:
    """A real value as a fraction, to all its digits; None for any other value."""
    return value if isinstance(value, Fraction) else _fraction(value) if isinstance(value, context.mpf) else None


def endless(value: Value) -> Fraction | None:
    """A real value as a fraction. One that is not rational gets a denominator with which its decimals do not end."""
    exact = to_fraction(value)
    if exact is None or as_rational(value) is not None:
        return as_rational(value)
    return exact + Fraction(1, 3 * 10 ** (DIGITS - 10))


def inexact(value: Value) -> Value:
    """A Fraction as an mpf; any other value as it is. Raises NoValueError for one that would hide in the rounding."""
    if not isinstance(value, Fraction):
        return value
    if value and abs(value) < SMALLEST_RATIONAL:
        raise NoValueError
    return context.mpf(value.numerator) / value.denominator


def _fraction(value: Value) -> Fraction:
    sign, mantissa, exponent, _ = value._mpf_
    return Fraction(-int(mantissa) if sign else int(mantissa)) * Fraction(2) ** int(exponent)


# ------------------------------------------------------------------------------------------------ operations


def plus(*values: Value) -> Value:
    """The sum. Raises NoValueError for a number plus a matrix."""
    total = values[0]
    for value in values[1:]:
        if is_matrix(total) != is_matrix(value):
            raise NoValueError
        total = total + value if type(total) is type(value) else inexact(total) + inexact(value)
    return total


def _product(values: list[Value], signs: str) -> Value:
    """The product from the left. Two vectors have a product with ``×`` or ``·`` only."""
    result = values[0]
    for value, sign in zip(values[1:], signs, strict=True):
        exact = isinstance(result, Fraction) and isinstance(value, Fraction)
        if is_matrix(result) and is_matrix(value) and result.cols == value.cols == 1 and result.rows == value.rows == 3:
            result = _of_vectors(result, value, sign)
        else:
            result = result * value if exact else inexact(result) * inexact(value)
        if exact and result.numerator.bit_length() > MAX_BITS:
            raise NoValueError
    return result


def _of_vectors(a: Value, b: Value, sign: str) -> Value:
    if sign == "·":
        return sum(x * y for x, y in zip(a, b, strict=True))
    if sign != "×":
        raise NoValueError
    return context.matrix([a[1] * b[2] - a[2] * b[1], a[2] * b[0] - a[0] * b[2], a[0] * b[1] - a[1] * b[0]])


def divided(above: Value, below: Value) -> Value:
    """The quotient. Raises NoValueError for one by a matrix."""
    if is_matrix(below):
        raise NoValueError
    exact = isinstance(above, Fraction) and isinstance(below, Fraction)
    return above / below if exact else inexact(above) / inexact(below)


def _power(base: Value, exponent: Value) -> Value:
    whole = isinstance(exponent, Fraction) and exponent.denominator == 1
    if is_matrix(exponent):
        raise NoValueError
    if is_matrix(base):
        if base.cols == 1 and exponent == 2:
            return sum(entry * entry for entry in base)
        if not whole or base.rows != base.cols or abs(exponent) > MAX_MATRIX_POWER:
            raise NoValueError
        return base ** int(exponent)
    if whole and isinstance(base, Fraction):
        size = max(base.numerator.bit_length(), base.denominator.bit_length())
        if size * abs(exponent) > MAX_BITS:
            raise NoValueError
        return base ** int(exponent)
    if base == 0:
        return Fraction(0) if inexact(exponent).real > 0 else Fraction(1) / 0
    a, b = inexact(base), inexact(exponent)
    if abs(context.log(abs(a)) * b) > 200:
        raise NoValueError
    return context.power(a, b)


def _real_power(base: Value, exponent: Value) -> Value:
    """A power among the real numbers, where the cube root of a negative number is negative."""
    odd = isinstance(exponent, Fraction) and exponent.denominator % 2 == 1 and exponent.denominator > 1
    if odd and not is_matrix(base) and base < 0:
        size = _power(-base, exponent)
        return -size if exponent.numerator % 2 else size
    return _power(base, exponent)


def _root(radicand: Value, index: Value) -> Value:
    """The real root if there is one: of a negative number, too, for an odd index."""
    whole = isinstance(index, Fraction) and index.denominator == 1 and 0 < index <= 100
    value = inexact(radicand)
    if whole and int(index) % 2 and not isinstance(value, context.mpc) and value < 0:
        return -context.root(-value, int(index))
    return context.root(value, int(index)) if whole else _power(radicand, 1 / index)


def _factorial(value: Value) -> Value:
    if isinstance(value, Fraction) and value.denominator == 1:
        if value < 0:
            raise PoleError
        if value > MAX_FACTORIAL:
            raise NoValueError
        return Fraction(math.factorial(int(value)))
    return _gamma(inexact(value) + 1)


def _gamma(value: Value) -> Value:
    if abs(value) > 50:
        raise NoValueError
    spend(COST_OF_GAMMA)
    return context.gamma(inexact(value))


def _zeta(value: Value) -> Value:
    if abs(value) > 50 or isinstance(value, context.mpc):
        raise NoValueError
    spend(COST_OF_GAMMA)
    return context.zeta(value)


def _binomial(above: Value, below: Value) -> Value:
    whole = all(isinstance(value, Fraction) and value.denominator == 1 for value in (above, below))
    if whole:
        if not (0 <= below <= MAX_FACTORIAL and 0 <= above <= MAX_FACTORIAL):
            raise NoValueError
        return Fraction(math.comb(int(above), int(below)))
    return divided(_factorial(above), _product([_factorial(below), _factorial(plus(above, -below))], "j"))


def _logarithm(value: Value, base: Value) -> Value:
    return _log(inexact(value)) / _log(inexact(base))


def _log(value: Value) -> Value:
    if value == 0:
        raise PoleError
    return context.log(value)


def _absolute(value: Value) -> Value:
    if is_matrix(value):
        if value.cols != 1:
            raise NoValueError
        return context.sqrt(sum(abs(entry) ** 2 for entry in value))
    return abs(value)


def _conjugate(value: Value) -> Value:
    if is_matrix(value):
        raise NoValueError
    return context.conj(value) if isinstance(value, context.mpc) else value


def _floor(value: Value) -> Value:
    exact = to_fraction(value)
    if exact is None:
        raise NoValueError
    near = round(exact)
    if not isinstance(value, Fraction) and abs(exact - near) < Fraction(1, 10**35):
        return Fraction(near)
    return Fraction(math.floor(exact))


def _call(name: str, values: list[Value]) -> Value:
    if any(map(is_matrix, values)):
        if name != "^T":
            raise NoValueError
        return values[0].T
    function = FUNCTIONS.get(name)
    if function is not None:
        (value,) = values
        return function(inexact(value))
    return _unknown(name, values)


def _unknown(name: str, values: list[Value]) -> Value:
    """An undefined function: a smooth one of its own for each name, neither periodic nor even nor odd."""
    seed = sum((i + 1) * ord(letter) for i, letter in enumerate(name))
    total = sum((i + context.sqrt(seed + 2)) * inexact(value) for i, value in enumerate(values))
    return context.sin(seed + total) + total / (total * total + total + seed)


OPERATIONS: dict[str, Callable[..., Value]] = {
    "+": plus, "/": divided, "^": _power, "root": _root, "log": _logarithm, "!": _factorial, "binom": _binomial,
    "abs": _absolute, "neg": lambda value: -value, "%": lambda value: divided(value, Fraction(100)),
    "floor": _floor, "ceil": lambda value: -_floor(-value), "conj": _conjugate,
}  # fmt: skip
FUNCTIONS: dict[str, Callable[[Value], Value]] = {
    "sin": context.sin, "cos": context.cos, "tan": context.tan, "cot": context.cot, "sec": context.sec,
    "csc": context.csc, "arcsin": context.asin, "arccos": context.acos, "arctan": context.atan,
    "arccot": context.acot, "arcsec": context.asec, "arccsc": context.acsc, "sinh": context.sinh,
    "cosh": context.cosh, "tanh": context.tanh, "coth": context.coth, "sech": context.sech, "csch": context.csch,
    "arcsinh": context.asinh, "arccosh": context.acosh, "arctanh": context.atanh, "arccoth": context.acoth,
    "log": _log, "lg": lambda value: _log(value) / context.ln10, "exp": context.exp,
    "re": context.re, "im": context.im, "gamma": _gamma, "zeta": _zeta,
}  # fmt: skip
CONSTANTS: dict[str, Callable[[], Value]] = {
    "π": lambda: +context.pi,
    "e": lambda: +context.e,
    "i": lambda: context.mpc(0, 1),
    "°": lambda: context.pi / 180,
}
