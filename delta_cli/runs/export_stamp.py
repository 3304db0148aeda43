"""Which step of a run an exported model folder holds, in a file of its own beside the weights.

The file is written last: a folder without it was not exported to the end, or comes from elsewhere.
"""

from __future__ import annotations

import json
from pathlib import Path

FILE = "delta.json"


def write_step(folder: Path, step: int) -> None:
    """Say in an exported model folder that it holds the weights after ``step``."""
    (folder / FILE).write_text(json.dumps({"format": 1, "step": step}) + "\n", encoding="utf-8")


def step_of(folder: Path) -> int | None:
    """The step whose weights a model folder holds; None where it does not say."""
    try:
        step = json.loads((folder / FILE).read_text(encoding="utf-8"))["step"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return step if isinstance(step, int) else None
