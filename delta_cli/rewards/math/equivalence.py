"""Do two expressions have the same values? Compared exactly for numbers, and at chosen points for letters.

The points are positive and negative, zero, whole, halves and others, because two expressions can agree
on some of these only: ``\\ln x`` and ``\\ln|x|``, or ``\\lfloor x\\rfloor + 1`` and ``\\lceil x\\rceil``. Two more
points depend on both expressions, so that no expression can be written to agree on all of them.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

from delta_cli.rewards.math.errors import DomainError, NoValueError
from delta_cli.rewards.math.evaluation import (
    Evaluation,
    Value,
    close,
    context,
    divided,
    inexact,
    is_matrix,
    number,
    plus,
)
from delta_cli.rewards.math.expression import COMPLEX_LETTERS, Expression
from delta_cli.rewards.math.identity import PRIME, is_rational_function, same_function, values_at_points
from delta_cli.rewards.math.reading import has_sets, noncommuting, vectors

# The values of letters. Several letters take different ones, STRIDE apart.
POINTS = tuple(
    Fraction(*pair)
    for pair in (
        *((3, 7), (17, 13), (-5, 11), (29, 9), (113, 10), (5, 23), (-19, 8), (41, 3)),
        *((67, 31), (-37, 6), (2, 1), (-1, 2), (0, 1), (3, 1), (-1, 1)),
        *((5, 2), (1, 1), (-2, 1), (7, 2), (-3, 2), (-7, 9)),
    )
)
NOT_NUMBERS = frozenset({r"\infty", r"\emptyset"})  # that are not computed with
WHOLE = tuple(Fraction(value) for value in (7, 4, 2, 9, 5, 12, 3, 8, 1, 6, 11, 0, 10))
STRIDE = 5  # coprime to the number of points: up to as many letters as there are points have different values
SEEDED = 2  # points that depend on both expressions
ENOUGH = 3  # points at which two expressions must have been compared
MAX_LONG_DIGITS = 25  # of a number in an expression that is not rational


@dataclass(frozen=True)
class _Letters:
    """The letters of the gold answer, by the kind of number each holds."""

    reals: tuple[str, ...]
    whole: tuple[str, ...]
    complex: tuple[str, ...]

    def at(self, index: int, shift: int) -> dict[str, Value]:
        """The values at one point."""
        values: dict[str, Value] = {}
        for i, letter in enumerate(self.reals):
            values[letter] = POINTS[(index + STRIDE * i) % len(POINTS)] + Fraction(shift, 97)
        for i, letter in enumerate(self.whole):
            place = i if index % 2 else len(self.whole) - 1 - i  # letters above others, as in a binomial
            values[letter] = WHOLE[(index + 2 * i) % len(WHOLE)] + 5 * place + shift % 40
        for i, letter in enumerate(self.complex):
            real, imaginary = (POINTS[(index + STRIDE * i + 7 * part) % len(POINTS)] for part in (0, 1))
            values[letter] = context.mpc(inexact(real + Fraction(shift, 97)), inexact(imaginary))
        return values


def names(tree: Expression) -> frozenset[str]:
    """The letters of an expression, and the undefined functions."""
    return frozenset(
        node.text for node in tree.walk() if node.op == "name" or (node.op == "call" and node.text.endswith("()"))
    )


def same_values(gold: Expression, given: Expression) -> bool:
    """Whether ``given`` equals ``gold`` wherever ``gold`` has a value, and brings in no letter of its own.

    ``given`` must have a value wherever ``gold`` has one, except at isolated gaps, such as ``\\frac{x^2-1}{x-1}``
    at 1, and for several letters where more than one is negative, such as ``\\frac{\\sqrt a}{\\sqrt b}``.
    """
    letters = names(gold)
    if not names(given) <= letters or has_sets(gold) or has_sets(given) or _hides_digits(gold, given):
        return False
    if not letters:
        return _same_numbers(gold, given)
    if letters & NOT_NUMBERS:
        return gold == given
    arrows, capitals = sorted(set(vectors(gold))), sorted(noncommuting(gold))
    if arrows:
        verdict = _same_with(gold, given, arrows, (3, 1))
        if verdict is not None:
            return verdict
    if capitals and _same_with(gold, given, capitals, (2, 2)) is False:
        return False
    if is_rational_function(gold) and is_rational_function(given):
        return same_function(gold, given, sorted(letters))
    return _same_at_points(gold, given)


def same_ratio(gold: tuple[Expression, Expression], given: tuple[Expression, Expression], positive: bool) -> bool:
    """Whether the differences of two pairs of sides are the same up to a constant factor.

    That makes ``2x - y + 1 = 0`` equal to ``y = 2x + 1``. Relations without letters, or whose difference is
    a constant, have no such factor.
    """
    first, second = Expression("+", gold), Expression("+", given)
    letters = names(first)
    if not letters or names(second) != letters or has_sets(first) or _hides_digits(first, second):
        return False
    if noncommuting(first) or any(vectors(first)):
        return False
    if is_rational_function(first) and is_rational_function(second):
        return _same_rational_ratio(first, second, sorted(letters)) and (not positive or _positive_ratio(first, second))
    ratios, differences = [], []
    for above, below in _differences(first, second):
        if above == 0 or below == 0:
            if above != below:
                return False
            continue
        ratios.append(divided(above, below))
        differences.append(above)
    if len(ratios) < ENOUGH or all(close(each, differences[0]) for each in differences):
        return False
    same = all(close(each, ratios[0]) for each in ratios)
    return same and (not positive or (not isinstance(ratios[0], context.mpc) and ratios[0] > 0))


def _same_rational_ratio(gold: Expression, given: Expression, letters: list[str]) -> bool:
    """Whether the differences of the parts of ``gold`` and of ``given`` vary, and have a constant ratio."""
    values = [
        ((a - b) % PRIME, (c - d) % PRIME) for a, b, c, d in values_at_points((*gold.parts, *given.parts), letters)
    ]
    if len(values) < ENOUGH or any(above == 0 or below == 0 for above, below in values):
        return False
    above, below = values[0]
    same = all(first * below % PRIME == second * above % PRIME for first, second in values)
    return same and len({first for first, _ in values}) > 1


def _positive_ratio(gold: Expression, given: Expression) -> bool:
    for above, below in _differences(gold, given):
        if above != 0 and below != 0:
            return bool(divided(above, below) > 0)
    return False


def _differences(gold: Expression, given: Expression) -> Iterator[tuple[Value, Value]]:
    """The differences of the two parts of ``gold`` and of ``given``, at every point at which all have values."""
    for a, b, c, d in _values_of((*gold.parts, *given.parts), _letters(gold, given)):
        if any(map(is_matrix, (a, b, c, d))):
            return
        yield plus(a, -b), plus(c, -d)


def _same_numbers(gold: Expression, given: Expression) -> bool:
    try:
        return close(number(gold), number(given))
    except NoValueError:
        return False


def _same_at_points(gold: Expression, given: Expression) -> bool:
    letters = _letters(gold, given)
    reals = [not letters.complex and not _has_imaginary(tree) for tree in (gold, given)]
    defined = compared = 0
    for at in _points(letters, gold, given):
        try:
            truth = Evaluation(at, real=reals[0]).value(gold)
        except NoValueError:
            continue
        defined += 1
        try:
            value = Evaluation(at, real=reals[1]).value(given)
        except DomainError:
            if sum(isinstance(each, Fraction) and each <= 0 for each in at.values()) > 1:
                continue
            return False
        except NoValueError:
            continue
        if not close(truth, value):
            return False
        compared += 1
    return compared >= max(ENOUGH, defined // 3)


def _points(letters: _Letters, *trees: Expression) -> Iterator[dict[str, Value]]:
    """The values of the letters at all points, those that depend on the expressions last."""
    for index in range(len(POINTS)):
        yield letters.at(index, 0)
    seed = zlib.crc32("".join(node.op + node.text for tree in trees for node in tree.walk()).encode())
    for index in range(SEEDED):
        yield letters.at(index, 1 + (seed >> 8 * index) % 9973)


def _values_of(trees: Sequence[Expression], letters: _Letters) -> Iterator[tuple[Value, ...]]:
    """The values of several expressions at every point at which all of them have one."""
    real = not letters.complex and not any(map(_has_imaginary, trees))
    for at in _points(letters, *trees):
        evaluation = Evaluation(at, real)
        try:
            yield tuple(evaluation.value(tree) for tree in trees)
        except NoValueError:
            continue


def _letters(gold: Expression, given: Expression) -> _Letters:
    """The kind of number that each letter holds. A letter is whole if ``gold`` makes sense for whole numbers only."""
    everything = sorted({node.text for node in gold.walk() if node.op == "name"})
    whole = _whole_letters(gold, given)
    conjugated = any(node.op == "conj" or node.text in ("re", "im") for tree in (gold, given) for node in tree.walk())
    only_complex = all(letter[0] in COMPLEX_LETTERS for letter in everything)
    is_complex = conjugated or _has_imaginary(gold) or only_complex
    complex_ = {letter for letter in everything if letter[0] in COMPLEX_LETTERS and is_complex} - whole
    reals = tuple(letter for letter in everything if letter not in whole and letter not in complex_)
    return _Letters(reals, tuple(sorted(whole)), tuple(sorted(complex_)))


def _whole_letters(gold: Expression, given: Expression) -> set[str]:
    """Letters in the exponent of a negative number, in a factorial or binomial; and n, m, k in a sine of πn."""
    whole: set[str] = set()
    for node in gold.walk():
        if node.op == "^" and _is_negative(node.parts[0]):
            whole |= names(node.parts[1])
        elif node.op in ("!", "binom"):
            whole |= names(node)
        elif node.op == "call" and node.text in ("sin", "cos") and Expression("constant", text="π") in node.walk():
            whole |= {letter for letter in names(node) & {"n", "m", "k"} if _alternates(given, letter)}
    return whole


def _alternates(tree: Expression, letter: str) -> bool:
    """Whether an expression has a power of a negative number with that letter, as ``(-1)^n``."""
    return any(
        node.op == "^" and _is_negative(node.parts[0]) and letter in names(node.parts[1]) for node in tree.walk()
    )


def _is_negative(tree: Expression) -> bool:
    return tree.op == "neg" and not names(tree)


def _has_imaginary(tree: Expression) -> bool:
    return any(node.op == "constant" and node.text == "i" for node in tree.walk())


def _hides_digits(gold: Expression, given: Expression) -> bool:
    """Whether a number so long that it would hide in the rounding stands beside one that is not rational."""
    nodes = [*gold.walk(), *given.walk()]
    long = any(node.op == "number" and len(node.text) > MAX_LONG_DIGITS for node in nodes)
    return long and any(node.op in ("constant", "root", "call", "log") for node in nodes)


def _same_with(gold: Expression, given: Expression, special: list[str], shape: tuple[int, int]) -> bool | None:
    """Whether two expressions agree if ``special`` letters are matrices; None if ``gold`` then has no value."""
    others = sorted(names(gold) - set(special))
    for index in (0, 3, 8):
        at: dict[str, Value] = {letter: POINTS[(index + 7 + i) % len(POINTS)] for i, letter in enumerate(others)}
        for i, letter in enumerate(special):
            rows = [[POINTS[(5 * i + 3 * r + 2 * c + index) % 15] for c in range(shape[1])] for r in range(shape[0])]
            at[letter] = context.matrix([[inexact(entry) for entry in row] for row in rows])
        try:
            truth = Evaluation(at, real=False).value(gold)
        except NoValueError:
            return None
        try:
            if not close(truth, Evaluation(at, real=False).value(given)):
                return False
        except NoValueError:
            return False
    return True
