"""How a run last ended: a file in its folder that exists only while no process trains in it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from backends.errors import is_lost_peer
from backends.process import PATIENCE, claim_failure, rank_and_size
from delta_cli.errors import Interrupted, typed_line

FILE = "end.json"


@dataclass(frozen=True)
class RunStatus:
    """How the process that trained ended; a killed process leaves no status."""

    state: Literal["done", "stopped", "failed"]
    reason: str = ""  # of a failure, one line


@contextmanager
def recorded_status(folder: Path, rank: int = 0) -> Iterator[None]:
    """Record how the block ends. Rank 0 writes it; if ranks fail, the first one to fail does."""
    if rank == 0:
        (folder / FILE).unlink(missing_ok=True)
    try:
        yield
    except Interrupted:
        if rank == 0:
            _write(folder, RunStatus("stopped"))
        raise
    except BaseException as error:  # only recorded, then raised again
        lost, line = is_lost_peer(error), typed_line(error)
        reason = f"rank {rank}: {line}" if rank_and_size()[1] > 1 else line
        if claim_failure(reason, PATIENCE if lost else 0.0) and not (lost and read_status(folder)):
            record_failure(folder, reason)
        raise
    if rank == 0:
        _write(folder, RunStatus("done"))


def record_failure(folder: Path, reason: str) -> None:
    """Record why a run failed, in one line."""
    _write(folder, RunStatus("failed", reason))


def read_status(folder: Path) -> RunStatus | None:
    """How a run ended; None if its process left no status."""
    try:
        return RunStatus(**json.loads((folder / FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def _write(folder: Path, ending: RunStatus) -> None:
    with suppress(OSError):  # a full disk must not hide the run's own result
        (folder / FILE).write_text(json.dumps(asdict(ending), ensure_ascii=False) + "\n", encoding="utf-8")
