"""How a command ends that cannot go on: one line from one process, however many there are."""

from __future__ import annotations

import errno
import os
import sys
import traceback
from typing import NoReturn

import typer

from backends.errors import BackendError, LostPeerError, is_lost_peer
from backends.process import PATIENCE, claim_failure, rank_and_size
from delta_cli.errors import UserError


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
    lost = is_lost_peer(error)
    if claim_failure(f"rank {rank}: {error}", PATIENCE if lost else 0.0):
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
