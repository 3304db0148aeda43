"""How a command ends that cannot go on: one line from one process, however many there are."""

from __future__ import annotations

import errno
import os
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import NoReturn

import typer

from backends import launch
from backends.errors import BackendError, LostPeerError
from backends.process import rank_and_size
from delta_cli.errors import UserError

PATIENCE = 2.0  # seconds that a process which lost another one leaves that one to say why
_PEERS = ("DistBackendError", "DistNetworkError", "DistStoreError")  # torch's, named so that torch is not imported


def fail(error: BaseException) -> NoReturn:
    """Report the error and end: exit code 2 with one line for what a person can put right, else a traceback and 1.

    Of several processes the first to fail reports, with its rank; the others are about to be ended.
    """
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        error = UserError(f"{error.filename}: no file can have a name as long as this; give a shorter one")
    rank, ranks = rank_and_size()
    mendable = isinstance(error, (UserError, BackendError))
    if ranks == 1:
        if not mendable:
            raise error
        typer.echo(f"delta: {error}", err=True)
        sys.exit(2)
    lost = isinstance(error, LostPeerError) or type(error).__name__ in _PEERS or "gloo" in str(error)
    if lost:
        time.sleep(PATIENCE)
    if _first():
        if mendable:
            typer.echo(f"delta: rank {rank}: {error}", err=True)
        elif lost:
            typer.echo(f"delta: {LostPeerError(rank)}", err=True)
        else:
            print(f"delta: rank {rank} failed:", file=sys.stderr)
            traceback.print_exception(error)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(2 if mendable or lost else 1)  # not sys.exit: leaving the group would wait for the others


def _first() -> bool:
    """Whether no other process of this run on this machine has reported before."""
    run = (
        f"{os.getppid()}-{os.environ.get('TORCHELASTIC_RUN_ID', '')}-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '')}"
    )
    file = Path(os.environ.get(launch.FAILURE) or Path(tempfile.gettempdir()) / f"delta-failed-{run}")
    try:
        file.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True
