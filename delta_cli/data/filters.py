"""Conditions on the rows of a data set, like ``difficulty >= 5 and topic != "Geometry"``.

The text is parsed as Python and evaluated node by node: comparisons, ``in``, ``and``, ``or``,
``not``, constants and field names, ``a.b`` for a field inside a field. Nothing can be called.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from datetime import date
from typing import Any

from delta_cli.errors import UserError

COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda item, container: item in container,
    ast.NotIn: lambda item, container: item not in container,
}
ORDERED = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)
EXPRESSIONS: tuple[type[ast.AST], ...] = (
    *(ast.Compare, ast.BoolOp, ast.UnaryOp, ast.Name),
    *(ast.Attribute, ast.Constant, ast.List, ast.Tuple),
)
OPERATORS: tuple[type[ast.AST], ...] = (ast.And, ast.Or, ast.Not, ast.USub, ast.Load, *COMPARISONS)


def field(row: Mapping[str, Any], path: str) -> Any:
    """The value at a dotted path, None where it leads nowhere."""
    value: Any = row
    for name in path.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


class Filter:
    """A condition; ``Filter(text)`` raises UserError where the text is none."""

    def __init__(self, text: str) -> None:
        self.text = text
        try:
            self._tree = ast.parse(text.strip(), mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise self._error("it cannot be read") from error
        for node in ast.walk(self._tree):
            if not isinstance(node, EXPRESSIONS + OPERATORS):
                raise self._error(f"{type(node).__name__} is not allowed")

    def __call__(self, row: Mapping[str, Any]) -> bool:
        """Whether a row meets it. An order with a missing value is not met."""
        return bool(self._value(self._tree, row))

    @property
    def fields(self) -> set[str]:
        """Names of the columns it looks at."""
        return {node.id for node in ast.walk(self._tree) if isinstance(node, ast.Name)}

    def _error(self, reason: str) -> UserError:
        return UserError(f"data.filter: {self.text!r}: {reason}; write it like 'difficulty >= 5 and level != 3'")

    def _value(self, node: ast.expr, row: Mapping[str, Any]) -> Any:
        match node:
            case ast.Constant(value=value):
                return value
            case ast.Name() | ast.Attribute():
                return field(row, ast.unparse(node))
            case ast.List(elts=items) | ast.Tuple(elts=items):
                return [self._value(item, row) for item in items]
            case ast.BoolOp(op=ast.And(), values=parts):
                return all(self._value(part, row) for part in parts)
            case ast.BoolOp(values=parts):
                return any(self._value(part, row) for part in parts)
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return not self._value(operand, row)
            case ast.UnaryOp(operand=operand):
                return self._negative(self._value(operand, row), node)
            case ast.Compare():
                return self._compare(node, row)
        raise AssertionError(ast.dump(node))  # __init__ lets nothing else through

    def _negative(self, value: Any, node: ast.expr) -> Any:
        """None stays missing; a text is negated where it is a number's, as in a CSV file."""
        try:
            return None if value is None else -float(value) if isinstance(value, str) else -value
        except (TypeError, ValueError) as error:
            raise self._error(f"{value!r} in '{ast.unparse(node)}' is not a number") from error

    def _compare(self, node: ast.Compare, row: Mapping[str, Any]) -> bool:
        left = self._value(node.left, row)
        for op, side in zip(node.ops, node.comparators, strict=True):
            right = self._value(side, row)
            if isinstance(op, ORDERED) and (left is None or right is None):
                return False
            try:
                met = COMPARISONS[type(op)](*_alike(left, right))
            except TypeError as error:
                raise self._error(f"cannot compare {left!r} with {right!r} in '{ast.unparse(node)}'") from error
            if not met:
                return False
            left = right
        return True


def _alike(left: Any, right: Any) -> tuple[Any, Any]:
    """Both as numbers where one is a number and the other the text of one, as in a CSV file.

    Dates against text are compared as text, ``2024-08-01T00:00:00`` or its beginning.
    """
    if isinstance(left, date) and isinstance(right, str):
        return left.isoformat(), right
    if isinstance(right, date) and isinstance(left, str):
        return left, right.isoformat()
    for number, text in ((left, right), (right, left)):
        if isinstance(number, int | float) and isinstance(text, str):
            try:
                value = float(text)
            except ValueError:
                break
            return (number, value) if number is left else (value, number)
    return left, right
