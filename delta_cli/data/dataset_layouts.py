"""Where known data sets keep their questions and gold answers. A new one is a row of LAYOUTS."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from delta_cli.data import livecodebench, multiple_choice
from delta_cli.data.filters import field
from delta_cli.data.problem import DataRow

TestsTable = dict[str, Any]  # the form rewards.code_reward takes


@dataclass(frozen=True)
class DatasetLayout:
    """Names of the columns of a data set, and how they become a question and an answer."""

    config: str | None = None
    split: str = "train"
    question: str = "question"  # a path like ``a.b`` reaches into a column
    answer: str = "answer"
    answer_pattern: str | None = None  # regular expression; the last match's first group is the answer
    filter: str | None = None  # what to keep, where the user sets none
    id: str | None = None  # column that names a problem; otherwise its row number does
    read_question: Callable[[DataRow], str] | None = None  # instead of the field ``question``
    read_answer: Callable[[DataRow], Any] | None = None  # instead of the field ``answer``
    columns: tuple[str, ...] = ()  # what the two functions look at
    files: str | None = None  # of a hub repository whose loading script is not run: its JSON files


def stdio_or_calls(row: DataRow) -> TestsTable | str | None:
    """Eurus-2: JSON with inputs, outputs and, where a function is to be written, its name as fn_name.

    Rows of mathematics hold the plain answer, which is returned as it is.
    """
    truth: str | None = field(row, "reward_model.ground_truth")
    try:
        tests = json.loads(truth or "")
    except ValueError:
        return truth
    if not isinstance(tests, dict):
        return truth
    pairs = list(zip(tests.get("inputs") or [], tests.get("outputs") or [], strict=False))
    if not pairs:
        return None
    name = tests.get("fn_name")
    if name is None:
        texts = [{"input": _lines(given), "output": _lines(expected)} for given, expected in pairs]
        return {"type": "stdio", "cases": texts}
    # An output is wrapped in a list of its own throughout a row, or nowhere in it.
    wrapped = all(isinstance(expected, list) and len(expected) == 1 for _, expected in pairs)
    cases = [
        {"args": _arguments(given), "expected": expected[0] if wrapped else _json_or_text(expected)}
        for given, expected in pairs
    ]
    return {"type": "calls", "entry_point": name, "cases": cases}


def _lines(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _arguments(value: Any) -> list[Any]:
    """Arguments of a call: a list of them, or a text with one JSON value a line."""
    return value if isinstance(value, list) else [_json_or_text(line) for line in str(value).split("\n")]


def _json_or_text(value: Any) -> Any:
    try:
        return json.loads(value)
    except (TypeError, ValueError):
        return value


def _humaneval_question(row: DataRow) -> str:
    return f"Complete this Python function. Give it whole, in one ```python block.\n\n```python\n{row['prompt']}```"


def _humaneval_tests(row: DataRow) -> TestsTable:
    return {"type": "asserts", "code": f"{row['test']}\ncheck({row['entry_point']})"}


def _mbpp_question(row: DataRow) -> str:
    example = "\n".join(row["test_list"][:1])  # without it the function's name is not known
    return f"{row['prompt']}\nIt must pass: {example}\nGive the code in one ```python block."


def _mbpp_tests(row: DataRow) -> TestsTable:
    return {"type": "asserts", "code": "\n".join([*(row["test_imports"] or []), row["test"]])}


_CONTEST = DatasetLayout(question="problem", id="problem_idx")
_HUMANEVAL = DatasetLayout(
    split="test",
    id="task_id",
    read_question=_humaneval_question,
    read_answer=_humaneval_tests,
    columns=("prompt", "test", "entry_point"),
)

LAYOUTS: dict[str, DatasetLayout] = {
    "zwhe99/DeepMath-103K": DatasetLayout(answer="final_answer"),
    "openai/gsm8k": DatasetLayout(config="main", answer_pattern=r"####\s*(.+)"),
    "nlile/hendrycks-MATH-benchmark": DatasetLayout(question="problem", id="unique_id"),  # MATH without MATH-500
    "HuggingFaceH4/MATH-500": DatasetLayout(split="test", question="problem", id="unique_id"),
    "PRIME-RL/Eurus-2-RL-Data": DatasetLayout(
        question="prompt", read_answer=stdio_or_calls, columns=("reward_model",), filter='ability == "code"'
    ),
    "HuggingFaceH4/aime_2024": DatasetLayout(question="problem"),
    "MathArena/aime_2025": _CONTEST,
    "MathArena/aime_2026": _CONTEST,
    "MathArena/hmmt_feb_2025": _CONTEST,
    "MathArena/hmmt_nov_2025": _CONTEST,
    "MathArena/hmmt_feb_2026": _CONTEST,
    "MathArena/brumo_2025": _CONTEST,
    "openai/openai_humaneval": _HUMANEVAL,
    "evalplus/humanevalplus": _HUMANEVAL,
    "evalplus/mbppplus": DatasetLayout(
        split="test",
        id="task_id",
        read_question=_mbpp_question,
        read_answer=_mbpp_tests,
        columns=("prompt", "test_list", "test_imports", "test"),
    ),
    "livecodebench/code_generation_lite": DatasetLayout(
        split="test",
        id="question_id",
        read_question=livecodebench.question,
        read_answer=livecodebench.tests,
        columns=livecodebench.COLUMNS,
        files="test*.jsonl",
    ),
    "Idavidrein/gpqa": DatasetLayout(
        config="gpqa_diamond",
        id="Record ID",
        read_question=multiple_choice.gpqa_question,
        read_answer=multiple_choice.gpqa_answer,
        columns=multiple_choice.GPQA_COLUMNS,
    ),
    "TIGER-Lab/MMLU-Pro": DatasetLayout(
        split="test", id="question_id", read_question=multiple_choice.mmlu_pro_question, columns=("question", "options")
    ),
}
