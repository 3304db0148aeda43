"""This machine's versions, device and memory, from the operating system; imports no framework."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from dataclasses import dataclass

from delta_cli.evaluation.evaluate import versions
from delta_cli.runs.fingerprint import installed_version

MLX_FOR_NVIDIA = ("mlx-cuda-13", "mlx-cuda-12")  # packages of MLX's CUDA build


@dataclass(frozen=True)
class Machine:
    """The machine a run would use."""

    system: str
    cores: int
    memory: int  # bytes of the host
    device: str
    device_memory: int  # bytes; of the host where there is no other
    versions: dict[str, str]


def describe_machine(backend: str) -> Machine:
    """This machine, as the backend would see it."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    device, device_memory = f"{platform.machine()} processor", memory
    if backend == "cuda" or (backend == "mlx" and any(map(installed_version, MLX_FOR_NVIDIA))):
        device, device_memory = _nvidia() or ("no NVIDIA GPU found", 0)
    elif backend == "mlx" and platform.system() == "Darwin":
        device = "Apple silicon, memory shared with the system"
        device_memory = memory * 3 // 4  # what Metal lets one process keep, by default
    return Machine(
        system=f"{platform.system()} {platform.release()}, Python {platform.python_version()}",
        cores=os.cpu_count() or 1,
        memory=memory,
        device=device,
        device_memory=device_memory,
        versions=versions(),
    )


def _nvidia() -> tuple[str, int] | None:
    """Name and memory of the first GPU, from nvidia-smi."""
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        line = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.splitlines()[0]
        name, mebibytes = line.rsplit(",", 1)
        return name.strip(), int(mebibytes) * 2**20
    except (OSError, subprocess.SubprocessError, IndexError, ValueError):
        return None
