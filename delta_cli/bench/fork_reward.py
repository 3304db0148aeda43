"""The reward of the bench's task "fork": the one letter that decides."""

from __future__ import annotations

import re
from typing import Any

GOOD_LETTER = "a"
FORK = re.compile(r"\S+ ([a-z])(?!\S)")  # the second word, one letter


def reward(response: str, problem: Any) -> float:
    """1 if the deciding letter is the good one. The problem does not matter."""
    found = FORK.match(response)
    return float(found is not None and found[1] == GOOD_LETTER)
