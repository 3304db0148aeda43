"""One line of the doctor's report."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Finding:
    """What was checked, what was found, and what to do if it is wrong."""

    level: Literal["ok", "note", "wrong"]
    subject: str
    text: str


def gib(count: int) -> str:
    """Bytes in GiB, or in MiB below one."""
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"
