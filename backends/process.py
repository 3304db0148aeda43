"""What the operating system knows of this process, and of those that were started with it."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from pathlib import Path

QUOTA = Path("/sys/fs/cgroup/cpu.max")  # of a container's processor time
FAILURE = "DELTA_FAILURE"  # names the file that the first of several processes to fail creates, so that one reports
PATIENCE = 2.0  # seconds that a process which lost another one leaves that one to say why

_claims: dict[str, bool] = {}  # what claim_failure() has found out in this process


def peak_resident() -> int:
    """Bytes: the most this process has held in memory so far."""
    status = Path("/proc/self/status")
    if status.exists():  # Linux: getrusage's peak would begin with that of the process that started this one
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    import resource  # not on Windows

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def usable_cores() -> int:
    """Processor cores that this process may use: not those it is bound away from, nor beyond a container's quota."""
    affinity = getattr(os, "sched_getaffinity", None)  # Linux
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    try:
        limit, period = QUOTA.read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return cores
    return cores if limit == "max" else max(1, min(cores, round(int(limit) / int(period))))


def default_threads() -> int:
    """Threads for this process: what OMP_NUM_THREADS says, or its share of the cores that may be used.

    A function of the machine, not of how busy it is: another number of threads may round otherwise.
    """
    asked = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()  # a list is for nested regions
    if asked.isdigit() and int(asked):
        return int(asked)
    return max(1, usable_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def rank_and_size() -> tuple[int, int]:
    """Which of how many ranks this process was started as: by torchrun, by mlx.launch, or by backends.launch."""
    if "WORLD_SIZE" in os.environ:
        return int(os.environ.get("RANK", "0")), int(os.environ["WORLD_SIZE"])
    for variable in ("MLX_HOSTFILE", "MLX_IBV_DEVICES"):  # the ring's addresses, or JACCL's devices: one entry a rank
        if variable in os.environ and "MLX_RANK" in os.environ:
            entries = Path(os.environ[variable]).read_text(encoding="utf-8")
            return int(os.environ["MLX_RANK"]), len(json.loads(entries)) if entries.strip() else 1  # -n 1 writes none
    return 0, 1


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped, as by SIGSTOP. Only Linux says so cheaply; elsewhere no process is."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] == "T"


def reachable_address() -> str:
    """The IPv4 address by which the run's other processes reach this machine."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((os.environ.get("MASTER_ADDR", "127.0.0.1"), 9))  # sends nothing: it only chooses a route
        return str(probe.getsockname()[0])


def claim_failure(reason: str, patience: float = 0.0, file: str | None = None) -> bool:
    """Whether this is the first of the run's processes on this machine to fail, whose one-line ``reason`` counts.

    Waits up to ``patience`` seconds for another process to be the first. Asked again, it gives the same answer. True
    if the processes of the run share no folder that is theirs alone.
    """
    file = file or _failure_file()
    if file is None:
        return True
    end = time.monotonic() + patience
    while file not in _claims:
        if Path(file).exists():
            _claims[file] = False
        elif time.monotonic() >= end:
            try:
                with open(file, "x", encoding="utf-8") as stream:
                    stream.write(reason + "\n")
                _claims[file] = True
            except FileExistsError:
                _claims[file] = False
            except OSError:  # no room, or the launcher has removed its folder
                _claims[file] = True
        else:
            time.sleep(0.02)
    return _claims[file]


def _failure_file() -> str | None:
    """A file in a folder that exists for this start of these processes only; None if no launcher has made one."""
    if FAILURE in os.environ:
        return os.environ[FAILURE]
    if "TORCHELASTIC_ERROR_FILE" in os.environ:  # …/attempt_0/<rank>/error.json, in a temporary folder of torchrun
        return str(Path(os.environ["TORCHELASTIC_ERROR_FILE"]).parents[1] / "delta-failed")
    return None
