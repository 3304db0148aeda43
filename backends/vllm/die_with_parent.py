"""Runs a command, and ends it with everything that it has started once the parent process is gone.

A script. Its standard input is a pipe that nobody writes to; the pipe closes when the parent ends, however it ends.
Without this, a server would outlive a run that was killed, and keep the GPU's memory.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress

GRACE_SECONDS = 10.0


def main() -> int:
    """The command's exit code, or 128 plus the number of the signal that ended it, as in a shell."""
    child = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, start_new_session=True)
    threading.Thread(target=_end_with_parent, args=(child,), daemon=True).start()
    code = child.wait()
    _signal(child.pid, signal.SIGKILL)  # processes that it left behind
    return code if code >= 0 else 128 - code


def _end_with_parent(child: subprocess.Popen[bytes]) -> None:
    while os.read(0, 4096):  # reading sys.stdin would hold a lock that keeps the interpreter from ending
        pass
    _signal(child.pid, signal.SIGTERM)
    try:
        child.wait(GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        _signal(child.pid, signal.SIGKILL)


def _signal(group: int, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


if __name__ == "__main__":
    sys.exit(main())
