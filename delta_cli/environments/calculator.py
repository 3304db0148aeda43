"""A calculator: as a tool of a chat, and as an environment that completes equations in running text."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

from delta_cli.environments.turn import Row, ToolError, Turn

LONGEST = 200  # characters of an expression
LARGEST = 10**12  # of any number on the way
DIGITS = 6  # after the point, of a result that is not whole
EXPRESSION = re.compile(r"[\d.,()+\-*/×÷\s$]+$")
OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def calculate(expression: str) -> str:
    """Work out a sum such as ``12 * (3 + 4)`` and return the result.

    Args:
        expression: numbers, the signs + - * / and brackets
    """
    text = expression.strip()
    if not text or len(text) > LONGEST:
        raise ToolError(f"an expression has 1 to {LONGEST} characters")
    text = text.replace("×", "*").replace("÷", "/").replace("$", "").replace(",", "").strip()
    try:
        return as_text(_value(ast.parse(text, mode="eval").body))
    except ZeroDivisionError:
        raise ToolError("division by zero") from None
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ToolError(f"{expression.strip()[:40]!r} is not a sum of numbers") from None


def _value(node: ast.expr) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        value = Fraction(str(node.value))
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        inner = _value(node.operand)
        value = -inner if isinstance(node.op, ast.USub) else inner
    elif isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        value = OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    else:
        raise ValueError("only numbers and + - * /")
    if abs(value) > LARGEST or value.denominator > LARGEST:
        raise ValueError("too large")
    return value


def as_text(value: Fraction) -> str:
    """A whole number, or a decimal fraction with at most DIGITS digits."""
    if value.denominator == 1:
        return str(value.numerator)
    return f"{float(value):.{DIGITS}f}".rstrip("0").rstrip(".")


class RunningCalculator:
    """Completes ``12 * 4 =`` with its result, wherever the model writes it; anything else ends the episode.

    For recipes with ``rollout.stop = ["\\n", "="]``: each sign of equality is a call. See ``turn.EpisodeSession``; it
    keeps nothing from turn to turn, and gives no reward.
    """

    def reset(self, row: Row) -> None: ...

    def reward(self) -> None: ...

    def close(self) -> None: ...

    def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        raise ToolError(f"there is no tool {name!r}")

    def step(self, text: str) -> Turn:
        """The result of the expression before the sign of equality at the end of the text."""
        head, sign, rest = text.rpartition("=")
        if not sign or "\n" in text or rest.strip():
            return Turn(done=True)
        found = EXPRESSION.search(head)
        try:
            result = calculate(found[0].strip(" ,.") if found else "")
        except ToolError:
            result = "?"
        return Turn(" " + result if head.endswith(" ") else result)  # in the model's own style
