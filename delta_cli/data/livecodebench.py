"""LiveCodeBench: contest problems with tests as JSON, the hidden ones packed."""

from __future__ import annotations

import base64
import io
import json
import pickle
import zlib
from typing import Any

from delta_cli.data.problem import DataRow
from delta_cli.errors import UserError

COLUMNS = ("question_content", "starter_code", "public_test_cases", "private_test_cases", "metadata")


class _OnlyData(pickle.Unpickler):
    """Reads texts and numbers; a pickle that names a class or a function is refused."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name} is no plain data")


def question(row: DataRow) -> str:
    """The problem with what is to be written: a function of the starter code, or a program."""
    text = row["question_content"].strip()
    if row["starter_code"].strip():
        return (
            f"{text}\n\nComplete this code. Give it whole, in one ```python block.\n\n"
            f"```python\n{row['starter_code'].rstrip()}\n```"
        )
    return (
        f"{text}\n\nWrite a Python program that reads from standard input and writes to standard output. "
        "Give it in one ```python block."
    )


def tests(row: DataRow) -> dict[str, Any] | None:
    """All tests in the form that rewards.code takes; None where there are none.

    Raises UserError where a row does not hold what its columns promise.
    """
    try:
        return _tests(row)
    except (ValueError, KeyError, TypeError, IndexError, EOFError, zlib.error, pickle.UnpicklingError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise UserError(
            f"LiveCodeBench: the tests of a problem cannot be read ({reason}); get the file again"
        ) from error


def _tests(row: DataRow) -> dict[str, Any] | None:
    cases = [*json.loads(row["public_test_cases"] or "[]"), *_hidden(row["private_test_cases"] or "[]")]
    if not cases:
        return None
    if cases[0]["testtype"] == "stdin":
        return {"type": "stdio", "cases": [{"input": case["input"], "output": case["output"]} for case in cases]}
    name = json.loads(row["metadata"])["func_name"]
    in_class = "class Solution" in row["starter_code"]
    return {
        "type": "calls",
        "entry_point": f"Solution.{name}" if in_class else name,
        "cases": [
            {
                "args": [json.loads(line) for line in case["input"].split("\n") if line.strip()],
                "expected": json.loads(case["output"]),
            }
            for case in cases
        ],
    }


def _hidden(text: str) -> list[dict[str, str]]:
    """The hidden tests: JSON, or base64 of a compressed pickle of JSON."""
    try:
        found = json.loads(text)
    except ValueError:
        packed = zlib.decompress(base64.b64decode(text))
        found = json.loads(_OnlyData(io.BytesIO(packed)).load())
    return list(found)
