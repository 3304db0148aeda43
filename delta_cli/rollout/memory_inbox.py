"""Folders in memory for published weights, and removal of those that killed runs have left there."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

MEMORY = Path("/dev/shm")  # a file system in memory, on machines that have one
PREFIX = "delta-weights-"
LOCK = "in-use"  # a file in each folder, locked for as long as its run lives


@contextmanager
def opened() -> Iterator[Path]:
    """A folder in memory that goes on leaving. If the process is killed, the next ``sweep`` removes it.

    The operating system releases the lock when the process ends, however it ends; a process id would not do, because
    containers that share the memory number their processes alike.
    """
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=MEMORY))
    try:
        lock = os.open(folder / "new", os.O_CREAT | os.O_RDWR)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            (folder / "new").rename(folder / LOCK)  # appears when it is locked, so that no sweep comes in between
            yield folder
        finally:
            os.close(lock)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def sweep() -> list[Path]:
    """Remove this user's folders that no living run holds; those that were removed."""
    removed = []
    for folder in MEMORY.glob(f"{PREFIX}*") if MEMORY.is_dir() else ():
        with suppress(OSError):
            if folder.lstat().st_uid == os.getuid() and not folder.is_symlink() and _is_abandoned(folder / LOCK):
                shutil.rmtree(folder)
                removed.append(folder)
    return removed


def _is_abandoned(file: Path) -> bool:
    """Whether no process holds the lock. A folder without one is being made."""
    try:
        lock = os.open(file, os.O_RDWR | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(lock)
    return True
