"""Facts about this process and about those that were started with it: memory, cores, ranks, failures."""

from __future__ import annotations

import json
import os
import socket
import time
from contextlib import suppress
from pathlib import Path

QUOTA = Path("/sys/fs/cgroup/cpu.max")  # a container's share of processor time
MEMORY = Path("/sys/fs/cgroup")  # with a container's limit on memory
FAILURE = "DELTA_FAILURE"  # variable with the file that the first process to fail creates, so that only one reports
PATIENCE = 2.0  # seconds that a process which lost its peers waits for the one that failed to report
TINY = 1_000_000  # parameters

_claims: dict[str, bool] = {}  # answers that claim_failure() has given in this process


def free_memory() -> int:
    """Bytes of host memory that this machine, or this process's container, has left; 2**63 if it does not say."""
    found = [2**63]
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        line = next(
            line for line in meminfo.read_text(encoding="ascii").splitlines() if line.startswith("MemAvailable")
        )
        found.append(int(line.split()[1]) * 1024)
    with suppress(OSError, ValueError):  # no limit, or an older kernel
        found.append(int((MEMORY / "memory.max").read_text()) - int((MEMORY / "memory.current").read_text()))
    return min(found)


def usable_cores() -> int:
    """Processor cores that this process may use, by its affinity and its container's quota."""
    affinity = getattr(os, "sched_getaffinity", None)  # Linux
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    try:
        limit, period = QUOTA.read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return cores
    return cores if limit == "max" else max(1, min(cores, round(int(limit) / int(period))))


def default_threads(parameters: int) -> int:
    """Threads for this process: OMP_NUM_THREADS, or its share of the usable cores; one for a tiny model.

    Between two of a tiny model's operations, threads wait for each other longer than they compute
    (benchmarks/results/busy.json). The number depends on the model and the machine, not on how busy the machine is,
    since another number of threads may round differently.
    """
    asked = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()  # a list has numbers for nested regions
    if asked.isdigit() and int(asked):
        return int(asked)
    if parameters < TINY:
        return 1
    return max(1, usable_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def rank_and_size() -> tuple[int, int]:
    """The rank of this process and the number of ranks, as torchrun, mlx.launch or backends.launch started them."""
    if "WORLD_SIZE" in os.environ:
        return int(os.environ.get("RANK", "0")), int(os.environ["WORLD_SIZE"])
    for variable in ("MLX_HOSTFILE", "MLX_IBV_DEVICES"):  # addresses of a ring or devices of JACCL, one for each rank
        if variable in os.environ and "MLX_RANK" in os.environ:
            entries = Path(os.environ[variable]).read_text(encoding="utf-8")
            return int(os.environ["MLX_RANK"]), len(json.loads(entries)) if entries.strip() else 1  # -n 1 writes none
    return 0, 1


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped, as by SIGSTOP. False on systems other than Linux, which do not say so cheaply."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] == "T"


def reachable_address(host: str | None = None) -> str:
    """The IPv4 address at which ``host`` reaches this machine; its own if there is no such network.

    Without a host: the run's other processes.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host or os.environ.get("MASTER_ADDR", "127.0.0.1"), 9))  # sends nothing, but chooses a route
        except OSError:  # IPv6 only
            return "127.0.0.1"
        return str(probe.getsockname()[0])


def claim_failure(reason: str, patience: float = 0.0, file: str | None = None) -> bool:
    """Whether this is the first process of the run on this machine to fail, the one that reports its ``reason``.

    Waits up to ``patience`` seconds for another process to be the first. Further calls give the same answer. Without
    a folder that only this run's processes share, the answer is True.
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
            except OSError:  # the disk is full, or the launcher has removed its folder
                _claims[file] = True
        else:
            time.sleep(0.02)
    return _claims[file]


def _failure_file() -> str | None:
    """A file in a folder that the launcher made for this run's processes alone; None if there is none."""
    if FAILURE in os.environ:
        return os.environ[FAILURE]
    if "TORCHELASTIC_ERROR_FILE" in os.environ:  # …/attempt_0/<rank>/error.json, in a temporary folder of torchrun's
        return str(Path(os.environ["TORCHELASTIC_ERROR_FILE"]).parents[1] / "delta-failed")
    return None
