r"""Verifier for mathematics: is the answer in the last box of a response the gold answer?

``boxed`` finds the box, ``latex`` gives it one spelling, ``answer`` takes it apart. Plain numbers are compared
as fractions, sets of numbers by ``intervals``; everything else is read by ``expression`` and compared by
``equivalence``. Accepting a wrong answer teaches a model to give it, so every doubt is resolved against the
response. docs/verifier.md says what is accepted and why.
"""

from __future__ import annotations

import re
from functools import lru_cache

from delta_cli.rewards.math.answer import (
    LISTS,
    UNORDERED,
    Collection,
    ParsedAnswer,
    Relation,
    Scalar,
    Words,
    as_tuple,
    read,
)
from delta_cli.rewards.math.boxed import last_box
from delta_cli.rewards.math.budget import budget
from delta_cli.rewards.math.errors import NoValueError, UnreadableError
from delta_cli.rewards.math.expression import Expression, parse
from delta_cli.rewards.math.intervals import FLIPPED, End, RealSet, is_set, range_of, real_set
from delta_cli.rewards.math.labels import bare, is_label
from delta_cli.rewards.math.latex import canonical, normalise
from delta_cli.rewards.math.literals import MAX_QUESTION, decimal_value, is_plain, rounds_to, same_literal, same_number
from delta_cli.rewards.math.units import counted, italic_unit, same_unit

MAX_ITEMS = 40  # of a list or set
APPROXIMATE = r"\approx"
MULTIPLE = ("=", "<", ">", r"\le", r"\ge", r"\ne")  # they also hold after both sides are multiplied
SHORT_WORDS = frozenset("yes no odd even true false none all".split())  # noqa: SIM905
NAMES_OF_TUPLES = ("xyz", "abc", "pqr", "mn", "uv", "rs")  # in the order of a tuple


def math_reward(response: str, gold: str, question: str = "") -> float:
    r"""1.0 if the last ``\boxed{}`` of ``response`` holds ``gold``, else 0.0.

    ``gold`` is LaTeX or plain text, boxed or not. An answer may count the things that ``question`` names, as in
    ``18 eggs``. Never raises, and takes less than a second of processor time whatever the response.
    """
    verdict = quick_verdict(response, gold, question)
    if verdict is None:
        verdict = same_answer(_unboxed(gold), last_box(response) or "", question)
    return float(verdict)


def quick_verdict(response: str, gold: str, question: str = "") -> bool | None:
    """The verdict if it takes microseconds: no box, the same text, or two plain numbers; else None."""
    answer = normalise(last_box(response) or "")
    truth = _normalised(_unboxed(gold))
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
    if canonical(truth) == canonical(given):
        return True
    if question:
        question = question[:MAX_QUESTION]
        truth, given = counted(truth, question), counted(given, question)
    try:
        with budget():
            return _same(_alone(read(truth)), _alone(read(given)))
    except (UnreadableError, RecursionError):
        return False


def warm_up() -> None:
    """Import mpmath before the first answer."""
    same_answer(r"\frac{x}{2}", r"\frac{2x}{4}")


def _unboxed(gold: str) -> str:
    return last_box(gold) or gold


_normalised = lru_cache(maxsize=4096)(normalise)  # the responses of a group share one gold answer


def _same(gold: ParsedAnswer, given: ParsedAnswer) -> bool:
    if isinstance(gold, Words) or isinstance(given, Words):
        return isinstance(gold, Words) and isinstance(given, Words) and _same_words(gold.text, given.text)
    if is_set(gold) or is_set(given):
        verdict = _same_sets(gold, given)
        if verdict is not None:
            return verdict
    if isinstance(gold, Relation):
        return _same_relation(gold, given) if isinstance(given, Relation) else _says_gold(gold, given)
    if isinstance(gold, Collection):
        return _same_as_collection(gold, given)
    if isinstance(given, Relation):
        return _says_value(given, gold)
    if _is_tuple(given):
        vector = as_tuple(gold)
        return _is_tuple(vector) and _same(vector, given)
    return isinstance(given, Scalar) and _same_scalar(gold, given)


def _alone(answer: ParsedAnswer) -> ParsedAnswer:
    """The item of a set with one item, unless that is a set itself."""
    if isinstance(answer, Collection) and answer.kind in UNORDERED and len(answer.items) == 1:
        item = answer.items[0]
        is_a_set = isinstance(item, Collection) and item.kind != "()"
        return answer if is_a_set or item == Scalar(r"\emptyset") else item
    return answer


def _same_words(gold: str, given: str) -> bool:
    """Words in any case; but of short ones and of mixed case, as in ``CO`` and ``Co``, letter by letter."""
    if gold == given or gold.casefold() != given.casefold():
        return gold == given
    usual = all(word in (word.lower(), word.upper(), word.title(), word.capitalize()) for word in (gold, given))
    return gold.casefold() in SHORT_WORDS or (usual and len(gold) > (3 if gold.isupper() or given.isupper() else 2))


# ------------------------------------------------------------------------------------ lists, tuples and sets


def _same_sets(gold: ParsedAnswer, given: ParsedAnswer) -> bool | None:
    """Whether two sets of real numbers are equal; None if one of the answers cannot be read as such a set."""
    if not (is_set(gold, lists=not _is_list(gold)) and is_set(given, lists=is_set(gold))) and not (
        is_set(given) and is_set(gold, lists=not _is_list(gold))
    ):
        return None
    first, second = real_set(gold), real_set(given)
    if first is None or second is None:
        return None
    return _equal_sets(first, second)


def _is_list(answer: ParsedAnswer) -> bool:
    return isinstance(answer, Collection) and answer.kind in LISTS


def _equal_sets(gold: RealSet, given: RealSet) -> bool:
    if len(gold.pieces) != len(given.pieces) or (gold.name and given.name and gold.name != given.name):
        return False
    return all(
        (a.low_closed, a.high_closed) == (b.low_closed, b.high_closed)
        and _same_end(a.low, b.low)
        and _same_end(a.high, b.high)
        for a, b in zip(gold.pieces, given.pieces, strict=True)
    )


def _same_end(gold: End, given: End) -> bool:
    if gold.infinite or given.infinite:
        return gold.infinite == given.infinite
    return _same_scalar(gold.answer, given.answer)


def _same_as_collection(gold: Collection, given: ParsedAnswer) -> bool:
    if isinstance(given, Scalar):
        named_point = re.fullmatch(r"[A-Z]\s*(\(.+\))", given.text)
        if gold.kind == "()" and named_point:  # A(1,2)
            return _same(gold, read(named_point[1]))
        vector = as_tuple(given)
        return gold.kind == "()" and isinstance(vector, Collection) and _same_collection(gold, vector)
    if isinstance(given, Relation):
        return _says_value(given, gold)
    if not isinstance(given, Collection):
        return False
    if gold.kind == "()" and given.kind in LISTS:
        values = _ordered_values(given)
        return values is not None and _same_collection(gold, values)
    if gold.kind in LISTS and given.kind == "()":
        values = _ordered_values(gold)
        return values is not None and _same_collection(values, given)
    return _same_collection(gold, given)


def _ordered_values(given: Collection) -> Collection | None:
    """The tuple that ``x=1, y=2`` gives, by the usual order of its names; None for other lists."""
    values: dict[str, ParsedAnswer] = {}
    for item in given.items:
        if not isinstance(item, Relation) or item.signs != ("=",) or not re.fullmatch("[a-z]", item.sides[0]):
            return None
        values[item.sides[0]] = read(item.sides[1])
    names = "".join(sorted(values))
    usual = any(names == each[: len(names)] for each in NAMES_OF_TUPLES)
    if not usual or len(values) != len(given.items) or len(values) < 2:
        return None
    return Collection("()", tuple(values[name] for name in names))


def _same_collection(gold: Collection, given: Collection) -> bool:
    """Lists and sets in any order, repetitions counted; tuples, intervals and named values in theirs."""
    if len(gold.items) != len(given.items) or len(gold.items) > MAX_ITEMS:
        return False
    if gold.kind not in UNORDERED:
        return gold.kind == given.kind and all(map(_same, gold.items, given.items))
    if given.kind not in UNORDERED or (gold.kind == "∪") != (given.kind == "∪"):
        return False
    given = _renamed(gold, given)
    named = _has_names(gold)
    if named != _has_names(given, indices=named):
        return all(map(_same, gold.items, given.items))
    left = list(given.items)
    for item in gold.items:
        match = item if item in left else next((other for other in left if _same(item, other)), None)
        if match is None:
            return False
        left.remove(match)
    return True


def _has_names(collection: Collection, indices: bool = True) -> bool:
    """Whether the items name different things, as ``a = 1, b = 2``; ``x_1 = 1, x_2 = 2`` only if ``indices`` count."""
    names = {
        bare(item.sides[0]) if indices else bare(item.sides[0]).partition("_")[0]
        for item in collection.items
        if isinstance(item, Relation) and is_label(item.sides[0]) and item.signs[0] != r"\in"
    }
    return len(names) > 1


def _renamed(gold: Collection, given: Collection) -> Collection:
    r"""``given`` with the letter that the gold answer uses for a whole number: ``n\pi, n\in…`` becomes ``k\pi, …``."""
    bound = [
        [item.sides for item in each.items if isinstance(item, Relation) and item.signs == (r"\in",)]
        for each in (gold, given)
    ]
    if any(len(each) != 1 for each in bound):
        return given
    (old, values), (new, same_values) = bound[1][0], bound[0][0]
    letters = re.compile(r"(?<![A-Za-z\\])([a-z])(?![A-Za-z])")
    if old == new or values != same_values or not (letters.fullmatch(old) and letters.fullmatch(new)):
        return given

    def rename(text: str) -> str:
        if re.search(rf"(?<![A-Za-z\\]){new}(?![A-Za-z])", text):
            raise UnreadableError("the letter has another meaning in the answer")
        return re.sub(rf"(?<![A-Za-z\\]){old}(?![A-Za-z])|(?<=[A-Za-z]){old}(?=\\|$)", new, text)

    items: list[ParsedAnswer] = []
    for item in given.items:
        if isinstance(item, Scalar):
            items.append(Scalar(rename(item.text), item.unit))
        elif isinstance(item, Relation):
            items.append(Relation(tuple(map(rename, item.sides)), item.signs))
        else:
            items.append(item)
    return Collection(given.kind, tuple(items))


# ------------------------------------------------------------------------------------ equations, inequalities


def _says_gold(gold: Relation, given: ParsedAnswer) -> bool:
    r"""Whether ``given`` is the value in ``x = 5`` or ``10/3 \approx 3.33``, or the interval of ``x > a``.

    Each side of ≈ is an answer to it. The sides of = all have the same value.
    """
    if set(gold.signs) <= {"=", APPROXIMATE}:
        named = _named_tuple(gold)
        if named is not None and isinstance(given, Collection) and given.kind in LISTS:
            return _same(named, given)
        return any(side and all(_same(read(each), given) for each in side) for side in _sides(gold, given))
    range_ = range_of(gold)
    return range_ is not None and _same(range_[1], given)


def _says_value(given: Relation, gold: ParsedAnswer) -> bool:
    r"""Whether ``x = 5``, ``5 = x``, ``10/2 = 5`` or ``10/3 \approx 3.33`` gives ``gold`` as the answer.

    The last side must be finished, and the sides before it must be equal to it.
    """
    if set(given.signs) <= {"=", APPROXIMATE}:
        named = _named_tuple(given)
        if named is not None and isinstance(gold, Collection) and gold.kind in LISTS:
            return _same(gold, named)
        if named is None and _is_tuple(gold) and _in_other_order(given.sides[0]):
            return False  # (y, x) = (1, 2)
        sides = [side for side in _sides(given, gold) if side]
        if not sides or not all(_equal(side) for side in sides):
            return False
        ends = [side[-1] for side in sides]
        if not all(_is_rounded(ends[0], end) for end in ends[1:]):
            return False
        return any(_same(gold, _alone(read(end))) for end in ends)
    range_ = range_of(given)
    return range_ is not None and _same(gold, _alone(range_[1]))


def _is_tuple(answer: ParsedAnswer) -> bool:
    return isinstance(answer, Collection) and answer.kind == "()"


def _in_other_order(side: str) -> bool:
    """Whether a side is a tuple of letters that are not in alphabetical order."""
    letters = re.findall("[a-z]", side)
    return re.fullmatch(r"\(\s*[a-z](?:\s*[,;]\s*[a-z])+\s*\)", side) is not None and letters != sorted(set(letters))


def _named_tuple(relation: Relation) -> Collection | None:
    """``(a, b) = (1, 2)`` as ``a = 1, b = 2``; None for other relations, and for names in an unusual order."""
    if relation.signs != ("=",) or not all(side.startswith("(") for side in relation.sides):
        return None
    names = re.fullmatch(r"\(\s*([a-z])((?:\s*[,;]\s*[a-z])+)\s*\)", relation.sides[0])
    values = read(relation.sides[1])
    if names is None or not isinstance(values, Collection) or values.kind != "()":
        return None
    letters = [names[1], *re.findall("[a-z]", names[2])]
    if (
        len(letters) != len(values.items)
        or letters != sorted(set(letters))
        or not all(isinstance(value, Scalar) and not value.unit for value in values.items)
    ):
        return None
    texts = [value.text for value in values.items if isinstance(value, Scalar)]
    return Collection(",", tuple(Relation((name, text), ("=",)) for name, text in zip(letters, texts, strict=True)))


def _sides(relation: Relation, value: ParsedAnswer) -> list[list[str]]:
    """The sides that are more than labels, cut at ≈. Without a label, only a scalar can be meant."""
    parts: list[list[str]] = [[]]
    for side, sign in zip(relation.sides, ("", *relation.signs), strict=True):
        if sign == APPROXIMATE:
            parts.append([])
        if not is_label(side):
            parts[-1].append(side)
    nameless = sum(map(len, parts)) == len(relation.sides)
    return [] if nameless and not isinstance(value, Scalar) else parts


def _equal(sides: list[str]) -> bool:
    """Whether all sides of a chain of equations have the value of the last one, finished or not."""
    last = read(sides[-1])
    for side in dict.fromkeys(sides[:-1]):
        first = read(side)
        if isinstance(first, Scalar) and isinstance(last, Scalar):
            if not (first.text == last.text or same_expression(first.text, last.text, finished=False)):
                return False
        elif not _same(first, last):
            return False
    return True


def _is_rounded(exact: str, rounded: str) -> bool:
    """Whether ``rounded`` is ``exact`` to the digits that it shows, at least two of them."""
    from delta_cli.rewards.math.evaluation import number, to_fraction

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


def _same_relation(gold: Relation, given: Relation) -> bool:
    """Named values by name and value; others side by side, either way round, or one a multiple of the other."""
    first, second = range_of(gold), range_of(given)
    if first and second:
        return bare(first[0]) == bare(second[0]) and _same(first[1], second[1])
    if _is_solved(gold) and not _is_solved(given):
        return False
    named = [set(each.signs) <= {"=", APPROXIMATE} and is_label(each.sides[0]) for each in (gold, given)]
    if all(named):
        values = Relation(gold.sides[1:], gold.signs[1:]), Relation(given.sides[1:], given.signs[1:])
        return bare(gold.sides[0]) == bare(given.sides[0]) and _same(*map(_unnamed, values))
    if set(given.signs) <= {"=", APPROXIMATE} and set(gold.signs) <= {"=", APPROXIMATE} and APPROXIMATE in gold.signs:
        return _equation(gold, given) or _any_side(gold, given)
    return _equation(gold, given)


def _is_solved(relation: Relation) -> bool:
    """Whether a relation says what a letter is, as ``x = 5`` and ``x > 2`` do, and ``2x = 10`` and ``y = x`` do not."""
    labels = [is_label(side) for side in relation.sides]
    return any(labels) and all(
        label or not re.search(r"(?<![A-Za-z\\])[a-z](?![A-Za-z])(?<![ei])", side)
        for label, side in zip(labels, relation.sides, strict=True)
    )


def _unnamed(relation: Relation) -> ParsedAnswer:
    """What is left of an equation without the label on its left."""
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


def _multiples(gold: tuple[str, ...], given: tuple[str, ...], positive: bool) -> bool:
    """Whether the difference of the sides is the same up to a constant factor."""
    from delta_cli.rewards.math.equivalence import same_ratio
    from delta_cli.rewards.math.reading import read_alike
    from delta_cli.rewards.math.unsimplified import is_finished

    first, second = read_alike(
        Expression("+", tuple(parse(side) for side in gold)), Expression("+", tuple(parse(side) for side in given))
    )
    if not all(is_finished(side, first) for side in second.parts):
        return False
    (a, b), (c, d) = first.parts, second.parts
    return same_ratio((a, b), (c, d), positive)


# ------------------------------------------------------------------------------------------------- one value


def _same_scalar(gold: Scalar, given: Scalar) -> bool:
    if gold.unit and not given.unit:
        text, unit = italic_unit(given.text)
        given = Scalar(text, unit) if unit == gold.unit else given
    elif given.unit and not gold.unit:
        text, unit = italic_unit(gold.text)
        gold = Scalar(text, unit) if unit == given.unit else gold
    if not same_unit(gold.unit, given.unit, is_plain(given.text)):
        return False
    if gold.text == given.text or canonical(gold.text) == canonical(given.text):
        return True
    if gold.unit.startswith("base"):
        return False
    literal = same_literal(gold.text, given.text)
    return same_expression(gold.text, given.text) if literal is None else literal


def same_expression(gold: str, given: str, finished: bool = True) -> bool:
    """Whether two expressions have the same values, and, if ``finished``, ``given`` leaves no more undone."""
    from delta_cli.rewards.math.equivalence import names, same_values
    from delta_cli.rewards.math.evaluation import endless, number  # mpmath: not for plain numbers
    from delta_cli.rewards.math.reading import read_alike
    from delta_cli.rewards.math.unsimplified import is_finished

    first, second = read_alike(parse(gold), parse(given))
    if finished and not is_finished(second, first):
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
