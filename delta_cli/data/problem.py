"""One question with its gold answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Row = Mapping[str, Any]  # one row of a data set, by column


@dataclass(frozen=True)
class Problem:
    """A question to sample responses to, and what a reward needs to judge them.

    ``answer`` is the gold answer: a string for mathematics, a tests table for code (see
    ``delta_cli.rewards.code.verdict``), whatever the user's own function reads for a custom reward.
    """

    id: str
    question: str
    answer: Any
    source: str = ""  # the data set or suite it came from
    kind: str = ""  # of problem, where the source tells several apart
