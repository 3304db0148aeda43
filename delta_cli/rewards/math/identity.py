"""Rational functions, compared exactly: both are computed modulo a large prime at points that depend on both.

Two different rational functions of a bounded degree agree at such a point with a probability below 10^-15
(Schwartz and Zippel), so a few points decide. This is also much faster than computing with fractions.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence

from delta_cli.rewards.math.budget import spend
from delta_cli.rewards.math.evaluation import decimal
from delta_cli.rewards.math.expression import Expression

PRIME = 2**61 - 1
POINTS = 6
ENOUGH = 3  # points at which no denominator was zero
MAX_EXPONENT = 1000


def is_rational_function(tree: Expression) -> bool:
    """Whether an expression has only letters, numbers, and the operations of rational functions."""
    if tree.op == "^":
        exponent = _exponent(tree)
        return exponent is not None and is_rational_function(tree.parts[0])
    return tree.op in ("number", "name", "+", "*", "neg", "/", "%") and all(map(is_rational_function, tree.parts))


def values_at_points(trees: Sequence[Expression], letters: Sequence[str]) -> Iterator[tuple[int, ...]]:
    """The values of several rational functions modulo PRIME, at every point at which all of them have one."""
    seed = zlib.crc32("".join(node.op + node.text for tree in trees for node in tree.walk()).encode())
    for _ in range(POINTS):
        at = {}
        for letter in letters:
            seed = (seed * 6364136223846793005 + 1442695040888963407) % 2**64
            at[letter] = seed % PRIME
        try:
            yield tuple(_value(tree, at) for tree in trees)
        except ZeroDivisionError:
            continue


def same_function(gold: Expression, given: Expression, letters: Sequence[str]) -> bool:
    """Whether two rational functions are the same."""
    pairs = list(values_at_points((gold, given), letters))
    return len(pairs) >= ENOUGH and all(first == second for first, second in pairs)


def _exponent(tree: Expression) -> int | None:
    """The whole exponent of a power; None for any other."""
    exponent, sign = tree.parts[1], 1
    if exponent.op == "neg":
        exponent, sign = exponent.parts[0], -1
    if exponent.op != "number" or not exponent.text.isdecimal() or len(exponent.text) > 4:
        return None
    value = sign * int(exponent.text)
    return value if abs(value) <= MAX_EXPONENT else None


def _value(tree: Expression, at: dict[str, int]) -> int:
    """The value modulo PRIME. Raises ZeroDivisionError."""
    spend(2)
    if tree.op == "name":
        return at[tree.text]
    if tree.op == "number":
        number = decimal(tree.text)
        return number.numerator * _inverse(number.denominator) % PRIME
    first = _value(tree.parts[0], at)
    if tree.op == "^":
        exponent = _exponent(tree) or 0
        return pow(_inverse(first) if exponent < 0 else first, abs(exponent), PRIME)
    if tree.op == "neg":
        return -first % PRIME
    if tree.op == "%":
        return first * _inverse(100) % PRIME
    for part in tree.parts[1:]:
        value = _value(part, at)
        if tree.op == "+":
            first += value
        else:
            first = first * (value if tree.op == "*" else _inverse(value)) % PRIME
    return first % PRIME


def _inverse(value: int) -> int:
    if value % PRIME == 0:
        raise ZeroDivisionError
    return pow(value, -1, PRIME) if value != 1 else 1
