"""What the credit looks at in a language model's responses: kinds of tokens, surprise, the first wrong digit.

Everything here is computed from what a run recorded (rollouts/), so any run can be looked at afterwards. The
first wrong token of a calculation is found without the problem: it is the first character of a written
result, ``12 * 3 = 38``, that differs from what the left side is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, get_args

import numpy as np
from scipy import stats

from backends.arrays import Bools, Doubles
from delta_cli.data.tokenizer import Tokenizer
from delta_cli.runs.records import RecordedResponse

Kind = Literal["digits", "operators", "words", "formatting", "end"]
KINDS: tuple[Kind, ...] = get_args(Kind)
MAX_DIGITS = 12  # of an operand

_CALCULATION = re.compile(r"(?<![\d.,])(\d+)\s*([-+*/])\s*(\d+)\s*=\s*(-?\d+)(?![\d.,]*\d)")
_OPERATIONS = {"+": Fraction.__add__, "-": Fraction.__sub__, "*": Fraction.__mul__, "/": Fraction.__truediv__}


@dataclass(frozen=True)
class KindRow:
    """Tokens of one kind on one side: responses with A > 0, or with A < 0."""

    kind: Kind
    side: Literal["+", "−"]
    share: float  # of the side's tokens
    coefficient: float  # means
    surprisal: float  # nats
    entropy: float  # nats


@dataclass(frozen=True)
class Agreement:
    """Spearman's rank correlation of the coefficient with what a token's distribution tells, on one side."""

    side: Literal["+", "−"]
    surprisal: float
    entropy: float
    tokens: int


@dataclass(frozen=True)
class Finding:
    """The chance that the first wrong token of a calculation outweighs another token of its response."""

    weight: str
    auc: float  # against all other tokens; ties count half; NaN without such a response
    auc_digits: float  # against the response's other digits: a weight may favour digits as such
    responses: int


def kind_of(text: str) -> Kind:
    """The kind of a token by its text."""
    bare = text.strip()
    if bare.isdigit():
        return "digits"
    if bare and all(character in "+-*/=×÷" for character in bare):
        return "operators"
    return "words" if any(character.isalpha() for character in bare) else "formatting"


def kinds(response: RecordedResponse, tokenizer: Tokenizer) -> list[Kind]:
    """The kind of each token; "end" is the last one, where it says nothing but that the response ends."""
    found = [kind_of(piece) for piece in tokenizer.pieces(response.tokens)]
    if found and not response.truncated and not tokenizer.decode(response.tokens[-1:]).strip():
        found[-1] = "end"
    return found


def first_wrong(pieces: Sequence[str]) -> int | None:
    """Index of the first token of a result that is not what its left side is; None where every one is right."""
    text = "".join(pieces)
    for found in _CALCULATION.finditer(text):
        first, sign, second, given = found.groups()
        if max(len(first), len(second)) > MAX_DIGITS or (sign == "/" and not int(second)):
            continue
        value = _OPERATIONS[sign](Fraction(int(first)), Fraction(int(second)))
        if value == int(given):
            continue
        right = str(value)  # a fraction, where there is no whole result: wrong from the first digit that differs
        same = next((at for at, pair in enumerate(zip(given, right, strict=False)) if pair[0] != pair[1]), None)
        place = found.start(4) + (min(len(given), len(right)) if same is None else same)
        ends = np.cumsum([len(piece) for piece in pieces])
        return min(int(np.searchsorted(ends, place, side="right")), len(pieces) - 1)
    return None


def kind_rows(responses: Iterable[RecordedResponse], tokenizer: Tokenizer) -> list[KindRow]:
    """The table of kinds over responses with an advantage."""
    columns = _columns(responses, tokenizer)
    rows = []
    for side, sign in (("+", 1), ("−", -1)):
        own = columns["sign"] == sign
        for number, kind in enumerate(KINDS):
            chosen = own & (columns["kind"] == number)
            if chosen.any():
                means = (float(columns[name][chosen].mean()) for name in ("coefficient", "surprisal", "entropy"))
                rows.append(KindRow(kind, "+" if side == "+" else "−", float(chosen.sum() / own.sum()), *means))
    return rows


def agreements(responses: Iterable[RecordedResponse], tokenizer: Tokenizer) -> list[Agreement]:
    """How the coefficient goes along with surprisal and entropy."""
    columns = _columns(responses, tokenizer)
    found = []
    for sign in (1, -1):
        own = columns["sign"] == sign
        if own.sum() < 3:
            continue
        surprisal, entropy = (
            float(stats.spearmanr(columns["coefficient"][own], columns[name][own]).statistic) for name in _TOLD
        )
        found.append(Agreement("+" if sign > 0 else "−", surprisal, entropy, int(own.sum())))
    return found


_TOLD = ("surprisal", "entropy")


def findings(responses: Iterable[RecordedResponse], tokenizer: Tokenizer) -> list[Finding]:
    """How well coefficient, surprisal and entropy single out the first wrong token, in responses with A < 0."""
    scores: dict[str, list[tuple[float, float]]] = {"coefficient": [], "surprisal": [], "entropy": []}
    for response in responses:
        if not response.advantage < 0:
            continue
        pieces = tokenizer.pieces(response.tokens)
        wrong = first_wrong(pieces)
        if wrong is None:
            continue
        others = np.arange(len(pieces)) != wrong
        digits = others & np.array([piece.strip().isdigit() for piece in pieces])
        for name, values in _weights(response).items():
            scores[name].append((_above(values, wrong, others), _above(values, wrong, digits)))
    return [Finding(name, _mean(each, 0), _mean(each, 1), len(each)) for name, each in scores.items()]


def _weights(response: RecordedResponse) -> dict[str, Doubles]:
    return {
        "coefficient": response.coefficients,
        "surprisal": -response.logprobs,
        "entropy": response.entropies,
    }


def _above(values: Doubles, place: int, others: Bools) -> float:
    """The share of the others that the value at ``place`` is above, ties half; NaN without others."""
    if not others.any():
        return float("nan")
    return float(np.mean((values[place] > values[others]) + 0.5 * (values[place] == values[others])))


def _mean(pairs: Sequence[tuple[float, float]], column: int) -> float:
    values = [pair[column] for pair in pairs if pair[column] == pair[column]]
    return float(np.mean(values)) if values else float("nan")


def _columns(responses: Iterable[RecordedResponse], tokenizer: Tokenizer) -> dict[str, Doubles]:
    """The tokens of responses with an advantage, a column for each number."""
    parts: dict[str, list[Doubles]] = {name: [] for name in ("kind", "sign", "coefficient", "surprisal", "entropy")}
    for response in responses:
        if not response.advantage or not len(response):
            continue
        own = kinds(response, tokenizer)
        parts["kind"].append(np.array([KINDS.index(kind) for kind in own], float))
        parts["sign"].append(np.full(len(own), np.sign(response.advantage)))
        for name, values in _weights(response).items():
            parts[name].append(values)
    return {name: np.concatenate([np.zeros(0), *values]) for name, values in parts.items()}
