"""Which tokens the coefficients amplify and which they damp: counts and mean coefficients by token and side."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from delta_cli.data.tokenizer import Tokenizer
from delta_cli.runs.records import RecordedResponse

TokenKind = Literal["formatting", "digits", "words"]
Side = Literal["+", "−"]
KINDS: tuple[TokenKind, ...] = get_args(TokenKind)
FEWEST = 5  # occurrences a token needs before its mean says something


@dataclass(frozen=True)
class TokenCredit:
    """The mean coefficient of one token on one side: in responses with A > 0 or in those with A < 0."""

    token: int
    text: str
    kind: TokenKind
    side: Side
    count: int
    mean: float  # coefficient


@dataclass(frozen=True)
class TokenTable:
    """The most amplified and the most damped tokens of each kind, strongest first."""

    responses: int
    tokens: int  # with an advantage other than 0; the others change no weight
    amplified: dict[TokenKind, list[TokenCredit]]
    damped: dict[TokenKind, list[TokenCredit]]


class CoefficientStatistics:
    """Collects counts and sums of coefficients by token and side, one response at a time."""

    def __init__(self) -> None:
        self._responses = 0
        self._counts = np.zeros((2, 0), np.int64)  # [side, token]
        self._sums = np.zeros((2, 0))

    def add(self, response: RecordedResponse) -> None:
        """Add the tokens of a response; a response without an advantage only counts as a response."""
        self._responses += 1
        if not response.advantage or not len(response):
            return
        beyond = int(response.tokens.max()) + 1 - self._counts.shape[1]
        if beyond > 0:
            self._counts = np.pad(self._counts, ((0, 0), (0, beyond)))
            self._sums = np.pad(self._sums, ((0, 0), (0, beyond)))
        side = int(response.advantage < 0)
        np.add.at(self._counts[side], response.tokens, 1)
        np.add.at(self._sums[side], response.tokens, response.coefficients)

    def table(self, tokenizer: Tokenizer, rows: int = 6) -> TokenTable:
        """The table, with at most ``rows`` tokens in each part."""
        enough = FEWEST if (self._counts >= FEWEST).any() else 1
        found = [self._credit(tokenizer, int(side), int(token)) for side, token in np.argwhere(self._counts >= enough)]
        found.sort(key=lambda credit: (-credit.mean, -credit.count))
        return TokenTable(
            responses=self._responses,
            tokens=int(self._counts.sum()),
            amplified={kind: _of_kind((each for each in found if each.mean > 1), kind, rows) for kind in KINDS},
            damped={kind: _of_kind((each for each in found[::-1] if each.mean < 1), kind, rows) for kind in KINDS},
        )

    def _credit(self, tokenizer: Tokenizer, side: int, token: int) -> TokenCredit:
        count = int(self._counts[side, token])
        text = tokenizer.decode([token], skip_special=False)
        special = text != "" and tokenizer.decode([token]) == ""
        kind = "formatting" if special else kind_of(text)
        return TokenCredit(token, text, kind, "−" if side else "+", count, float(self._sums[side, token]) / count)


def kind_of(text: str) -> TokenKind:
    """Digits if the text has a digit, words if it has a letter and is no LaTeX command, otherwise formatting."""
    if any(char.isdigit() for char in text):
        return "digits"
    if any(char.isalpha() for char in text) and not text.lstrip().startswith("\\"):
        return "words"
    return "formatting"


def _of_kind(credits: Iterable[TokenCredit], kind: TokenKind, rows: int) -> list[TokenCredit]:
    return [credit for credit in credits if credit.kind == kind][:rows]
