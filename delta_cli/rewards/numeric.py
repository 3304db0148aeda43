"""A second opinion on math-verify's yes: do the two expressions have the same values?

math-verify chops differences below 1e-15, ignores the case of letters and rounds decimals to six
places; each of these accepts answers that are wrong.
"""

from __future__ import annotations

from fractions import Fraction

import sympy

from delta_cli.rewards.quantity import decimal_value, rounds_to

DIGITS = 30
TOLERANCE = sympy.Float("1e-12", DIGITS)
POINTS = (0.6180339887, 1.7320508075, -0.8414709848)  # where free symbols are evaluated, one value each


def agree(gold: sympy.Basic, given: sympy.Basic, gold_text: str, given_text: str) -> bool:
    """Whether two expressions that math-verify takes to be equal have equal values."""
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
        a, b = (each.doit().subs(at).evalf(DIGITS) for each in (first, second))
        if not (a.is_number and b.is_number) or a.has(sympy.nan, sympy.zoo) or b.has(sympy.nan, sympy.zoo):
            continue
        if a != b and not abs(a - b) <= TOLERANCE * max(abs(a), abs(b)):
            return False
        compared += 1
    return compared > 0
