r"""Sets of real numbers: ``(-\infty,2)\cup(5,\infty)``, ``x<2 \text{ or } x>5``, ``\mathbb{R}\setminus[2,5]`` are one.

A set is a union of pieces between numbers, sorted and joined where they meet. Sets with letters at their ends
are not read here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from functools import cmp_to_key

from delta_cli.rewards.math.answer import LISTS, Collection, ParsedAnswer, Relation, Scalar, read
from delta_cli.rewards.math.budget import spend
from delta_cli.rewards.math.errors import NoValueError, UnreadableError
from delta_cli.rewards.math.expression import parse
from delta_cli.rewards.math.literals import plain_value

MAX_PIECES = 40
FLIPPED = {"<": ">", ">": "<", r"\le": r"\ge", r"\ge": r"\le"}
INTERVALS = ("()", "[]", "(]", "[)")
REALS = r"\mathbb{R}"


@dataclass(frozen=True)
class End:
    """An end of a piece: its answer, or ±∞ if ``infinite`` is ±1."""

    answer: Scalar
    infinite: int = 0


@dataclass(frozen=True)
class RealInterval:
    """All numbers between two ends; a single number if both are the same."""

    low: End
    low_closed: bool
    high: End
    high_closed: bool


@dataclass(frozen=True)
class RealSet:
    """Sorted pieces that do not meet, and the name of the variable if the answer gives one."""

    pieces: tuple[RealInterval, ...]
    name: str = ""


LOWEST, HIGHEST = End(Scalar(r"-\infty"), -1), End(Scalar(r"\infty"), 1)
EVERYTHING = (RealInterval(LOWEST, False, HIGHEST, False),)


class _NotASetError(Exception):
    """The answer is not a set of real numbers with numbers at its ends."""


def is_set(answer: ParsedAnswer, lists: bool = False) -> bool:
    """Whether an answer is a set for sure; with ``lists``, also if it is a list of intervals, or ``(1, 2)``."""
    if isinstance(answer, Relation):
        return range_of(answer) is not None or answer.signs == (r"\ne",) or _around(answer) is not None
    if isinstance(answer, Scalar):
        return answer.text == REALS
    if not isinstance(answer, Collection):
        return False
    if answer.kind in ("∪", "∖", "∩", "(]", "[)"):
        return True
    if answer.kind in LISTS:
        if all(isinstance(item, Collection) and item.kind in INTERVALS for item in answer.items):
            return lists
        return any(isinstance(item, Relation) and is_set(item) for item in answer.items)
    return lists


def real_set(answer: ParsedAnswer) -> RealSet | None:
    """The set that an answer says; None if it says none, or one with letters at its ends."""
    try:
        return _read(answer)
    except (_NotASetError, UnreadableError):
        return None


_MODULUS = re.compile(r"\|\s*([a-z])\s*(?:([-+])\s*([^|]+))?\|")


def _around(relation: Relation) -> RealSet | None:
    """The set of ``|x - a| < b``; None for other relations."""
    if len(relation.signs) != 1 or relation.signs[0] not in FLIPPED:
        return None
    (left, right), sign = relation.sides, relation.signs[0]
    if _MODULUS.fullmatch(right):
        left, right, sign = right, left, FLIPPED[sign]
    modulus, radius = _MODULUS.fullmatch(left), plain_value(right)
    middle = plain_value((modulus[3] or "0").strip()) if modulus else None
    if modulus is None or radius is None or middle is None or radius <= 0:
        return None
    middle = -middle if modulus[2] == "+" else middle
    low, high = (End(Scalar(str(middle + distance))) for distance in (-radius, radius))
    closed = sign in (r"\le", r"\ge")
    if sign in ("<", r"\le"):
        pieces: tuple[RealInterval, ...] = (RealInterval(low, closed, high, closed),)
    else:
        pieces = (RealInterval(LOWEST, False, low, closed), RealInterval(high, closed, HIGHEST, False))
    return RealSet(pieces, modulus[1])


def range_of(relation: Relation) -> tuple[str, ParsedAnswer] | None:
    """The name and the set of ``x \\in A``, or the interval of ``x > a`` or ``a < x <= b``."""
    sides, signs = relation.sides, relation.signs
    if signs == (r"\in",):
        values = read(sides[1])
        is_values = isinstance(values, Collection) or values in (Scalar(r"\emptyset"), Scalar(REALS))
        return (sides[0], values) if is_values and (_is_variable(sides[0]) or "(" in sides[0]) else None
    if not set(signs) <= set(FLIPPED) or len({sign in (">", r"\ge") for sign in signs}) != 1:
        return None
    if signs[0] in (">", r"\ge"):
        sides, signs = sides[::-1], tuple(FLIPPED[sign] for sign in reversed(signs))
    named = [_is_variable(side) for side in sides]
    if named == [False, True, False]:
        brackets = ("[" if signs[0] == r"\le" else "(") + ("]" if signs[1] == r"\le" else ")")
        if sides[0] == r"-\infty" and sides[2].lstrip("+") == r"\infty":
            brackets = "()"
        return sides[1], Collection(brackets, (read(sides[0]), read(sides[2])))
    if named == [False, True]:
        return sides[1], Collection("[)" if signs[0] == r"\le" else "()", (read(sides[0]), Scalar(r"\infty")))
    if named == [True, False]:
        return sides[0], Collection("(]" if signs[0] == r"\le" else "()", (Scalar(r"-\infty"), read(sides[1])))
    return None


def _is_variable(side: str) -> bool:
    return re.fullmatch(r"[A-Za-z](?:\([a-z]\))?|\\(?:theta|alpha|lambda|mu|phi|beta)", side.strip()) is not None


def _read(answer: ParsedAnswer) -> RealSet:
    if isinstance(answer, Relation):
        return _relation(answer)
    if isinstance(answer, Scalar):
        if answer.text == REALS:
            return RealSet(EVERYTHING)
        if answer.text == r"\emptyset":
            return RealSet(())
    if not isinstance(answer, Collection) or len(answer.items) > MAX_PIECES:
        raise _NotASetError
    if answer.kind in INTERVALS:
        return RealSet((_interval(answer),))
    if answer.kind == "{}":
        return RealSet(_union(tuple(_point(item) for item in answer.items)))
    sets = [_read(item) for item in answer.items]
    name = {each.name for each in sets if each.name}
    if len(name) > 1:
        raise _NotASetError
    return RealSet(_combine(answer.kind, [each.pieces for each in sets]), next(iter(name), ""))


def _combine(kind: str, sets: list[tuple[RealInterval, ...]]) -> tuple[RealInterval, ...]:
    """Apply an operation on sets. ``and`` and a comma intersect, unless nothing is left: ``x<2 and x>5``."""
    result = sets[0]
    for other in sets[1:]:
        if kind in ("∪", "or"):
            result = _union(result + other)
        elif kind == "∖":
            result = _intersection(result, _complement(other))
        else:
            result = _intersection(result, other)
    if kind in (",", "and") and not result:
        return _union(tuple(piece for each in sets for piece in each))
    return result


def _relation(relation: Relation) -> RealSet:
    if relation.signs in ((r"\ne",), ("=",)):
        variable, value = relation.sides if _is_variable(relation.sides[0]) else relation.sides[::-1]
        if not _is_variable(variable):
            raise _NotASetError
        point = (_point(read(value)),)
        return RealSet(_complement(point) if relation.signs == (r"\ne",) else point, variable.strip())
    around = _around(relation)
    if around is not None:
        return around
    found = range_of(relation)
    if found is None:
        raise _NotASetError
    return RealSet(_read(found[1]).pieces, found[0].strip())


def _interval(answer: Collection) -> RealInterval:
    if len(answer.items) != 2:
        raise _NotASetError
    low, high = map(_end, answer.items)
    closed = answer.kind[0] == "[", answer.kind[1] == "]"
    if _compare(low, high) >= 0 or (closed[0] and low.infinite) or (closed[1] and high.infinite):
        raise _NotASetError
    return RealInterval(low, closed[0], high, closed[1])


def _point(answer: ParsedAnswer) -> RealInterval:
    end = _end(answer)
    if end.infinite:
        raise _NotASetError
    return RealInterval(end, True, end, True)


def _end(answer: ParsedAnswer) -> End:
    if not isinstance(answer, Scalar) or answer.unit:
        raise _NotASetError
    text = answer.text.replace(" ", "")
    if text in (r"\infty", r"+\infty"):
        return HIGHEST
    if text == r"-\infty":
        return LOWEST
    end = End(answer)
    _value(end)
    return end


def _value(end: End) -> Fraction:
    """The number at a finite end, to all digits that are computed."""
    plain = plain_value(end.answer.text)
    if plain is not None:
        return plain
    from delta_cli.rewards.math.equivalence import names
    from delta_cli.rewards.math.evaluation import as_rational, number, to_fraction

    tree = parse(end.answer.text)
    if names(tree) or any(node.op == "apply" for node in tree.walk()):
        raise _NotASetError
    try:
        value = number(tree)
    except NoValueError:
        raise _NotASetError from None
    exact = as_rational(value) or to_fraction(value)
    if exact is None:
        raise _NotASetError
    return exact


def _compare(first: End, second: End) -> int:
    if first.infinite or second.infinite:
        return first.infinite - second.infinite
    spend(20)
    a, b = _value(first), _value(second)
    if abs(a - b) <= Fraction(1, 10**35) * max(abs(a), abs(b)):
        return 0
    return 1 if a > b else -1


def _union(pieces: tuple[RealInterval, ...]) -> tuple[RealInterval, ...]:
    """The same numbers in sorted pieces that do not meet."""

    def by_low(a: RealInterval, b: RealInterval) -> int:
        return _compare(a.low, b.low) or b.low_closed - a.low_closed

    joined: list[RealInterval] = []
    for piece in sorted(pieces, key=cmp_to_key(by_low)):
        last = joined[-1] if joined else None
        gap = _compare(piece.low, last.high) if last else 1
        if last is None or gap > 0 or (gap == 0 and not piece.low_closed and not last.high_closed):
            joined.append(piece)
            continue
        order = _compare(piece.high, last.high)
        end = piece if order > 0 or (order == 0 and piece.high_closed) else last
        joined[-1] = RealInterval(last.low, last.low_closed, end.high, end.high_closed)
    return tuple(joined)


def _complement(pieces: tuple[RealInterval, ...]) -> tuple[RealInterval, ...]:
    rest: list[RealInterval] = []
    low, closed = LOWEST, False
    for piece in pieces:
        if _compare(low, piece.low) < 0 or (_compare(low, piece.low) == 0 and closed and not piece.low_closed):
            rest.append(RealInterval(low, closed, piece.low, not piece.low_closed and not piece.low.infinite))
        low, closed = piece.high, not piece.high_closed and not piece.high.infinite
    if low.infinite != 1:
        rest.append(RealInterval(low, closed, HIGHEST, False))
    return tuple(rest)


def _intersection(first: tuple[RealInterval, ...], second: tuple[RealInterval, ...]) -> tuple[RealInterval, ...]:
    return _complement(_union(_complement(first) + _complement(second)))
