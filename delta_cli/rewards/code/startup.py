"""How a process in the sandbox starts: as another user, with limits, its standard output set aside."""

from __future__ import annotations

import os
import resource
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import IO, Any

    Job = dict[str, Any]

SET_DEATH_SIGNAL, SET_SECCOMP, SET_NO_NEW_PRIVILEGES = 1, 22, 38  # of prctl
FILTER_MODE = 2
KILL_SIGNAL = 9


def begin(file: IO[bytes]) -> Job:
    """Read the job that follows the modules in the file, and confine this process as it says."""
    import marshal

    with file:
        job: Job = marshal.load(file)
    if job["user"] is not None:
        become(job["user"])
    limit(**job["limits"])
    if job["filter"] is not None:
        filter_calls(job["filter"], job["parent"])
    sys.path.append(job["packages"])
    return job


def become(user: int) -> None:
    """Go on as another user, without capabilities."""
    os.setgroups([])
    os.setgid(user)
    os.setuid(user)


def limit(seconds: int, memory: int, processes: int, file_bytes: int) -> None:
    """Bound what this process and its children may use; the program cannot raise it again."""
    limits = [
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, file_bytes),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_NPROC, processes),
        (resource.RLIMIT_AS, memory),
    ]
    for kind, value in limits:
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        try:
            resource.setrlimit(kind, (value, value))
        except (ValueError, OSError):
            if sys.platform == "linux":  # macOS does not bound the address space
                raise


def filter_calls(program: bytes, parent: int) -> None:
    """Without bubblewrap: end with the parent, and let the kernel refuse the system calls of a seccomp filter."""
    import ctypes

    class Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p)]

    prctl = ctypes.CDLL(None, use_errno=True).prctl
    filter_program = ctypes.byref(Program(len(program) // 8, program))
    prctl(SET_DEATH_SIGNAL, KILL_SIGNAL, 0, 0, 0)
    prctl(SET_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    if os.getppid() != parent or prctl(SET_SECCOMP, FILTER_MODE, filter_program, 0, 0):
        os._exit(1)


def take_stdout() -> Any:
    """This process's stdout as a file; what is printed from now on goes nowhere."""
    out = os.fdopen(os.dup(1), "w")
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 0)
    os.dup2(nowhere, 1)
    return out
