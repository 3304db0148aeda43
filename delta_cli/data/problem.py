"""One question with its gold answer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

DataRow = Mapping[str, Any]  # one row of a data set, by column
DataSplit = Literal["train", "held_out"]  # of generated problems


@dataclass(frozen=True)
class Problem:
    """A question to sample responses to, and the gold answer to grade them by.

    ``answer`` is text for mathematics, a table of tests for code (see ``delta_cli.rewards.code.verdict``), and
    whatever the user's own function reads for a custom reward.
    """

    id: str
    question: str
    answer: Any
    source: str = ""  # the data set or suite it came from
    kind: str = ""  # of problem, if the source has several
    columns: DataRow = field(default_factory=dict, hash=False)  # those that data.columns names
    turns: tuple[Mapping[str, Any], ...] = field(default=(), hash=False)  # of a chat, before the question
    pass_rate: float | None = None  # share of right responses, as data.pass_rate_file says


def question_key(question: str, turns: Sequence[Mapping[str, Any]] = ()) -> str:
    """What tells a problem from others: its question, and the turns before it if there are any."""
    return json.dumps([*turns, question]) if turns else question
