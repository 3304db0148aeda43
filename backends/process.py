"""What the operating system knows of this process, and of those that were started with it."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

QUOTA = Path("/sys/fs/cgroup/cpu.max")  # of a container's processor time


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
