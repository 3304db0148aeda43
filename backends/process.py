"""What the operating system knows of this process, and of those that were started with it."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path


def peak_resident() -> int:
    """Bytes: the most this process has held in memory so far."""
    status = Path("/proc/self/status")
    if status.exists():  # Linux: getrusage's peak would begin with that of the process that started this one
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    import resource  # not on Windows

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def rank_and_size() -> tuple[int, int]:
    """Which of how many ranks this process was started as: by torchrun, by mlx.launch, or by backends.launch."""
    if "WORLD_SIZE" in os.environ:
        return int(os.environ.get("RANK", "0")), int(os.environ["WORLD_SIZE"])
    for variable in ("MLX_HOSTFILE", "MLX_IBV_DEVICES"):  # the ring's addresses, or JACCL's devices: one entry a rank
        if variable in os.environ and "MLX_RANK" in os.environ:
            entries = Path(os.environ[variable]).read_text(encoding="utf-8")
            return int(os.environ["MLX_RANK"]), len(json.loads(entries)) if entries.strip() else 1  # -n 1 writes none
    return 0, 1
