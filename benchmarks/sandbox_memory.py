"""How much of the machine's memory eight hostile programs take at once, each with a limit of 1 GiB.

    python benchmarks/sandbox_memory.py --out results/sandbox_memory.json

Each attack runs in ``--programs`` sandboxes at a time. Two figures are measured: by how much the machine's available
memory falls while they run (with shared memory, files in memory and page tables), and the resident memory of their
processes.
"""

from __future__ import annotations

import argparse
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import common

from delta_cli.rewards.code.sandbox import START, ProcessLimits, SandboxRun, find_sandbox

CALLS = "import ctypes, os, time\nlibc = ctypes.CDLL(None)\nlibc.shmat.restype = ctypes.c_void_p\n"
ATTACKS = {
    "one address space": "held = []\nwhile True:\n    held.append(b'1' * 2**24)",
    "in eight threads": "import threading\ndef fill():\n    held = []\n    while True: held.append(b'1' * 2**22)\n"
    "for _ in range(7): threading.Thread(target=fill).start()\nfill()",
    "in children": "import os\nfor _ in range(7):\n    try:\n        if os.fork() == 0: break\n"
    "    except OSError: pass\nheld = []\nwhile True: held.append(b'1' * 2**24)",
    "shared memory": CALLS + "while True:\n    i = libc.shmget(0, 2**28, 0o1600)\n    if i < 0: break\n"
    "    ctypes.memset(libc.shmat(i, None, 0), 1, 2**28)\ntime.sleep(2)",
    "anonymous files": CALLS + "held = []\nwhile True:\n    try:\n        held.append(os.memfd_create('x'))\n"
    "        os.write(held[-1], b'1' * 2**23)\n    except OSError: break\ntime.sleep(2)",
    "scratch folder": "i = 0\nwhile True:\n    i += 1\n    try: open(str(i), 'wb').write(b'1' * 2**23)\n"
    "    except OSError: break\nimport time; time.sleep(2)",
}


def available() -> int:
    """Bytes of memory that are still available."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))


def resident() -> int:
    """Resident bytes of the processes in sandboxes."""
    total = 0
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                if START.encode() in (folder / "cmdline").read_bytes():
                    total += int((folder / "statm").read_text().split()[1]) * 4096
            except OSError:
                continue
    return total


def attack(code: str, seconds: float) -> None:
    with SandboxRun(find_sandbox()) as run:
        process = run.start({"mode": "program", "code": code}, ProcessLimits(int(seconds)))
        run.read(process, time.monotonic() + seconds)


def measure(code: str, programs: int, seconds: float) -> dict[str, float]:
    before, taken, held = available(), 0, 0
    with ThreadPoolExecutor(programs) as pool:
        runs = [pool.submit(attack, code, seconds) for _ in range(programs)]
        done = threading.Event()
        while not done.wait(0.05):
            taken, held = max(taken, before - available()), max(held, resident())
            if all(run.done() for run in runs):
                done.set()
    time.sleep(1)
    return {"taken GB": taken / 1e9, "resident GB": held / 1e9, "left behind GB": max(before - available(), 0) / 1e9}


def main() -> None:
    """Run every attack, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = [{"attack": name, **measure(code, args.programs, args.seconds)} for name, code in ATTACKS.items()]
    common.show(
        f"memory of {args.programs} programs at once, limit 1 GiB each",
        [{key: f"{value:.2f}" if isinstance(value, float) else value for key, value in row.items()} for row in rows],
    )
    settings = {"programs": args.programs, "seconds": args.seconds, "limit bytes": ProcessLimits(1).memory}
    common.write(args.out, {"settings": settings, "results": rows})


if __name__ == "__main__":
    main()
