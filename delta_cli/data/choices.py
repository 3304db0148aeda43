"""Multiple-choice questions: options under letters, and data sets that keep them in columns of their own."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from delta_cli.data.problem import Row

LETTERS = "ABCDEFGHIJ"
GPQA_COLUMNS = ("Question", "Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")


def lettered(question: str, options: Sequence[str]) -> str:
    """The question with its options below it, each after its letter."""
    lines = [f"({mark}) {option.strip()}" for mark, option in zip(LETTERS, options, strict=False)]
    return "\n".join([question.strip(), "", *lines, "", "Answer with the letter of the one right option."])


def gpqa_question(row: Row) -> str:
    """GPQA: the right option stands among three wrong ones in an order that only their texts decide."""
    return lettered(row["Question"], _gpqa_options(row))


def gpqa_answer(row: Row) -> str:
    """The letter of the right option."""
    return LETTERS[_gpqa_options(row).index(row["Correct Answer"])]


def _gpqa_options(row: Row) -> list[str]:
    question = row["Question"]
    return sorted(
        (row[column] for column in GPQA_COLUMNS[1:]),
        key=lambda option: hashlib.sha256(f"{question}\0{option}".encode()).digest(),
    )


def mmlu_pro_question(row: Row) -> str:
    """MMLU-Pro: a list of up to ten options; the answer is a letter already."""
    return lettered(row["question"], row["options"])
