r"""Reading one expression, strictly: what is not in this grammar is not read at all.

Parsers of LaTeX skip what they do not know, and some take exponential time on nested fractions. A
verifier must do neither: an answer with a part that was never looked at could be accepted although it
is wrong. So the grammar here is small, everything outside it raises UnreadableError, and reading takes
one pass over at most MAX_TOKENS tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from delta_cli.rewards.math.budget import spend
from delta_cli.rewards.math.errors import UnreadableError
from delta_cli.rewards.math.latex import FUNCTIONS
from delta_cli.rewards.math.tokens import ACCENTS, GREEK, is_number, tokens_of

SYNONYMS = {
    "ln": "log", "arsinh": "arcsinh", "arcosh": "arccosh", "artanh": "arctanh", "Re": "re", "Im": "im",
}  # fmt: skip
CALLED = frozenset({*FUNCTIONS, "Re", "Im"})
INVERSES = {name: f"arc{name}" for name in ("sin", "cos", "tan", "cot", "sec", "csc", "sinh", "cosh", "tanh")}
CONSTANTS = {r"\pi": "π", "e": "e", "i": "i", r"\circ": "°"}
CONJUGATES = (r"\bar", r"\overline")
COMPLEX_LETTERS = ("z", "w")
MATRICES = ("pmatrix", "bmatrix", "Bmatrix", "matrix", "smallmatrix", "array")
PAIRS = {r"\lfloor": (r"\rfloor", "floor"), r"\lceil": (r"\rceil", "ceil"), "|": ("|", "abs")}
TIMES = {r"\cdot": "·", r"\times": "×", "*": "·"}
DIVIDED = ("/", r"\div")
CLOSING = {"(": ")", "{": "}", "[": "]"}
FACTOR_STARTS = frozenset(
    ("(", "{", "[", r"\frac", r"\sqrt", r"\binom", r"\begin", r"\lfloor", r"\lceil", r"\pi", *GREEK, *ACCENTS)
)


@dataclass(frozen=True)
class Expression:
    """An operation on its parts, or a leaf.

    ``op`` is ``number`` or ``name`` for leaves (``text`` holds the digits or the name), ``constant``
    (π, e, i, °), ``+`` and ``*`` with two or more parts (the ``text`` of ``*`` is the sign between each two
    factors: ``·``, ``×``, or ``j`` for none), ``neg``, ``/``, ``^``, ``root`` (radicand, index), ``log``
    (argument, base), ``matrix`` (rows), ``row``, ``%``, ``!``, ``binom``, ``abs``, ``floor``, ``ceil``,
    ``conj``, ``call`` of the function ``text``, or ``apply``: a letter before brackets, which ``reading``
    resolves to a product or a call. The parts of ``apply`` are its arguments, ``text`` is the letter, and
    ``power`` is an exponent between the two, as in ``f^{-1}(x)``.
    """

    op: str
    parts: tuple[Expression, ...] = ()
    text: str = ""
    power: Expression | None = None

    def walk(self) -> Iterator[Expression]:
        """This expression and all below it."""
        yield self
        for part in self.parts:
            yield from part.walk()
        if self.power:
            yield from self.power.walk()


@lru_cache(maxsize=1024)
def parse(text: str) -> Expression:
    """The tree of an expression in normalised LaTeX. Raises UnreadableError."""
    spend(10 * len(text))
    try:
        parser = _ExpressionParser(tokens_of(text))
        tree = parser.group()
        parser.expect("")
        return tree
    except RecursionError:
        raise UnreadableError("nested too deeply") from None


class _ExpressionParser:
    """Recursive descent over the tokens."""

    def __init__(self, tokens: list[str]) -> None:
        self.tokens = tokens
        self.at = 0
        self.bars = 0  # absolute values that are open

    @property
    def next(self) -> str:
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def take(self) -> str:
        token = self.next
        self.at += 1
        return token

    def expect(self, token: str) -> None:
        if self.take() != token:
            raise UnreadableError(f"expected {token or 'the end'}")

    def group(self) -> Expression:
        r"""What stands in braces or alone: a sum, or two of them with ``\over`` or ``\choose`` between them."""
        first = self.sum()
        if self.next in (r"\over", r"\choose"):
            return Expression("/" if self.take() == r"\over" else "binom", (first, self.sum()))
        return first

    def sum(self) -> Expression:
        terms = [self.signed()]
        while self.next in ("+", "-"):
            terms.append(self.signed())
        return terms[0] if len(terms) == 1 else Expression("+", tuple(terms))

    def signed(self) -> Expression:
        if self.next == "-":
            self.take()
            return Expression("neg", (self.product(),))
        if self.next == "+":
            self.take()
        return self.product()

    def product(self) -> Expression:
        factors, signs = [self.power()], ""
        while True:
            if self.next in TIMES:
                signs += TIMES[self.take()]
                factors.append(self.power())
            elif self.next in DIVIDED:
                self.take()
                factors, signs = [Expression("/", (_times(factors, signs), self.power()))], ""
            elif self.begins_factor():
                if is_number(self.next) and not self._may_precede_number(factors[-1]):
                    raise UnreadableError("a number after a factor")
                signs += "j"
                factors.append(self.power())
            else:
                return _times(factors, signs)

    def _may_precede_number(self, factor: Expression) -> bool:
        """``\\sqrt{2}5``, ``(-1)^n2^n`` and ``\\pi 2`` are products; ``x2`` and ``(3)5`` may be misprints."""
        return factor.op in ("root", "^", "/") or (factor.op == "constant" and factor.text in ("π", "i"))

    def begins_factor(self) -> bool:
        token = self.next
        if token == "|":
            return self.bars == 0
        return bool(token) and (
            token[0].isalnum()
            or token in FACTOR_STARTS
            or token[1:] in CALLED
            or (token[0] == "'" and len(token) > 1)
            or token[0] == "."
        )

    def power(self) -> Expression:
        base = self.postfixed(self.atom())
        if self.next == "^":
            base = self.postfixed(self.raised(base))
        if self.next in ("^", "_"):
            raise UnreadableError("a second index")
        return base

    def postfixed(self, base: Expression) -> Expression:
        if self.next in ("!", r"\%"):
            base = Expression("!" if self.take() == "!" else "%", (base,))
            if self.next in ("!", r"\%"):
                raise UnreadableError("two signs after a number")
        return base

    def raised(self, base: Expression) -> Expression:
        self.expect("^")
        if self.next in ("'", "*"):
            raise UnreadableError("an index that is no power")
        exponent = self.argument()
        if exponent == Expression("constant", text="°"):
            return Expression("*", (base, exponent), "j")
        if exponent.op == "name" and exponent.text in ("T", "c", "H") and base.op in ("name", "matrix", "apply"):
            return Expression("call", (base,), f"^{exponent.text}")  # a transpose or complement, or some power
        if base.op == "name" and self.next == "(":
            return self.applied(base.text, exponent)
        return Expression("^", (base, exponent))

    def argument(self) -> Expression:
        """A group in braces, or one token."""
        if self.next == "{":
            self.take()
            inner = self.group()
            self.expect("}")
            return inner
        following = self.tokens[self.at + 1] if self.at + 1 < len(self.tokens) else ""
        if self.next == "-" and is_number(following):
            self.take()
            return Expression("neg", (Expression("number", text=self.take()),))
        return self.atom(applies=False)

    def quotient_argument(self) -> Expression:
        r"""An argument of ``\frac``. LaTeX reads one digit of ``\frac{1}23``, and a person may mean another number."""
        if is_number(self.next) and len(self.next) > 1:
            raise UnreadableError("digits without braces")
        return self.argument()

    def atom(self, applies: bool = True) -> Expression:
        """One operand. With ``applies``, a letter before brackets is applied to them."""
        token = self.take()
        if is_number(token):
            if self.next == "_":
                raise UnreadableError("a number in a base")
            return Expression("number", text=token)
        if token.startswith("'") and len(token) > 1:
            return Expression("name", text=token)
        if token in CLOSING:
            bars, self.bars = self.bars, 0
            inner = self.group()
            self.expect(CLOSING[token])
            self.bars = bars
            return inner
        if token in PAIRS:
            return self.enclosed(token)
        if token in (r"\frac", r"\binom"):
            parts = (self.quotient_argument(), self.quotient_argument())
            return Expression("/" if token == r"\frac" else "binom", parts)
        if token == r"\sqrt":
            return self.root()
        if token == r"\begin":
            return self.matrix()
        if token[1:] in CALLED and token[0] == "\\":
            return self.function(token[1:])
        if token in CONSTANTS and self.next not in ("_", "'"):
            return Expression("constant", text=CONSTANTS[token])
        if token in GREEK or token in ACCENTS or (len(token) == 1 and token.isalpha()):
            return self.name(token, applies)
        raise UnreadableError(token)

    def enclosed(self, opening: str) -> Expression:
        closing, op = PAIRS[opening]
        self.bars += opening == "|"
        if opening == "|" and self.next == "|":  # a norm
            self.take()
            inner = self.sum()
            self.expect("|")
        else:
            inner = self.sum()
        self.expect(closing)
        self.bars -= opening == "|"
        return Expression(op, (inner,))

    def root(self) -> Expression:
        index = Expression("number", text="2")
        if self.next == "[":
            self.take()
            index = self.sum()
            self.expect("]")
        return Expression("root", (self.argument(), index))

    def function(self, name: str) -> Expression:
        base = power = None
        if name == "log" and self.next == "_":
            self.take()
            base = self.argument()
        if self.next == "^":
            self.take()
            power = self.argument()
            if power == Expression("neg", (Expression("number", text="1"),)):
                if name not in INVERSES:
                    raise UnreadableError(f"{name}^-1")
                name, power = INVERSES[name], None
        argument = self.postfixed(self.atom()) if self.next in ("(", "{", "[") else self.juxtaposed()
        if base == Expression("constant", text="e"):
            base = None
        name = SYNONYMS.get(name, name)
        call = Expression("log", (argument, base)) if base else Expression("call", (argument,), name)
        return Expression("^", (call, power)) if power else call

    def juxtaposed(self) -> Expression:
        """The argument of a function without brackets: factors written side by side."""
        factors = [self.power()]
        while self.begins_factor() and self.next[1:] not in CALLED and self.next not in ("(", "["):
            if is_number(self.next):
                raise UnreadableError("a number after a factor")
            factors.append(self.power())
        return _times(factors, "j" * (len(factors) - 1))

    def name(self, token: str, applies: bool) -> Expression:
        """A variable with its accents, index and primes; or a letter that is applied to brackets."""
        text = token
        if token in ACCENTS:
            content = self.raw_group()
            text = f"{token}{content}"
            if token in CONJUGATES and content[:1] in COMPLEX_LETTERS:
                return self.conjugate(content)
        if self.next == "_":
            self.take()
            text += "_" + (self.raw_group() if self.next == "{" or self.next in ACCENTS else self.take())
        while self.next == "'":
            text += self.take()
        if applies and self.next in ("(", "["):
            return self.applied(text, None)
        return Expression("name", text=text)

    def conjugate(self, content: str) -> Expression:
        """The complex conjugate of what stood under a bar."""
        inner = _ExpressionParser(tokens_of(content))
        tree = inner.sum()
        inner.expect("")
        return Expression("conj", (tree,))

    def applied(self, text: str, power: Expression | None) -> Expression:
        """A letter, maybe raised to a power, before brackets."""
        bars, self.bars = self.bars, 0
        closing = CLOSING[self.take()]
        arguments = [self.group()]
        while self.next == ",":
            self.take()
            arguments.append(self.group())
        self.expect(closing)
        self.bars = bars
        return Expression("apply", tuple(arguments), text, power)

    def raw_group(self) -> str:
        """The tokens of a group in braces as text: the words of a name."""
        if self.next in ACCENTS:
            return self.take() + self.raw_group()
        if self.next != "{":
            return self.take()
        parts: list[str] = []
        depth = 0
        while True:
            token = self.take()
            if not token:
                raise UnreadableError("a group that never closes")
            depth += (token == "{") - (token == "}")
            if depth == 0:
                return "".join(parts)
            if token != "{" and token != "}":
                parts.append(token)

    def matrix(self) -> Expression:
        kind = self.raw_group()
        if kind not in MATRICES:
            raise UnreadableError(kind)
        if kind == "array" and self.next == "{":
            self.raw_group()
        rows, row = [], [self.sum()]
        while self.next != r"\end":
            token = self.take()
            if token == "&":
                row.append(self.sum())
            elif token == "\\\\":
                rows.append(Expression("row", tuple(row)))
                row = [self.sum()] if self.next != r"\end" else []
            else:
                raise UnreadableError(token)
        self.take()
        if self.raw_group() != kind:
            raise UnreadableError("an end of another kind")
        rows += [Expression("row", tuple(row))] if row else []
        if len({len(each.parts) for each in rows}) != 1:
            raise UnreadableError("rows of different length")
        return Expression("matrix", tuple(rows))


def _times(factors: list[Expression], signs: str) -> Expression:
    return factors[0] if len(factors) == 1 else Expression("*", tuple(factors), signs)
