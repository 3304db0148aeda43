r"""Is the answer in the last box of a response the gold answer?

The box is found by ``boxed``, spelled by ``latex``, taken apart by ``answer``; plain numbers are
compared as fractions, everything else by math-verify on sympy, beside a numerical check of our
own. Accepting a wrong answer teaches a model to give it, so every doubt is
resolved against the response.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any

from delta_cli.rewards.answer import UNORDERED, Answer, Group, Relation, Scalar, Words, is_name, read
from delta_cli.rewards.boxed import last_box
from delta_cli.rewards.latex import normalise
from delta_cli.rewards.quantity import same_literal, same_unit

MAX_ITEMS = 64  # of a list or set
# What math-verify's parser passes over in silence; two answers that have it must be the same text.
UNREAD = re.compile(r"""['"$@&]|\\[lcdv]?dots|\\prime|\\ddot|\^\s*\{?\s*(?:T|\\top|\*|\\dagger)|\d\s*_|\\to(?![a-z])""")
# What an answer may leave to be worked out only where the gold answer does; each can take forever.
UNFINISHED = re.compile(r"\\(?:i*int|oint|sum|prod|lim)(?![a-z])|\^\s*\{[^{}]*\^\s*\{[^{}]*\^")
# Arithmetic between numbers that is left to be done.
WORKING = re.compile(r"\d[\s)}]*(?:[-+*/^(]|\\(?:times|cdot|div)(?![a-z]))")
FLIPPED = {"<": ">", ">": "<", r"\le": r"\ge", r"\ge": r"\le"}


def math_reward(response: str, gold: str) -> float:
    r"""1.0 when the last ``\boxed{}`` of ``response`` holds ``gold``, else 0.0.

    ``gold`` is LaTeX or plain text, in a box or not. There is no time limit here: an answer may be
    an expression that takes forever. ``Grader`` runs this where it can be killed.
    """
    quick = quick_verdict(response, gold)
    if quick is None:
        quick = same_answer(_gold(gold), last_box(response) or "")
    return float(quick)


def quick_verdict(response: str, gold: str) -> bool | None:
    """The verdict where it takes microseconds: no box, the same text, or two plain numbers; else None."""
    answer = normalise(last_box(response) or "")
    truth = _normalised(_gold(gold))
    if answer is None or truth is None:
        return False
    return True if answer == truth else same_literal(truth, answer)


def same_answer(gold: str, answer: str) -> bool:
    """Whether two answers, out of their boxes, are the same."""
    truth, given = _normalised(gold), normalise(answer)
    if truth is None or given is None:
        return False
    if truth == given:
        return True
    try:
        return _same(read(truth), read(given))
    except MemoryError:
        raise
    except Exception:  # sympy raises a hundred things on expressions without meaning: none of them is a right answer
        return False


def warm_up() -> None:
    """Import sympy and math-verify, and let them build their tables, ahead of the first answer."""
    same_answer(r"\frac{x}{2}", r"\frac{2x}{4}")


def _gold(gold: str) -> str:
    return last_box(gold) or gold


_normalised = lru_cache(maxsize=4096)(normalise)  # the responses of a group share one gold answer


def _same(gold: Answer, given: Answer) -> bool:
    gold, given = _alone(gold), _alone(given)
    if isinstance(gold, Words) or isinstance(given, Words):
        return gold == given
    if isinstance(gold, Relation) and isinstance(given, Relation):
        return _same_relation(gold, given)
    if isinstance(gold, Relation):
        return _same_value(gold, given, _same)
    if isinstance(given, Relation):
        return _same_value(given, gold, lambda side, truth: _same(truth, side))
    if isinstance(gold, Group) and isinstance(given, Group):
        return _same_group(gold, given)
    if isinstance(gold, Scalar) and isinstance(given, Scalar):
        return _same_scalar(gold, given)
    return False


def _alone(answer: Answer) -> Answer:
    """The member of a set that has one."""
    if isinstance(answer, Group) and answer.kind in UNORDERED and len(answer.items) == 1:
        return answer.items[0]
    return answer


def _same_group(gold: Group, given: Group) -> bool:
    """Lists and sets in any order, with repetitions counted; pairs and intervals in theirs."""
    if len(gold.items) != len(given.items) or len(gold.items) > MAX_ITEMS:
        return False
    if gold.kind not in UNORDERED:
        return gold.kind == given.kind and all(map(_same, gold.items, given.items))
    if given.kind not in UNORDERED or (gold.kind == "∪") != (given.kind == "∪"):
        return False
    left = list(given.items)
    for item in gold.items:
        match = next((other for other in left if _same(item, other)), None)
        if match is None:
            return False
        left.remove(match)
    return True


def _same_value(relation: Relation, value: Answer, same: Callable[[Answer, Answer], bool]) -> bool:
    """Whether ``x = 5``, ``5 = x`` or ``10/2 = 5`` says ``value``, or ``x > 2`` says the interval."""
    if set(relation.signs) == {"="}:
        sides = [side for side in relation.sides if not is_name(side)]
        if len(sides) == len(relation.sides) and not isinstance(value, Scalar):
            return False
        return bool(sides) and all(same(read(side), value) for side in sides)
    interval = _interval(relation)
    return interval is not None and same(interval, value)


def _interval(relation: Relation) -> Group | None:
    """The interval of ``x > a`` or ``a < x <= b``."""
    sides, signs = relation.sides, relation.signs
    if not set(signs) <= set(FLIPPED) or len({sign in (">", r"\ge") for sign in signs}) != 1:
        return None
    if signs[0] in (">", r"\ge"):
        sides, signs = sides[::-1], tuple(FLIPPED[sign] for sign in reversed(signs))
    name = [re.fullmatch("[A-Za-z]", side) is not None for side in sides]
    if name == [False, True, False]:
        brackets = ("[" if signs[0] == r"\le" else "(") + ("]" if signs[1] == r"\le" else ")")
        return Group(brackets, (read(sides[0]), read(sides[2])))
    if name == [False, True]:
        return Group("[)" if signs[0] == r"\le" else "()", (read(sides[0]), Scalar(r"\infty")))
    if name == [True, False]:
        return Group("(]" if signs[0] == r"\le" else "()", (Scalar(r"-\infty"), read(sides[1])))
    return None


def _same_relation(gold: Relation, given: Relation) -> bool:
    """Named values by name and value; else side by side, either way round, or one a multiple of the other."""
    if gold.signs == given.signs == ("=",) and is_name(gold.sides[0]) and is_name(given.sides[0]):
        return _bare(gold.sides[0]) == _bare(given.sides[0]) and _same(read(gold.sides[1]), read(given.sides[1]))
    ways = [(given.sides, given.signs), (given.sides[::-1], tuple(FLIPPED.get(s, s) for s in reversed(given.signs)))]
    for sides, signs in ways:
        if signs != gold.signs:
            continue
        if all(_same(read(a), read(b)) for a, b in zip(gold.sides, sides, strict=True)):
            return True
        if len(signs) == 1 and signs[0] in ("=", "<", ">", r"\le", r"\ge", r"\ne"):
            return _multiples(gold.sides, sides, positive=signs[0] not in ("=", r"\ne"))
    return False


def _bare(name: str) -> str:
    return re.sub(r"\\text|[{}\s]", "", name)


def _multiples(gold: tuple[str, ...], given: tuple[str, ...], positive: bool) -> bool:
    """Whether the difference of the sides is the same up to a constant factor."""
    import sympy

    expressions = [expression(side) for side in (*gold, *given)]
    if not all(isinstance(each, sympy.Expr) for each in expressions):
        return False
    first, second, third, fourth = expressions
    ratio = sympy.simplify((first - second) / (third - fourth))
    return bool(ratio.is_number and ratio.is_finite and ratio.is_nonzero and (ratio.is_positive or not positive))


def _same_scalar(gold: Scalar, given: Scalar) -> bool:
    if not same_unit(gold.unit, given.unit):
        return False
    if gold.text == given.text:
        return True
    literal = same_literal(gold.text, given.text)
    if literal is None and WORKING.search(given.text) and same_literal(gold.text, gold.text):
        return False  # 99+9 for 108 is the question again, not its answer
    return _verify(gold.text, given.text) if literal is None else literal


def _verify(gold: str, given: str) -> bool:
    """math-verify's verdict, and the agreement of the numbers."""
    from math_verify import verify

    from delta_cli.rewards.numeric import agree

    names = set(re.findall(r"\\[A-Za-z]+|[A-Za-z]", re.sub(r"\\(?:text|begin|end)\{[^{}]*\}", "", gold + given)))
    if any(name != other and name.lower() == other.lower() for name in names for other in names):
        return False  # math-verify takes X for x
    if any(UNREAD.search(re.sub(r"\\begin.*\\end", "", text)) for text in (gold, given)):
        return False
    if UNFINISHED.search(given) and not UNFINISHED.search(gold):
        return False
    first, second = expression(gold), expression(given)
    if first is None or second is None:
        return False
    return agree(first, second, gold, given) and bool(verify([first], [second], timeout_seconds=None))


@lru_cache(maxsize=512)
def expression(text: str) -> Any:
    """The sympy expression of some LaTeX as math-verify reads it, None where it cannot."""
    from math_verify import parse

    found = parse(
        f"${text}$",
        extraction_config=[_reading()],
        fallback_mode="no_fallback",
        parsing_timeout=None,  # it would use signal.alarm; the grader's processes are killed instead
    )
    return found[0] if found and not isinstance(found[0], str) else None


@cache
def _reading() -> Any:
    """How math-verify is to read: without dropping units, which it takes variables for."""
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig

    for name in ("math_verify.parser", "math_verify.grader"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # it warns that its time limit is off
    return LatexExtractionConfig(
        normalization_config=NormalizationConfig(
            basic_latex=True, units=False, malformed_operators=True, nits=False, boxed="none", equations=False
        )
    )
