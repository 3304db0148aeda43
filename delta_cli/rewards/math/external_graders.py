r"""Verifiers used by others, for reproducing published numbers. Both accept more than our own verifier.

``math-verify`` is that library's verdict on the whole response, as in the paper. It accepts an answer
without a box, ``\boxed 5``, an unclosed last box, and ``50\%`` for 50. ``public`` follows the published
description of the public training script: drop percent signs, then accept the last box if any one of
three checks accepts it.
"""

from __future__ import annotations

import logging
import re
from functools import cache
from typing import Any

from delta_cli.rewards.math.boxed import closed_boxes, last_box

_PLAIN = (  # spellings that the public rule removes or unifies
    (r"\\left|\\right|\\!|\\,|\\;|\\ |~|\s", ""),
    (r"\\[dt]frac", r"\\frac"),
    (r"\\text\{[^{}]*\}$", ""),
    (r"\\(?:text|mathrm|textbf|mathbf)\{([^{}]*)\}", r"\1"),
    (r"\^\{?\\circ\}?|\\\$|\$", ""),
    (r"(?<=\d),(?=\d{3}(?!\d))", ""),
    (r"^[A-Za-z]=", ""),
    (r"\\frac(\d)(\d)", r"\\frac{\1}{\2}"),
    (r"\.$", ""),
)

# sympy's parser executes its input, so it only gets numbers, single letters, roots and small powers.
_ARITHMETIC = re.compile(r"(?:\d+(?:\.\d+)?|pi|sqrt|(?<![a-z])[a-z](?![a-z])|[-+*/()])+")
_POWERS = re.compile(r"\*\*\(?[\d.*]{3,}|\*\*.*\*\*")


def math_verify_reward(response: str, gold: str) -> float:
    """1.0 if math-verify finds the gold answer in the response, else 0.0. Any expression counts, the last one first."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    _quiet()
    truth = parse(f"\\boxed{{{last_box(gold) or gold}}}", [LatexExtractionConfig()], parsing_timeout=None)
    given = parse(response, [ExprExtractionConfig(), LatexExtractionConfig()], parsing_timeout=None)
    return float(bool(truth and given and verify(truth, given, timeout_seconds=None)))


def public_reward(response: str, gold: str) -> float:
    """1.0 if one of the three checks accepts the last box, ignoring percent signs, else 0.0."""
    boxes, unfinished = closed_boxes(response)
    if unfinished or not boxes:
        return 0.0
    truth, given = (text.replace("\\%", "").replace("%", "") for text in (last_box(gold) or gold, boxes[-1].strip()))
    return float(_same_text(truth, given) or _same_symbols(truth, given) or _same_by_library(truth, given))


def _same_text(truth: str, given: str) -> bool:
    return plain(truth) == plain(given) != ""


def plain(text: str) -> str:
    """An answer without spacing, text commands and other decoration."""
    for pattern, replacement in _PLAIN:
        text = re.sub(pattern, replacement, text)
    return text


def _same_symbols(truth: str, given: str) -> bool:
    """Equal according to sympy. Tuples and intervals need the same brackets and are compared item by item."""
    first, second = (_members(plain(text)) for text in (truth, given))
    if first[0] != second[0] or len(first[1]) != len(second[1]):
        return False
    return all(_equal(a, b) for a, b in zip(first[1], second[1], strict=True))


def _members(text: str) -> tuple[str, list[str]]:
    """The brackets of a tuple and its items; for anything else no brackets and one item."""
    inside = text[1:-1]
    if len(text) > 2 and text[0] in "([" and text[-1] in ")]" and "," in inside and not set("()[]") & set(inside):
        return text[0] + text[-1], inside.split(",")
    return "", [text]


def _equal(first: str, second: str) -> bool:
    import sympy
    from sympy.parsing.sympy_parser import implicit_multiplication_application, parse_expr, standard_transformations

    rules = (*standard_transformations, implicit_multiplication_application)
    expressions = []
    for text in (first, second):
        code = re.sub(r"\\frac\{([^{}]*)\}\{([^{}]*)\}", r"((\1)/(\2))", text)
        code = re.sub(r"\\sqrt\{([^{}]*)\}", r"sqrt(\1)", code).replace("\\pi", "pi").replace("\\cdot", "*")
        code = code.replace("^", "**").replace("{", "(").replace("}", ")")
        if len(code) > 100 or not _ARITHMETIC.fullmatch(code) or _POWERS.search(code):
            return False
        try:
            expressions.append(parse_expr(code, transformations=rules))
        except (SyntaxError, TypeError, ValueError, AttributeError, ZeroDivisionError, sympy.SympifyError):
            return False
    return bool(sympy.simplify(expressions[0] - expressions[1]) == 0)


def _same_by_library(truth: str, given: str) -> bool:
    return bool(math_verify_reward(f"\\boxed{{{given}}}", truth))


@cache
def _quiet() -> Any:
    for name in ("math_verify.parser", "math_verify.grader"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # it warns that its time limit is off


LENIENT = {"math-verify": math_verify_reward, "public": public_reward}
