"""The tokens of an expression in normalised LaTeX."""

from __future__ import annotations

import re

from delta_cli.rewards.math.errors import UnreadableError
from delta_cli.rewards.math.latex import FUNCTIONS

MAX_TOKENS = 400  # of an expression; a longer one is refused
MAX_DIGITS = 60  # of a number inside an expression, which is computed to fewer digits than that

GREEK = frozenset(
    r"""\alpha \beta \gamma \delta \epsilon \varepsilon \zeta \eta \theta \vartheta \iota \kappa \lambda \mu \nu \xi
    \rho \varrho \sigma \tau \upsilon \phi \varphi \chi \psi \omega \Gamma \Delta \Theta \Lambda \Xi \Pi \Sigma
    \Upsilon \Phi \Psi \Omega \infty \ell \hbar \emptyset""".split()  # noqa: SIM905
)
ACCENTS = frozenset(
    r"\hat \vec \bar \tilde \overline \overrightarrow \widehat \mathbf \mathbb \mathcal \mathfrak \text".split()  # noqa: SIM905
)

_PARTIAL = r"(?:d|\\partial)\s*"
_ORDER = r"(?:\^\s*(?:\{\s*\d\s*\}|\d)\s*)?"
_BELOW = rf"(?:{_PARTIAL}[A-Za-z]\s*{_ORDER})+"
DERIVATIVE = rf"\\frac\s*\{{\s*{_PARTIAL}{_ORDER}(?:[A-Za-z]|\\[a-z]+)\s*\}}\s*\{{\s*{_BELOW}\}}"
_OPERATOR = re.compile(rf"\\frac\s*\{{\s*{_PARTIAL}{_ORDER}[^{{}}]*\}}\s*\{{\s*{_PARTIAL}[A-Za-z]")
_REPEATING = r"\d*\.\d*\\overline\s*\{\s*\d+\s*\}"
_TOKEN = re.compile(
    rf"\s*(?:(?P<derivative>{DERIVATIVE}|(?<![A-Za-z])d[a-z]\s*/\s*d[a-z](?![A-Za-z]))"
    rf"|(?P<number>{_REPEATING}|\d+\.\d+|\d+\.?|\.\d+)"
    rf"|(?P<plain>(?<![A-Za-z\\])(?:{'|'.join(FUNCTIONS)})(?![A-Za-z]))"
    r"|(?P<token>\\[A-Za-z]+|\\\\|\\%|[A-Za-z]|[-+*/^_()\[\]{}|!'&,]|$))"
)


def tokens_of(text: str) -> list[str]:
    """The tokens; a derivative or a differential is one name, which begins with ``'``. Raises UnreadableError."""
    if _OPERATOR.search(re.sub(DERIVATIVE, "", text)):
        raise UnreadableError("a derivative that is left to be taken")
    tokens: list[str] = []
    position = 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None or len(tokens) >= MAX_TOKENS or len(match["number"] or "") > MAX_DIGITS:
            raise UnreadableError(text[position : position + 20])
        if match["derivative"]:
            tokens.append("'" + re.sub(r"\\frac|[\s{}/]", "", match["derivative"]))
        else:
            tokens.append("\\" + match["plain"] if match["plain"] else match["number"] or match["token"])
        position = match.end()
    return _with_differentials([token for token in tokens if token])


def _with_differentials(tokens: list[str]) -> list[str]:
    """``dx`` as one name, if every d stands before one of the usual variables."""
    at = [index for index, token in enumerate(tokens) if token == "d"]
    if not at or not all(index + 1 < len(tokens) and tokens[index + 1] in "xyztuvrs" for index in at):
        return tokens
    joined: list[str] = []
    for index, token in enumerate(tokens):
        if index and index - 1 in at:
            joined[-1] = f"'d{token}"
        else:
            joined.append(token)
    return joined


def is_number(token: str) -> bool:
    return bool(token) and (token[0].isdigit() or (token[0] == "." and len(token) > 1))
