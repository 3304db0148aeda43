"""The solvers of the bench's tasks: which tokens of a response can be wrong, and which are."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from backends.arrays import Bools
from delta_cli.bench.letters import FREE_LETTERS, LINE, deciding_characters
from delta_cli.credit.weight_functions import CreditInput
from delta_cli.data import arithmetic
from delta_cli.data.problem import Problem
from delta_cli.recipe.data import Arithmetic
from delta_cli.rewards.equations import find_equations


@dataclass(frozen=True)
class TokenMarks:
    """What a solver says about the N tokens of a batch."""

    decisive: Bools  # [N] the token is part of an operand or a result
    wrong: Bools  # [N] the token is wrong, given what the response says before it


def token_marks(batch: CreditInput) -> TokenMarks:
    """The marks of a batch whose problems are those of one of the bench's tasks."""
    decisive = np.zeros(len(batch.tokens), bool)
    wrong = np.zeros(len(batch.tokens), bool)
    assert batch.pieces is not None
    for row, question in enumerate(batch.questions):
        pieces = batch.pieces(row)
        if not pieces:
            continue
        can_be_wrong, are_wrong = _characters(question, str(batch.answers[row]), "".join(pieces))
        first = batch.starts[row]
        decisive[first + _tokens(pieces, can_be_wrong)] = True
        wrong[first + _tokens(pieces, are_wrong)] = True
    return TokenMarks(decisive | wrong, wrong)


def _tokens(pieces: Sequence[str], characters: Sequence[int]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array([arithmetic.token_at(pieces, character) for character in characters], np.int64)


def _characters(question: str, answer: str, text: str) -> tuple[list[int], list[int]]:
    """The characters that can be wrong, and those that are."""
    text = text.partition("<|endoftext|>")[0]
    if text.startswith(LINE[0]) or FREE_LETTERS.match(text):
        return deciding_characters(text)
    digits = [place for place, character in enumerate(text) if character.isdigit()]
    if found := re.fullmatch(r"(\d+)\+(\d+)=\?", question):
        problem = Problem(question[:-2], question, answer, arithmetic.SOURCE)
        error = arithmetic.first_error(problem, text, Arithmetic(digits=len(found[1])))
        return digits, [] if error is None else [error]
    false = (equation for equation in find_equations(text) if not equation.holds)
    return digits, [equation.stop - 1 for equation in false][:1]
