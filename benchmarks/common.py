"""What the benchmark scripts share: the machine's description, timing in turns, the JSON, the table."""

from __future__ import annotations

import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console
from rich.table import Table

from backends.local_engine import peak_resident as peak_memory

__all__ = [
    "device_peak",
    "in_fresh_process",
    "interleaved",
    "kept_runs",
    "machine",
    "median_ratio",
    "peak_memory",
    "resident",
    "show",
    "write",
]

PACKAGES = ("numpy", "torch", "transformers", "mlx", "mlx-lm", "trl")


def machine() -> dict[str, Any]:
    """What the numbers depend on: processor, cores, memory, system, versions, threads, load."""
    return {
        "system": platform.platform(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        **_gpu(),
        "load": round(os.getloadavg()[0], 2),
        "threads": os.environ.get("OMP_NUM_THREADS", "default"),
        "python": platform.python_version(),
        "packages": {name: found for name in PACKAGES if (found := _version(name))},
    }


def interleaved(ways: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each way in each of ``rounds`` after a warm-up; ways take turns, so a busy machine slows all alike."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(1 + rounds):
        for name, run in ways.items():
            start = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
    return {name: values[1:] for name, values in seconds.items()}


def median_ratio(slower: Sequence[float], faster: Sequence[float]) -> float:
    """The median over rounds of slower / faster, each ratio within one round."""
    return statistics.median(a / b for a, b in zip(slower, faster, strict=True))


def write(path: str | Path | None, results: Mapping[str, Any]) -> None:
    """The results with the machine's description as JSON at ``path``; nothing without a path."""
    if path:
        Path(path).write_text(json.dumps({"machine": machine(), **results}, indent=2) + "\n", encoding="utf-8")


def kept_runs(
    out: Path, parts: Mapping[str, Callable[[Path], dict[str, Any]]], **header: Any
) -> dict[str, dict[str, Any]]:
    """The result of each part by name, kept in the JSON file ``out``; parts that it has are not run again.

    A part is given an empty folder, which is removed afterwards. The file is written whenever a part ends.
    """
    runs: dict[str, Any] = json.loads(out.read_text())["runs"] if out.exists() else {}
    for name, part in parts.items():
        if name not in runs:
            with TemporaryDirectory(ignore_cleanup_errors=True) as folder:
                runs[name] = part(Path(folder))
            write(out, {**header, "runs": runs})
            print(f"{name}: {runs[name]['accuracy']}", flush=True)
    return runs


def show(title: str, rows: Sequence[Mapping[str, str]]) -> None:
    """A table whose columns are the keys of the rows, and the machine below it."""
    table = Table(title=title)
    for column in rows[0] if rows else ():
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*row.values())
    console = Console(width=max(Console().width, 120))  # a pipe has 80 columns, too few
    console.print(table)
    console.print(", ".join(f"{key} {value}" for key, value in machine().items()), highlight=False, soft_wrap=True)


def in_fresh_process(script: str, *arguments: str) -> Any:
    """What ``python script arguments`` prints as JSON in its last line; memory is measured in a process of its own."""
    done = subprocess.run([sys.executable, script, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{script} {' '.join(arguments)} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def _processor() -> str:
    if sys.platform == "darwin":
        asked = subprocess.run(
            ["sysctl", "-n", "machdep.cpu.brand_string"], capture_output=True, text=True, check=False
        )
        return asked.stdout.strip()
    info = Path("/proc/cpuinfo")
    names = [line.split(":")[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    return names[0] if names else platform.processor()


def resident() -> int:
    """Bytes that this process holds in memory now (Linux)."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def device_peak(backend: str) -> int:
    """The most bytes so far: on CUDA those that torch allocated there, else those of this process."""
    if backend != "cuda":
        return peak_memory()
    import torch

    return torch.cuda.max_memory_allocated()


def _gpu() -> dict[str, str]:
    """The NVIDIA GPU and its driver; nothing where there is none."""
    if not shutil.which("nvidia-smi"):
        return {}
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    asked = subprocess.run(query, capture_output=True, text=True, check=False)
    return {"gpu": asked.stdout.strip().replace("\n", "; ")} if asked.returncode == 0 else {}


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
