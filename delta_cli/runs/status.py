"""How a run ended the last time: a file in its folder that is there only while nobody trains in it."""

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
class Ending:
    """What the process that trained said last; a process that was killed says nothing."""

    state: Literal["done", "stopped", "failed"]
    reason: str = ""  # of a failure, one line


@contextmanager
def recorded_end(folder: Path, writes: bool = True) -> Iterator[None]:
    """Write how what is done inside ends; only the process that holds the folder ``writes``."""
    if not writes:
        yield
        return
    (folder / FILE).unlink(missing_ok=True)
    try:
        yield
    except BaseException as error:  # looked at, not handled: it goes on up
        stopped = isinstance(error, Interrupted)
        _write(folder, Ending("stopped") if stopped else Ending("failed", _line(error)))
        raise
    _write(folder, Ending("done"))


def ending_of(folder: Path) -> Ending | None:
    """How a run ended; None where its process did not say."""
    try:
        return Ending(**json.loads((folder / FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def _write(folder: Path, ending: Ending) -> None:
    with suppress(OSError):  # a full disk: the run has failed of it, or has said that it is done
        (folder / FILE).write_text(json.dumps(asdict(ending), ensure_ascii=False) + "\n", encoding="utf-8")


def _line(error: BaseException) -> str:
    text = str(error).partition("\n")[0][:300]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
