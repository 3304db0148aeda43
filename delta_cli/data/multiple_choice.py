"""Multiple-choice questions: lettered options, for data sets that keep their options in separate columns."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from delta_cli.data.problem import DataRow

LETTERS = "ABCDEFGHIJ"
GPQA_COLUMNS = ("Question", "Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")


def lettered(question: str, options: Sequence[str]) -> str:
    """The question with its options below it, each after its letter."""
    lines = [f"({mark}) {option.strip()}" for mark, option in zip(LETTERS, options, strict=False)]
    return "\n".join([question.strip(), "", *lines, "", "Answer with the letter of the one right option."])


def gpqa_question(row: DataRow) -> str:
    """GPQA: the right option among three wrong ones, in an order that depends on their texts alone."""
    return lettered(row["Question"], _gpqa_options(row))


def gpqa_answer(row: DataRow) -> str:
    """GPQA: the letter of the right option."""
    return LETTERS[_gpqa_options(row).index(row["Correct Answer"])]


def _gpqa_options(row: DataRow) -> list[str]:
    question = row["Question"]
    return sorted(
        (row[column] for column in GPQA_COLUMNS[1:]),
        key=lambda option: hashlib.sha256(f"{question}\0{option}".encode()).digest(),
    )


def mmlu_pro_question(row: DataRow) -> str:
    """MMLU-Pro: up to ten options in a list; the answer column already holds a letter."""
    return lettered(row["question"], row["options"])
