"""The reward of the bench's task "fork": the one letter that decides."""

from __future__ import annotations

from typing import Any

GOOD_LETTER = "a"


def reward(response: str, problem: Any) -> float:
    """1 if the second word is the good letter. The problem does not matter."""
    return float(response.split(" ")[1:2] == [GOOD_LETTER])
