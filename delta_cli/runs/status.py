"""How a run last ended: a file in its folder that exists only while no process trains in it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from delta_cli.errors import Interrupted

FILE = "end.json"


@dataclass(frozen=True)
class RunStatus:
    """The last word of the process that trained; a killed process leaves none."""

    state: Literal["done", "stopped", "failed"]
    reason: str = ""  # of a failure, one line


@contextmanager
def recorded_status(folder: Path, writes: bool = True) -> Iterator[None]:
    """Record how the block ends; only the process that holds the folder ``writes``."""
    if not writes:
        yield
        return
    (folder / FILE).unlink(missing_ok=True)
    try:
        yield
    except BaseException as error:  # only recorded, then raised again
        stopped = isinstance(error, Interrupted)
        _write(folder, RunStatus("stopped") if stopped else RunStatus("failed", _line(error)))
        raise
    _write(folder, RunStatus("done"))


def read_status(folder: Path) -> RunStatus | None:
    """How a run ended; None if its process left no status."""
    try:
        return RunStatus(**json.loads((folder / FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def _write(folder: Path, ending: RunStatus) -> None:
    with suppress(OSError):  # a full disk must not hide the run's own result
        (folder / FILE).write_text(json.dumps(asdict(ending), ensure_ascii=False) + "\n", encoding="utf-8")


def _line(error: BaseException) -> str:
    text = str(error).partition("\n")[0][:300]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
