"""Run the fuzz tests for some minutes, with a new seed each time, and keep the failures.

    python -m tests.fuzz MINUTES

Every failure is saved with its smallest example in fuzz-failures/; the next run tries it first.
"""

from __future__ import annotations

import os
import resource
import secrets
import subprocess
import sys
import time
from pathlib import Path

FOUND = Path("fuzz-failures")
BYTES = 8 * 2**30  # of address space: an input that needs more fails instead of filling the machine's memory


def main() -> int:
    """Run rounds until the time is over; return 1 if any round failed."""
    resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
    end = time.monotonic() + 60 * float(sys.argv[1])
    rounds, failures = 0, 0
    while time.monotonic() < end:
        seed = secrets.randbelow(2**32)
        command = [sys.executable, "-m", "pytest", "tests/fuzz", "-q", "-n", "0", f"--hypothesis-seed={seed}"]
        environment = os.environ | {"DELTA_FUZZ": "1"}
        run = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        rounds += 1
        if run.returncode:
            failures += 1
            FOUND.mkdir(exist_ok=True)
            file = FOUND / f"seed-{seed}.txt"
            file.write_text(f"{run.stdout}{run.stderr}\nexit code {run.returncode}\n", encoding="utf-8")
            print(f"seed {seed}: {run.stdout.splitlines()[-1]}; see {file}", flush=True)
    print(f"{rounds} rounds, {failures} with failures")
    return int(failures > 0)


if __name__ == "__main__":
    raise SystemExit(main())
