r"""Is there work left to be done in an answer?

One rule for all operations: **an operation between numbers alone whose result is rational must be carried
out**. So must a function of numbers alone (a sine, a logarithm, a factorial), and an operation that the
grammar does not read (a derivative, a sum, an integral, a limit, a maximum, a determinant). ``168/2``,
``99+9``, ``\binom52``, ``2^{10}``, ``\sqrt4``, ``\sin\frac\pi3``, ``(3+2)\sqrt2`` and ``2\cdot3x`` restate the
question. What may stay: a fraction of two integers that is not an integer, a mixed number, a percentage, a
number in scientific notation, a root or power that is not rational, and any arrangement of an expression
with letters. An answer may leave undone the kinds of operations that the gold answer leaves undone.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from delta_cli.rewards.math.equivalence import names
from delta_cli.rewards.math.errors import NoValueError
from delta_cli.rewards.math.evaluation import as_rational, context, number
from delta_cli.rewards.math.expression import Expression

FUNCTIONS = ("call", "log", "floor", "ceil", "abs", "binom", "!")
# Functions that can be written for each other are of one kind: cos 70° and sin 20°, log_2 3 and ln 3 / ln 2.
KINDS = dict.fromkeys(("sin", "cos", "tan", "cot", "sec", "csc"), "angle")
KINDS |= dict.fromkeys(("arcsin", "arccos", "arctan", "arccot", "arcsec", "arccsc"), "arc")
KINDS |= dict.fromkeys(("lg", "arcsinh", "arccosh", "arctanh", "arccoth"), "log")
POWERS = ("exp", "sinh", "cosh", "tanh", "coth", "sech", "csch")  # other ways to write a power of e
IMAGINARY = Expression("constant", text="i")


def is_finished(given: Expression, gold: Expression) -> bool:
    """Whether ``given`` leaves only those kinds of operations undone that ``gold`` leaves undone or contains."""
    left = undone(given)
    return not left or left <= undone(gold) | set(_allowed(gold))


@lru_cache(maxsize=1024)
def undone(tree: Expression) -> frozenset[str]:
    """The kinds of operations that are left undone; those whose result is rational end with ``=``."""
    return frozenset(_undone(tree))


def _allowed(gold: Expression) -> Iterator[str]:
    """Functions of numbers that come up when an expression with letters is rearranged: log_2 x is ln x / ln 2."""
    for node in gold.walk():
        if names(node):
            if node.op in ("^", "log"):
                yield "log"
            elif node.op == "call":
                yield _kind(node)
            elif node.op in ("!", "binom"):
                yield from ("!=", "binom=")


def _kind(tree: Expression) -> str:
    return KINDS.get(tree.text, tree.text) if tree.op == "call" else tree.op


def _undone(tree: Expression) -> Iterator[str]:
    if _is_complete(tree):
        return
    if tree.op in FUNCTIONS and tree.text not in POWERS and not names(tree):
        yield _kind(tree) + "=" * _is_rational(tree)
    elif _is_rational(tree):
        yield tree.op + "="
        if tree.op == "^" and tree.parts[1].op == "neg":
            yield "/="
        for part in tree.parts:
            yield from _undone(part)
        return
    if tree.op in ("+", "*"):
        numbers = [part for part in _flat(tree) if part != IMAGINARY and _is_rational(part)]
        if len(numbers) > 1:
            yield tree.op + "="
    if tree.op == "matrix":
        parts: tuple[Expression, ...] = tuple(entry for row in tree.parts for entry in row.parts)
    else:
        parts = tree.parts
        if any(part.op == "matrix" for part in parts):
            yield "matrix"
    for part in parts:
        yield from _undone(part)


def _is_complete(tree: Expression) -> bool:
    """A number as one writes it down: with a sign, as a fraction, in percent, in scientific notation."""
    if tree.op == "neg":
        return tree.parts[0].op != "neg" and _is_complete(tree.parts[0])
    if tree.op == "%":
        return tree.parts[0].op == "number"
    if tree.op == "/":
        above, below = (_integer(part) for part in tree.parts)
        if above is not None:
            return bool(below) and above % (below or 1) != 0
        return bool(below) and _is_complex(tree.parts[0])
    return tree.op in ("number", "name", "constant") or _is_scientific(tree) or _is_complex(tree)


def _is_scientific(tree: Expression) -> bool:
    """A number from 1 to below 10 times a power of ten."""
    if tree.op != "*" or len(tree.parts) != 2:
        return False
    mantissa, power = tree.parts
    if mantissa.op != "number" or power.op != "^":
        return False
    size = float(mantissa.text.partition("\\")[0])
    return 1 <= size < 10 and power.parts[0] == Expression("number", text="10") and _integer(power.parts[1]) is not None


def _is_complex(tree: Expression) -> bool:
    """bi, or a + bi."""
    if tree.op == "+" and len(tree.parts) == 2:
        real, imaginary = sorted(tree.parts, key=_is_imaginary)
        return not _is_imaginary(real) and _is_complete(real) and _is_imaginary(imaginary)
    return _is_imaginary(tree)


def _is_imaginary(tree: Expression) -> bool:
    if tree.op == "neg":
        return tree.parts[0].op != "neg" and _is_imaginary(tree.parts[0])
    if tree.op == "*" and len(tree.parts) == 2:
        first, second = tree.parts if tree.parts[1] == IMAGINARY else tree.parts[::-1]
        return second == IMAGINARY and _is_complete(first)
    if tree.op == "/":
        return _is_imaginary(tree.parts[0]) and _integer(tree.parts[1]) is not None
    return tree == IMAGINARY


def _integer(tree: Expression) -> int | None:
    if tree.op == "neg":
        value = _integer(tree.parts[0])
        return None if value is None else -value
    return int(tree.text) if tree.op == "number" and tree.text.isdecimal() else None


def _is_rational(tree: Expression) -> bool:
    if names(tree) or tree.op in ("matrix", "row"):
        return False
    try:
        value = number(tree)
        parts = (value.real, value.imag) if isinstance(value, context.mpc) else (value,)
        return all(as_rational(part) is not None for part in parts)
    except NoValueError:
        return False


def _flat(tree: Expression) -> Iterator[Expression]:
    for part in tree.parts:
        inner = part.parts[0] if part.op == "neg" else part
        if inner.op == tree.op and not _is_complete(inner):
            yield from _flat(inner)
        else:
            yield part
