"""Files of pass rates: the share of right responses to each problem."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from backends.arrays import Doubles
from delta_cli.data import sources
from delta_cli.data.problem import Problem, question_key
from delta_cli.data.prompt_order import PassRate
from delta_cli.errors import UserError

FILE = "pass_rates.jsonl"  # in a checkpoint, and in the folder of an evaluation that `delta data rate` made


def write_pass_rates(file: Path, problems: Sequence[Problem], pass_rates: Doubles) -> None:
    """Write a line for each problem whose rate [P] is known, that is not NaN."""
    with file.open("w", encoding="utf-8") as stream:
        for place, (problem, rate) in enumerate(zip(problems, pass_rates.tolist(), strict=True)):
            if not math.isnan(rate):
                turns = {"turns": problem.turns} if problem.turns else {}
                line = {"place": place, "problem": problem.id, "question": problem.question} | turns
                stream.write(json.dumps(line | {"pass_rate": rate}) + "\n")


def read_measured(file: Path) -> list[PassRate]:
    """The rates in a checkpoint by the places of the problems; none if it has no such file."""
    if not file.exists():
        return []
    with file.open(encoding="utf-8") as stream:
        return [(line["place"], line["pass_rate"]) for line in map(json.loads, stream)]


def read_pass_rates(path: str) -> dict[str, float]:
    """The rates in a file by :func:`question_key`: lines with question and pass_rate, or responses with correct.

    Raises UserError that names the file, the line and the reason.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise UserError(f"data.pass_rate_file: {path}: no such file; write one with `delta data rate RECIPE`")
    shares: dict[str, list[float]] = defaultdict(list)
    for where, row in sources.json_lines(file):
        question, share = row.get("question"), _share(row)
        if not isinstance(question, str) or share is None:
            raise UserError(
                f"data.pass_rate_file: {where}: a line needs question, and pass_rate from 0 to 1 (or correct, true or "
                "false, for each response)"
            )
        shares[question_key(question, row.get("turns") or ())].append(share)
    return {key: math.fsum(found) / len(found) for key, found in shares.items()}


def _share(row: Mapping[str, Any]) -> float | None:
    """The rate in a line, or that of a single response; None if it says neither."""
    if isinstance(correct := row.get("correct"), bool):
        return float(correct)
    rate = row.get("pass_rate")
    return float(rate) if isinstance(rate, int | float) and 0 <= rate <= 1 else None
