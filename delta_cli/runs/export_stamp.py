"""A file beside exported weights that says which step of a run they come from.

It is written last: a folder without it was not exported completely, or comes from elsewhere.
"""

from __future__ import annotations

import json
from pathlib import Path

FILE = "delta.json"


def write_step(folder: Path, step: int) -> None:
    """Mark an exported model folder as the weights after ``step``."""
    (folder / FILE).write_text(json.dumps({"format": 1, "step": step}) + "\n", encoding="utf-8")


def step_of(folder: Path) -> int | None:
    """The step whose weights a model folder holds; None if the folder does not say."""
    try:
        step = json.loads((folder / FILE).read_text(encoding="utf-8"))["step"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return step if isinstance(step, int) else None
