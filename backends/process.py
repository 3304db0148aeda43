"""What the operating system knows of this process."""

from __future__ import annotations

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
