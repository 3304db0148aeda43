"""What a data file holds: which column is the question, which the answer, and how its answers are checked."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from delta_cli.data.problem import DataRow
from delta_cli.errors import UserError

# Names of columns, the likeliest first.
QUESTIONS = ("question", "problem", "prompt", "query", "instruction", "input", "text", "messages")
ANSWERS = (
    *("answer", "final_answer", "gold", "gold_answer", "ground_truth", "expected_answer", "target", "label"),
    *("expected", "solution", "output", "tests", "response", "completion"),
)
FINAL = re.compile(r"####\s*(\S[^\n]*)\s*$")
FINAL_PATTERN = r"####\s*(.+)"
LETTER = re.compile(r"\(?[A-J]\)?[.:]?")
NUMBER = re.compile(r"[-+]?[\d.,]+(?:/\d+)?\s?%?")
SHARE = 0.9  # of the rows that must be of a kind


@dataclass(frozen=True)
class Columns:
    """The columns found, and the reward that fits the answers."""

    question: str
    answer: str
    kind: Literal["math", "choice", "code"]
    pattern: str | None  # of the answer in its field
    why: str  # the kind, for people


def find_columns(
    source: str, rows: Sequence[DataRow], question: str | None = None, answer: str | None = None
) -> Columns:
    """Question, answer and reward of ``rows``, the first of a file; what is given is taken as it is.

    Raises UserError, with the columns there are, if a column cannot be guessed.
    """
    if not rows:
        raise UserError(f"{source}: holds no rows; write one JSON object a line, with a question and an answer")
    there = list(rows[0])
    found_question = _choose("question", question, QUESTIONS, there, source)
    found_answer = _choose("answer", answer, ANSWERS, there, source)
    kind, pattern, why = _kind([row.get(found_answer) for row in rows])
    return Columns(found_question, found_answer, kind, pattern, why)


def _choose(what: str, given: str | None, usual: Sequence[str], there: Sequence[str], source: str) -> str:
    if given is not None:
        if given in there:
            return given
        raise UserError(f"--{what} {given}: {source} has no such column; its columns are {', '.join(there)}")
    by_name = {name.lower(): name for name in reversed(there)}
    for name in usual:
        if name in by_name:
            return by_name[name]
    raise UserError(
        f"{source}: none of the columns {', '.join(there)} is known to be the {what}; name it with --{what} COLUMN"
    )


def _kind(answers: Sequence[Any]) -> tuple[Literal["math", "choice", "code"], str | None, str]:
    """The reward's kind, the pattern of the answer in its field, and a reason."""
    if _most(isinstance(answer, dict) for answer in answers):
        return "code", None, "the answers are objects: tests of a program"
    texts = [str(answer).strip() for answer in answers if answer is not None]
    if _most(FINAL.search(text) is not None for text in texts):
        return "math", FINAL_PATTERN, 'the answers end in "#### value"'
    if _most(LETTER.fullmatch(text) is not None for text in texts):
        return "choice", None, "the answers are letters"
    if _most(NUMBER.fullmatch(text) is not None for text in texts):
        return "math", None, "the answers are numbers"
    if texts and sum(map(len, texts)) / len(texts) > 60:
        return "math", None, "LONG TEXTS, which no verifier can check: see docs/adding.md for a reward of your own"
    return "math", None, "compared as mathematics"


def _most(hits: Any) -> bool:
    found = list(hits)
    return bool(found) and math.fsum(found) >= SHARE * len(found)
