"""How a command ends with an error: one line, from one process, however many processes there are."""

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


def exit_with_error(error: BaseException) -> NoReturn:
    """Report the error and exit: one line and code 2 if a person can fix it, otherwise a traceback and code 1.

    With several processes the first one to fail reports, with its rank; the launcher ends the others.
    """
    error = machine_error(error) or error
    rank, ranks = rank_and_size()
    fixable = isinstance(error, (UserError, BackendError))
    if ranks == 1:
        if not fixable:
            raise error
        typer.echo(f"delta: {one_line(error)}", err=True)
        sys.exit(2)
    lost = is_lost_peer(error)
    if claim_failure(f"rank {rank}: {error}", PATIENCE if lost else 0.0):
        if fixable:
            typer.echo(f"delta: rank {rank}: {one_line(error)}", err=True)
        elif lost:
            typer.echo(f"delta: {LostPeerError(rank)}", err=True)
        else:
            print(f"delta: rank {rank} failed:", file=sys.stderr)
            traceback.print_exception(error)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(2 if fixable or lost else 1)  # not sys.exit: leaving the process group would wait for the others


def one_line(error: BaseException) -> str:
    """The message with line breaks, control characters and direction marks written out, and commands as typed here."""
    from delta_cli.cli.program import as_typed
    from delta_cli.text import visible

    return visible(as_typed(str(error)), " ")


def machine_error(error: BaseException) -> UserError | None:
    """The line for an error of the machine (memory, threads, files); None for any other error."""
    if isinstance(error, MemoryError) or (isinstance(error, ImportError) and _out_of_memory(error)):
        reason = f" ({error})" if str(error) else ""
        return UserError(
            f"out of memory{reason}; make rollout.batch or update.micro_batch_tokens smaller, or raise the limit on "
            "memory (ulimit -v); delta doctor says what needs how much"
        )
    if isinstance(error, RuntimeError) and "start new thread" in str(error):
        return UserError("no further thread can be started; raise the limits on processes and memory (ulimit -u, -v)")
    if isinstance(error, BrokenPipeError) or not isinstance(error, OSError) or error.errno is None:
        return None
    if error.errno == errno.ENAMETOOLONG:
        return UserError(f"{error.filename}: no file can have a name as long as this; give a shorter one")
    where = f"{error.filename}: " if error.filename else ""
    return UserError(f"{where}the system refuses: {error.strerror or error}{_remedy(error.errno)}")


def _out_of_memory(error: BaseException | None) -> bool:
    """Whether a library could not be loaded for want of memory; packages wrap that in errors of their own."""
    while error is not None:
        if isinstance(error, MemoryError) or "annot allocate memory" in str(error) or "map segment" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def _remedy(number: int) -> str:
    remedies = {
        errno.ENOSPC: "; free some space on the disk",
        errno.EDQUOT: "; free some space within the disk quota",
        errno.EACCES: "; change the permissions, or give another path",
        errno.EROFS: "; give a path on a disk that can be written",
        errno.EMFILE: "; raise the limit on open files (ulimit -n)",
        errno.ENFILE: "; close other programs that hold files open",
        errno.EAGAIN: "; raise the limit on processes (ulimit -u)",
        errno.ENOMEM: "; close other programs, or raise the limit on memory (ulimit -v)",
    }
    return remedies.get(number, "")
