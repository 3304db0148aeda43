"""Runs a command and ends it, with all that it has started, when whoever started this goes away.

A script: its standard input is a pipe that nobody writes to, and that closes when the parent ends, however
it ends. A server would otherwise outlive a run that was killed, and keep the GPU's memory.
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
    """The command's exit code; 128 and the signal's number where one ended it, as shells have it."""
    child = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, start_new_session=True)
    threading.Thread(target=_end_with_parent, args=(child,), daemon=True).start()
    code = child.wait()
    _signal(child.pid, signal.SIGKILL)  # processes that it left behind
    return code if code >= 0 else 128 - code


def _end_with_parent(child: subprocess.Popen[bytes]) -> None:
    while os.read(0, 4096):  # unlike sys.stdin it holds no lock, without which the interpreter could not end
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
