r"""Resolving what one expression alone leaves open: is ``f(x+1)`` a call or a product, and is ``a`` a vector?

Both expressions are read the same way, and the gold answer decides. Where it leaves a choice, the reading is
the one in which fewer answers are right, so that only the same form counts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from delta_cli.rewards.math.expression import Expression

# Letters that usually name a function when brackets follow.
FUNCTION_LETTERS = frozenset(
    r"f g F G H Q T \Phi \phi \varphi \psi \Psi \Gamma \zeta \chi \eta \Theta \Omega".split()  # noqa: SIM905
)
KNOWN = {r"\Gamma": "gamma", r"\zeta": "zeta"}  # that are computed
SETS = (r"\mathbb", r"\mathcal", r"\mathfrak")
_STYLE = re.compile(r"\\(?:mathbf|vec|overrightarrow|hat)((?:\\mathbf)?[A-Za-z]|\\[a-z]+)(.*)", re.DOTALL)
UNIT_VECTORS = ("i", "j", "k")


@dataclass(frozen=True)
class _Uses:
    """How the letters of an expression occur: alone, before brackets with one operand in them, or with a sum."""

    alone: frozenset[str]
    called: frozenset[str]
    before_sum: frozenset[str]
    events: frozenset[str]  # P before brackets with capitals: a probability, not a principal


def read_alike(gold: Expression, given: Expression) -> tuple[Expression, Expression]:
    """Both expressions without ``apply``, and with one style for each letter."""
    if any(node.op == "apply" for tree in (gold, given) for node in tree.walk()):
        first, second = _uses(gold), _uses(given)
        functions = first.called | second.called
        functions |= {letter for letter in first.before_sum if letter in FUNCTION_LETTERS} - first.alone
        functions |= first.events - first.alone
        gold, given = _resolved(gold, functions), _resolved(given, functions)
    return gold, _restyled(given, gold)


def has_sets(tree: Expression) -> bool:
    """Whether the expression has a letter for a set, such as ``\\mathbb{Z}``, which is no number to compute with."""
    return any(node.op == "name" and node.text.startswith(SETS) for node in tree.walk())


def _uses(tree: Expression) -> _Uses:
    alone: set[str] = set()
    called: set[str] = set()
    before_sum: set[str] = set()
    events: set[str] = set()
    for node in tree.walk():
        if node.op == "name":
            alone.add(node.text)
        elif node.op == "apply":
            inverse = node.power is not None and node.power.op == "neg"
            one = len(node.parts) == 1 and not inverse and not node.text.endswith("'")
            (before_sum if one and _is_sum(node) else called).add(node.text)
            if node.text == "P" and any(each.op == "name" and each.text.isupper() for each in node.walk()):
                events.add(node.text)
    return _Uses(frozenset(alone), frozenset(called), frozenset(before_sum), frozenset(events))


def _is_sum(node: Expression) -> bool:
    """Whether the brackets of an ``apply`` hold what a product needs brackets for: a sum, or a fraction."""
    inner = node.parts[0]
    return inner.op in ("+", "/", "root", "abs")


def _resolved(tree: Expression, functions: frozenset[str]) -> Expression:
    parts = tuple(_resolved(part, functions) for part in tree.parts)
    if tree.op in ("^", "!", "%") and tree.parts[0].op == "apply" and tree.parts[0].text not in functions:
        inner = tree.parts[0]  # a(b+c)^2 is a·(b+c)^2
        argument = replace(tree, parts=(_resolved(inner.parts[0], functions), *parts[1:]))
        return Expression("*", (_letter(inner, functions), argument), "j")
    if tree.op != "apply":
        return replace(tree, parts=parts)
    power = _resolved(tree.power, functions) if tree.power else None
    if tree.text not in functions:
        return Expression("*", (_letter(tree, functions), *parts), "j")
    if tree.text in KNOWN and len(parts) == 1:
        call = Expression("call", parts, KNOWN[tree.text])
        return Expression("^", (call, power)) if power else call
    exponent = "" if power is None else f"^{_spelled(power)}"
    return Expression("call", parts, f"{tree.text}{exponent}()")


def _letter(node: Expression, functions: frozenset[str]) -> Expression:
    name = Expression("name", text=node.text)
    return Expression("^", (name, _resolved(node.power, functions))) if node.power else name


def _spelled(tree: Expression) -> str:
    return f"{tree.op}{tree.text}({','.join(map(_spelled, tree.parts))})"


def _restyled(given: Expression, gold: Expression) -> Expression:
    """``given`` with the letters in the style of ``gold``: bold, with an arrow, or plain."""
    styled = {node.text for node in gold.walk() if node.op == "name"}
    plain: dict[str, str] = {}
    for name in styled:
        plain.setdefault(_plain(name), name)
    imaginary = any(node == Expression("constant", text="i") for node in gold.walk())

    def restyle(node: Expression) -> Expression:
        parts = tuple(map(restyle, node.parts))
        if node.op == "name" and node.text not in styled:
            name = plain.get(_plain(node.text))
            if name is not None and _interchangeable(name, node.text):
                return Expression("name", text=name)
        if node == Expression("constant", text="i") and not imaginary and "i" in plain and plain["i"] != "i":
            return Expression("name", text=plain["i"])
        return node if parts == node.parts else replace(node, parts=parts)

    return restyle(given) if plain else given


def _plain(name: str) -> str:
    derivative = re.fullmatch("'d([a-z])d[a-z]", name)
    if derivative:
        return f"{derivative[1]}'"
    match = _STYLE.fullmatch(name)
    return match[1].replace(r"\mathbf", "") + match[2] if match else name


def _interchangeable(gold: str, given: str) -> bool:
    """A hat means a unit vector on i, j and k; on other letters it makes another quantity."""
    return _plain(gold) in UNIT_VECTORS or not (gold.startswith(r"\hat") or given.startswith(r"\hat"))


def vectors(tree: Expression) -> Iterator[str]:
    """The names of vectors: with an arrow, in bold, or with a hat."""
    for node in tree.walk():
        if node.op == "name" and _STYLE.fullmatch(node.text):
            yield node.text


def noncommuting(tree: Expression) -> frozenset[str]:
    """The capital letters, if two different ones are factors of one product: they may be matrices."""
    letters = (node.text for node in tree.walk() if node.op == "name")
    capitals = frozenset(letter for letter in letters if re.fullmatch("[A-Z](_.*)?", letter))
    if len(capitals) < 2:
        return frozenset()
    for node in tree.walk():
        if node.op in ("*", "^", "/"):
            below = {each.text for part in node.parts for each in part.walk() if each.op == "name"}
            if len(below & capitals) > 1:
                return capitals
    return frozenset()
