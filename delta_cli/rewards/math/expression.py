r"""Reading one expression, strictly: what is not in this grammar is not read at all.

Parsers of LaTeX pass over what they do not know, and some take exponential time on nested
fractions. A verifier must do neither: an answer with a part that was never looked at can be
accepted though it is wrong. So the grammar here is small, everything outside it raises
UnreadableError, and reading takes one pass over at most MAX_TOKENS tokens.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

MAX_TOKENS = 400  # of an expression; a longer one is refused


class UnreadableError(ValueError):
    """The text is not an answer of a form that can be compared."""


@dataclass(frozen=True)
class Expression:
    """An operation on its parts, or a leaf.

    ``op`` is ``number`` and ``name`` for leaves (``text`` holds the digits or the name), ``constant``
    (π, e, i, °), ``+`` and ``*`` with two or more parts, ``neg``, ``/``, ``^``, ``root`` (radicand,
    index), ``log`` (argument, base), ``matrix`` (rows), ``row``, ``%``, ``!``, ``binom``, ``abs``,
    ``floor``, ``ceil``, or ``call`` of the function ``text``.
    """

    op: str
    parts: tuple[Expression, ...] = ()
    text: str = ""

    def walk(self) -> Iterator[Expression]:
        """This node and all below it."""
        yield self
        for part in self.parts:
            yield from part.walk()


FUNCTIONS = tuple(
    "arcsin arccos arctan arccot sinh cosh tanh coth sin cos tan cot sec csc ln log lg exp".split()  # noqa: SIM905
)
INVERSES = {"sin": "arcsin", "cos": "arccos", "tan": "arctan"}
OPAQUE = ("f", "g")  # letters that stand for a function where a bracket follows
CONSTANTS = {r"\pi": "π", "e": "e", "i": "i", r"\circ": "°"}
GREEK = frozenset(
    r"""\alpha \beta \gamma \delta \epsilon \varepsilon \zeta \eta \theta \vartheta \iota \kappa \lambda \mu \nu \xi
    \rho \varrho \sigma \tau \upsilon \phi \varphi \chi \psi \omega \Gamma \Delta \Theta \Lambda \Xi \Pi \Sigma
    \Upsilon \Phi \Psi \Omega \infty \ell \hbar \emptyset""".split()  # noqa: SIM905
)
ACCENTS = frozenset(
    r"\hat \vec \bar \tilde \overline \overrightarrow \widehat \mathbb \mathcal \mathfrak \text".split()  # noqa: SIM905
)
MATRICES = ("pmatrix", "bmatrix", "Bmatrix", "matrix", "smallmatrix", "array")
PAIRS = {r"\lfloor": (r"\rfloor", "floor"), r"\lceil": (r"\rceil", "ceil"), "|": ("|", "abs")}
TIMES = (r"\cdot", r"\times", "*")
DIVIDED = ("/", r"\div")

_PARTIAL = r"(?:d|\\partial)\s*"
_ORDER = r"(?:\^\s*(?:\{\s*\d\s*\}|\d)\s*)?"
_BELOW = rf"(?:{_PARTIAL}[A-Za-z]\s*{_ORDER})+"
DERIVATIVE = rf"\\frac\s*\{{\s*{_PARTIAL}{_ORDER}(?:[A-Za-z]|\\[a-z]+)\s*\}}\s*\{{\s*{_BELOW}\}}"
OPERATOR = re.compile(rf"\\frac\s*\{{\s*{_PARTIAL}{_ORDER}[^{{}}]*\}}\s*\{{\s*{_PARTIAL}[A-Za-z]")
REPEATING = r"\d*\.\d*\\overline\s*\{\s*\d+\s*\}"
TOKEN = re.compile(
    rf"\s*(?:(?P<derivative>{DERIVATIVE}|(?<![A-Za-z])d[a-z]\s*/\s*d[a-z](?![A-Za-z]))"
    rf"|(?P<number>{REPEATING}|\d+\.\d+|\d+\.?|\.\d+)"
    rf"|(?P<plain>(?<![A-Za-z\\])(?:{'|'.join(FUNCTIONS)})(?![A-Za-z]))"
    r"|(?P<token>\\[A-Za-z]+|\\\\|\\%|[A-Za-z]|[-+*/^_()\[\]{}|!'&,]|$))"
)


@lru_cache(maxsize=1024)
def parse(text: str) -> Expression:
    """The tree of an expression in normalised LaTeX. Raises UnreadableError."""
    try:
        parser = _ExpressionParser(_tokens(text))
        tree = parser.sum()
        parser.expect("")
        return tree
    except RecursionError:
        raise UnreadableError("nested too deeply") from None


def _tokens(text: str) -> list[str]:
    if OPERATOR.search(re.sub(DERIVATIVE, "", text)):
        raise UnreadableError("a derivative that is left to be taken")
    tokens: list[str] = []
    position = 0
    while position < len(text):
        match = TOKEN.match(text, position)
        if match is None or len(tokens) >= MAX_TOKENS:
            raise UnreadableError(text[position : position + 20])
        if match["derivative"]:
            tokens.append("'" + re.sub(r"\\frac|[\s{}/]", "", match["derivative"]))
        else:
            tokens.append("\\" + match["plain"] if match["plain"] else match["number"] or match["token"])
        position = match.end()
    return [token for token in tokens if token]


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
        factors = [self.power()]
        while True:
            if self.next in TIMES:
                self.take()
                factors.append(self.power())
            elif self.next in DIVIDED:
                self.take()
                factors = [Expression("/", (_times(factors), self.power()))]
            elif self.begins_factor():
                if _is_number(self.next):
                    raise UnreadableError("a number after a factor")
                factors.append(self.power())
            else:
                return _times(factors)

    def begins_factor(self) -> bool:
        token = self.next
        if token == "|":
            return self.bars == 0
        return bool(token) and (
            token[0].isalnum()
            or token in ("(", "{", "[", r"\frac", r"\sqrt", r"\binom", r"\begin", r"\lfloor", r"\lceil")
            or token in GREEK
            or token in ACCENTS
            or token == r"\pi"
            or token[1:] in FUNCTIONS
            or (token[0] == "'" and len(token) > 1)
            or token[0] == "."
        )

    def power(self) -> Expression:
        base = self.postfixed(self.atom())
        if self.next == "^":
            base = self.raised(base)
            base = self.postfixed(base)
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
            return Expression("*", (base, exponent))
        if base == Expression("name", text="A") and exponent.op == "name" and exponent.text in ("T", "c"):
            raise UnreadableError("a transpose or a complement")
        return Expression("^", (base, exponent))

    def argument(self) -> Expression:
        """A group in braces, or one token."""
        if self.next == "{":
            self.take()
            inner = self.sum()
            self.expect("}")
            return inner
        if self.next == "-" and _is_number(self.tokens[self.at + 1] if self.at + 1 < len(self.tokens) else ""):
            self.take()
            return Expression("neg", (Expression("number", text=self.take()),))
        return self.atom()

    def atom(self) -> Expression:
        token = self.take()
        if _is_number(token):
            if self.next == "_":
                raise UnreadableError("a number in a base")
            return Expression("number", text=token)
        if token.startswith("'") and len(token) > 1:
            return Expression("name", text=token)
        if token in ("(", "{", "["):
            bars, self.bars = self.bars, 0
            inner = self.sum()
            self.expect({"(": ")", "{": "}", "[": "]"}[token])
            self.bars = bars
            return inner
        if token in PAIRS:
            return self.enclosed(token)
        if token in (r"\frac", r"\binom"):
            return Expression("/" if token == r"\frac" else "binom", (self.argument(), self.argument()))
        if token == r"\sqrt":
            return self.root()
        if token == r"\begin":
            return self.matrix()
        if token[1:] in FUNCTIONS and token[0] == "\\":
            return self.function(token[1:])
        if token in CONSTANTS and self.next not in ("_", "'"):
            return Expression("constant", text=CONSTANTS[token])
        if token in GREEK or token in ACCENTS or re.fullmatch("[A-Za-z]", token):
            return self.name(token)
        raise UnreadableError(token)

    def enclosed(self, opening: str) -> Expression:
        closing, op = PAIRS[opening]
        self.bars += opening == "|"
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
        base = None
        if name == "log" and self.next == "_":
            self.take()
            base = self.argument()
        power = None
        if self.next == "^":
            self.take()
            power = self.argument()
            if power == Expression("neg", (Expression("number", text="1"),)):
                if name not in INVERSES:
                    raise UnreadableError(f"{name}^-1")
                name, power = INVERSES[name], None
        argument = self.bracketed() if self.next in ("(", "{") else self.juxtaposed()
        name = "log" if name == "ln" else name
        call = Expression("log", (argument, base)) if base else Expression("call", (argument,), name)
        return Expression("^", (call, power)) if power else call

    def bracketed(self) -> Expression:
        return self.postfixed(self.atom())

    def juxtaposed(self) -> Expression:
        """The argument of a function that has no bracket: factors written side by side."""
        factors = [self.power()]
        while self.begins_factor() and self.next[1:] not in FUNCTIONS and self.next not in ("(", "["):
            if _is_number(self.next):
                raise UnreadableError("a number after a factor")
            factors.append(self.power())
        return _times(factors)

    def name(self, token: str) -> Expression:
        """A variable with its accents, index and primes; f and g before a bracket are functions."""
        text = token + self.raw_group() if token in ACCENTS else token
        if self.next == "_":
            self.take()
            text += "_" + (self.raw_group() if self.next == "{" or self.next in ACCENTS else self.take())
        while self.next == "'":
            text += self.take()
        if token in OPAQUE and self.next == "(":
            self.take()
            arguments = [self.sum()]
            while self.next == ",":
                self.take()
                arguments.append(self.sum())
            self.expect(")")
            return Expression("call", tuple(arguments), text)
        return Expression("name", text=text)

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
            if token != "{":
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


def _is_number(token: str) -> bool:
    return bool(token) and (token[0].isdigit() or (token[0] == "." and len(token) > 1))


def _times(factors: list[Expression]) -> Expression:
    return factors[0] if len(factors) == 1 else Expression("*", tuple(factors))
