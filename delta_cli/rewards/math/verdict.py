r"""Is the answer in the last box of a response the gold answer?

The box is found by ``boxed``, spelled by ``latex``, taken apart by ``answer``; plain numbers are
compared as fractions, everything else is read by ``expression`` and compared by ``values``.
Accepting a wrong answer teaches a model to give it, so every doubt is resolved against the
response. What is accepted, and why, is written in docs/verifier.md.
"""

from __future__ import annotations

import re
from functools import lru_cache

from delta_cli.rewards.math.answer import UNORDERED, Collection, ParsedAnswer, Relation, Scalar, Words, is_name, read
from delta_cli.rewards.math.boxed import last_box
from delta_cli.rewards.math.expression import UnreadableError, parse
from delta_cli.rewards.math.latex import normalise
from delta_cli.rewards.math.literals import decimal_value, is_plain, rounds_to, same_literal, same_number
from delta_cli.rewards.math.units import counted, same_unit

MAX_ITEMS = 40  # of a list or set
MAX_QUESTION = 20_000  # characters of a question that are looked at
FLIPPED = {"<": ">", ">": "<", r"\le": r"\ge", r"\ge": r"\le"}
APPROXIMATE = r"\approx"
MULTIPLE = ("=", "<", ">", r"\le", r"\ge", r"\ne")  # they hold as well when both sides are multiplied


def math_reward(response: str, gold: str, question: str = "") -> float:
    r"""1.0 when the last ``\boxed{}`` of ``response`` holds ``gold``, else 0.0.

    ``gold`` is LaTeX or plain text, in a box or not. The words of the ``question`` are what an
    answer may count, as in ``18 eggs``. Takes less than a second whatever the response.
    """
    quick = quick_verdict(response, gold, question)
    if quick is None:
        quick = same_answer(_gold(gold), last_box(response) or "", question)
    return float(quick)


def quick_verdict(response: str, gold: str, question: str = "") -> bool | None:
    """The verdict where it takes microseconds: no box, the same text, or two plain numbers; else None."""
    answer = normalise(last_box(response) or "")
    truth = _normalised(_gold(gold))
    if answer is None or truth is None:
        return False
    return True if answer == truth else same_number(truth, answer, question)


def same_answer(gold: str, answer: str, question: str = "") -> bool:
    """Whether two answers, out of their boxes, are the same."""
    truth, given = _normalised(gold), normalise(answer)
    if truth is None or given is None:
        return False
    if truth == given:
        return True
    plain = same_number(truth, given, question)
    if plain is not None:
        return plain
    if question:
        question = question[:MAX_QUESTION]
        truth, given = counted(truth, question), counted(given, question)
    try:
        return _same(read(truth), read(given))
    except UnreadableError:
        return False


def warm_up() -> None:
    """Import mpmath ahead of the first answer."""
    same_answer(r"\frac{x}{2}", r"\frac{2x}{4}")


def _gold(gold: str) -> str:
    return last_box(gold) or gold


_normalised = lru_cache(maxsize=4096)(normalise)  # the responses of a group share one gold answer


def _same(gold: ParsedAnswer, given: ParsedAnswer) -> bool:
    gold, given = _alone(gold), _alone(given)
    if isinstance(gold, Words) or isinstance(given, Words):
        return gold == given
    if isinstance(gold, Relation) and isinstance(given, Relation):
        return _same_relation(gold, given)
    if isinstance(gold, Relation):
        return _same_value(gold, given)
    if isinstance(given, Relation):
        return _says_value(given, gold)
    if isinstance(gold, Collection) and isinstance(given, Collection):
        return _same_group(gold, given)
    if isinstance(gold, Scalar) and isinstance(given, Scalar):
        return _same_scalar(gold, given)
    return False


def _alone(answer: ParsedAnswer) -> ParsedAnswer:
    """The member of a set that has one."""
    if isinstance(answer, Collection) and answer.kind in UNORDERED and len(answer.items) == 1:
        return answer.items[0]
    return answer


def _same_group(gold: Collection, given: Collection) -> bool:
    """Lists and sets in any order, with repetitions counted; pairs, intervals and named values in theirs."""
    if len(gold.items) != len(given.items) or len(gold.items) > MAX_ITEMS:
        return False
    if gold.kind not in UNORDERED:
        return gold.kind == given.kind and all(map(_same, gold.items, given.items))
    if given.kind not in UNORDERED or (gold.kind == "∪") != (given.kind == "∪"):
        return False
    if _has_names(gold) != _has_names(given):
        return all(map(_same, gold.items, given.items))
    left = list(given.items)
    for item in gold.items:
        match = next((other for other in left if _same(item, other)), None)
        if match is None:
            return False
        left.remove(match)
    return True


def _has_names(group: Collection) -> bool:
    """Whether the items say what they are, as in ``a = 1, b = 2``; ``x = 1, x = 2`` does not."""
    named = [_bare(item.sides[0]) for item in group.items if isinstance(item, Relation) and is_name(item.sides[0])]
    return len(set(named)) > 1


def _same_value(gold: Relation, given: ParsedAnswer) -> bool:
    """Whether ``x = 5`` or ``10/3 \\approx 3.33`` has ``given`` for an answer, or ``x > 2`` is that interval.

    Each side of ≈ is an answer to it; the sides of = are all the same one.
    """
    if set(gold.signs) <= {"=", APPROXIMATE}:
        return any(side and all(_same(read(each), given) for each in side) for side in _sides(gold, given))
    range_ = _range(gold)
    return range_ is not None and _same(range_[1], given)


def _says_value(given: Relation, gold: ParsedAnswer) -> bool:
    """Whether ``x = 5``, ``5 = x``, ``10/2 = 5`` or ``10/3 \\approx 3.33`` gives ``gold`` for the answer.

    The last side has to be finished, those before it have to be true.
    """
    if set(given.signs) <= {"=", APPROXIMATE}:
        sides = [side for side in _sides(given, gold) if side]
        if not sides or not all(_equal(side) for side in sides):
            return False
        ends = [side[-1] for side in sides]
        if not all(_is_rounded(ends[0], end) for end in ends[1:]):
            return False
        return any(_same(gold, read(end)) for end in ends)
    range_ = _range(given)
    return range_ is not None and _same(gold, range_[1])


def _sides(relation: Relation, value: ParsedAnswer) -> list[list[str]]:
    """The sides that are not only names, cut at ≈. Without a name, only a scalar can be meant."""
    parts: list[list[str]] = [[]]
    for side, sign in zip(relation.sides, ("", *relation.signs), strict=True):
        if sign == APPROXIMATE:
            parts.append([])
        if not is_name(side):
            parts[-1].append(side)
    nameless = sum(map(len, parts)) == len(relation.sides)
    return [] if nameless and not isinstance(value, Scalar) else parts


def _equal(sides: list[str]) -> bool:
    """Whether the sides of a chain of equations all have the value of the last, whatever is left to be done."""
    last = read(sides[-1])
    for side in map(read, sides[:-1]):
        if isinstance(side, Scalar) and isinstance(last, Scalar):
            if not (side.text == last.text or same_expression(side.text, last.text, finished=False)):
                return False
        elif not _same(side, last):
            return False
    return True


def _is_rounded(exact: str, rounded: str) -> bool:
    """Whether a number is rounded to the digits that the other shows, at least two."""
    from delta_cli.rewards.math.equivalence import NoValueError, number, to_fraction

    first, second = read(exact), read(rounded)
    if not (isinstance(first, Scalar) and isinstance(second, Scalar) and first.unit == second.unit):
        return False
    shown = decimal_value(second.text)
    try:
        value = to_fraction(number(parse(first.text)))
    except (NoValueError, KeyError):
        return False
    places = len(second.text.partition(".")[2])
    digits = len(re.sub(r"\D", "", second.text).lstrip("0"))
    return shown is not None and value is not None and digits >= 2 and abs(value - shown) * 10**places * 2 <= 1


def _range(relation: Relation) -> tuple[str, ParsedAnswer] | None:
    """The name and the set of ``x \\in A``, or the interval of ``x > a`` or ``a < x <= b``."""
    sides, signs = relation.sides, relation.signs
    if signs == (r"\in",):
        return (sides[0], read(sides[1])) if is_name(sides[0]) else None
    if not set(signs) <= set(FLIPPED) or len({sign in (">", r"\ge") for sign in signs}) != 1:
        return None
    if signs[0] in (">", r"\ge"):
        sides, signs = sides[::-1], tuple(FLIPPED[sign] for sign in reversed(signs))
    name = [re.fullmatch(r"[A-Za-z](?:\([a-z]\))?", side) is not None for side in sides]
    if name == [False, True, False]:
        brackets = ("[" if signs[0] == r"\le" else "(") + ("]" if signs[1] == r"\le" else ")")
        return sides[1], Collection(brackets, (read(sides[0]), read(sides[2])))
    if name == [False, True]:
        return sides[1], Collection("[)" if signs[0] == r"\le" else "()", (read(sides[0]), Scalar(r"\infty")))
    if name == [True, False]:
        return sides[0], Collection("(]" if signs[0] == r"\le" else "()", (Scalar(r"-\infty"), read(sides[1])))
    return None


def _same_relation(gold: Relation, given: Relation) -> bool:
    """Named values by name and value; else side by side, either way round, or one a multiple of the other."""
    first, second = _range(gold), _range(given)
    if first and second:
        return _bare(first[0]) == _bare(second[0]) and _same(first[1], second[1])
    named = [set(each.signs) <= {"=", APPROXIMATE} and is_name(each.sides[0]) for each in (gold, given)]
    if all(named):
        values = Relation(gold.sides[1:], gold.signs[1:]), Relation(given.sides[1:], given.signs[1:])
        return _bare(gold.sides[0]) == _bare(given.sides[0]) and _same(*map(_unnamed, values))
    if set(given.signs) <= {"=", APPROXIMATE} and set(gold.signs) <= {"=", APPROXIMATE} and APPROXIMATE in gold.signs:
        return _equation(gold, given) or _any_side(gold, given)
    return _equation(gold, given)


def _unnamed(relation: Relation) -> ParsedAnswer:
    """What is left of an equation without the name on its left."""
    return relation if relation.signs else read(relation.sides[0])


def _any_side(gold: Relation, given: Relation) -> bool:
    """Whether a true equation ends in one of the sides of a ≈ b."""
    return any(len(side) == 1 and _says_value(given, read(side[0])) for side in _sides(gold, Scalar("")))


def _equation(gold: Relation, given: Relation) -> bool:
    ways = [(given.sides, given.signs), (given.sides[::-1], tuple(FLIPPED.get(s, s) for s in reversed(given.signs)))]
    for sides, signs in ways:
        if signs != gold.signs:
            continue
        if all(_same(read(a), read(b)) for a, b in zip(gold.sides, sides, strict=True)):
            return True
        if len(signs) == 1 and signs[0] in MULTIPLE and _multiples(gold.sides, sides, signs[0] not in ("=", r"\ne")):
            return True
    return False


def _bare(name: str) -> str:
    return re.sub(r"\\text|\\frac|[{}/\s]", "", name)


def _multiples(gold: tuple[str, ...], given: tuple[str, ...], positive: bool) -> bool:
    """Whether the difference of the sides is the same up to a constant factor."""
    from delta_cli.rewards.math.equivalence import same_ratio
    from delta_cli.rewards.math.unsimplified import undone

    try:
        first, second, third, fourth = (parse(side) for side in (*gold, *given))
    except UnreadableError:
        return False
    if undone(third) | undone(fourth) > undone(first) | undone(second):
        return False
    return same_ratio((first, second), (third, fourth), positive)


def _same_scalar(gold: Scalar, given: Scalar) -> bool:
    if not same_unit(gold.unit, given.unit, is_plain(given.text)):
        return False
    if gold.text == given.text:
        return True
    literal = same_literal(gold.text, given.text)
    return same_expression(gold.text, given.text) if literal is None else literal


def same_expression(gold: str, given: str, finished: bool = True) -> bool:
    """Whether two expressions have the same values, and ``given`` leaves no more to be done than ``gold``."""
    from delta_cli.rewards.math.equivalence import NoValueError, endless, names, number, same_values
    from delta_cli.rewards.math.unsimplified import undone  # mpmath: not for plain numbers

    first, second = parse(gold), parse(given)
    if finished and not undone(second) <= undone(first):
        return False
    for tree, text, other in ((first, given, gold), (second, gold, given)):
        rounded = decimal_value(text)
        if rounded is None or names(tree) or decimal_value(other) is not None:
            continue
        try:
            exact = endless(number(tree))
        except NoValueError:
            return False
        return exact is not None and (exact == rounded or rounds_to(exact, text, rounded))
    return same_values(first, second)
