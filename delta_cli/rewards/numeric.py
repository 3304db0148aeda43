"""Do two expressions have the same values? Asked beside math-verify, and before it.

math-verify chops differences below 1e-15 and rounds decimals to six places, both of which accept
answers that are wrong. And where the values differ, which takes a millisecond to see, it need not
try to simplify the difference to zero, which may take forever.
"""

from __future__ import annotations

from fractions import Fraction

import sympy

from delta_cli.rewards.quantity import decimal_value, rounds_to

DIGITS = 30
TOLERANCE = sympy.Float("1e-12", DIGITS)
POINTS = (0.6180339887, 1.7320508075, -0.8414709848)  # where free symbols are evaluated, one value each


def agree(gold: sympy.Basic, given: sympy.Basic, gold_text: str, given_text: str) -> bool:
    """Whether two expressions, read from the two texts, have equal values wherever they are looked at."""
    if isinstance(gold, sympy.MatrixBase) and isinstance(given, sympy.MatrixBase):
        pairs = zip(gold, given, strict=True)
        return gold.shape == given.shape and all(_same_values(a, b) for a, b in pairs)
    for exact, text in ((gold, given_text), (given, gold_text)):
        rounded = decimal_value(text)
        if rounded is not None and not exact.free_symbols:
            return _rounded(exact, text, rounded)
    return gold == given or _same_values(gold, given)


def _rounded(exact: sympy.Basic, text: str, rounded: Fraction) -> bool:
    value = sympy.nsimplify(exact.doit(), rational=False) if exact.has(sympy.Float) else exact.doit()
    if value.is_Rational:
        exactly = Fraction(int(value.p), int(value.q))
        return exactly == rounded or rounds_to(exactly, text, rounded)
    number = value.evalf(DIGITS)
    return bool(number.is_Float) and rounds_to(Fraction(str(number)) + Fraction(1, 3 * 10**DIGITS), text, rounded)


def _same_values(first: sympy.Basic, second: sympy.Basic) -> bool:
    symbols = sorted(first.free_symbols | second.free_symbols, key=str)
    compared = 0
    for shift in POINTS if symbols else POINTS[:1]:
        at = {symbol: sympy.Float(str(shift + 0.37 * i), DIGITS) for i, symbol in enumerate(symbols)}
        a, b = _value(first, at), _value(second, at)
        if a is None or b is None:
            continue
        if a != b and not abs(a - b) <= TOLERANCE * max(abs(a), abs(b)):
            return False
        compared += 1
    return compared > 0


def _value(expression: sympy.Basic, at: dict[sympy.Symbol, sympy.Float]) -> sympy.Expr | None:
    """The number an expression evaluates to; None where it has no value there."""
    number = expression.evalf(DIGITS, subs=at)
    if not number.is_number or number.has(sympy.Limit, sympy.Sum, sympy.Integral):
        number = expression.doit().subs(at).evalf(DIGITS)
    return number if number.is_number and not number.has(sympy.nan, sympy.zoo) else None
