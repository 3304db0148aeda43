"""What a newcomer waits for: from a clone to a better policy, a first step on data of one's own, an answer, a study.

    python benchmarks/newcomer.py --out benchmarks/results/newcomer.json

Types the commands of the README in a fresh clone, and adds its seconds to the runs that the file already holds, each
with the machine's mean load. Packages come from pip, so the first row depends on the connection and on pip's cache.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

from common import show, write

ROOT = Path(__file__).parents[1]
STUDY = "--grid update.learning_rate=2e-4,5e-4,1e-3,2e-3 --seeds 3 --set run.steps=5"
NOT_A_NEWCOMERS = {"PYTHONPATH", "OMP_NUM_THREADS", "PYTHONDONTWRITEBYTECODE"}
STEPS = {  # what a person wants, and what they type
    "clone to better policy": f"git clone -q {ROOT} delta && cd delta && make quickstart",
    "own .jsonl to first step": "cd delta && .venv/bin/delta init --data my.jsonl --model tiny-base && "
    ".venv/bin/delta train my.toml --set run.steps=1",
    "better than the base?": "cd delta && .venv/bin/delta compare runs/quickstart-1",
    "four rates, three seeds, five steps": f"cd delta && .venv/bin/delta study quickstart {STUDY}",
}


def newcomer(folder: Path) -> list[dict[str, object]]:
    """Type each command in turn; the row says how long it took and at what load."""
    environment = {key: value for key, value in os.environ.items() if key not in NOT_A_NEWCOMERS}
    rows: list[dict[str, object]] = []
    for name, command in STEPS.items():
        if (folder / "delta").is_dir():
            write_sums(folder / "delta" / "my.jsonl")
        seconds, load, printed = typed(command, folder, environment)
        row: dict[str, object] = {"step": name, "seconds": round(seconds, 1), "load": round(load, 1)}
        accuracies = re.findall(r"held-out accuracy after step \d+: ([\d.]+)%", printed)
        rows.append(row | ({"accuracies": [float(accuracies[0]), float(accuracies[-1])]} if accuracies else {}))
    return rows


def typed(command: str, folder: Path, environment: dict[str, str]) -> tuple[float, float, str]:
    """Run a command: its seconds, the machine's mean load meanwhile, and what it printed."""
    start, loads = time.perf_counter(), [os.getloadavg()[0]]
    with tempfile.TemporaryFile("w+") as out:
        running = subprocess.Popen(["bash", "-c", command], cwd=folder, env=environment, stdout=out, stderr=out)
        while running.poll() is None:
            time.sleep(0.2)
            loads.append(os.getloadavg()[0])
        seconds = time.perf_counter() - start
        out.seek(0)
        printed = out.read()
    if running.returncode:
        raise SystemExit(f"{command}: exit code {running.returncode}\n{printed[-3000:]}")
    return seconds, statistics.mean(loads), printed


def write_sums(file: Path) -> None:
    """Forty sums as a user's data file."""
    draw = random.Random(1)
    pairs = [(draw.randint(10, 99), draw.randint(10, 99)) for _ in range(40)]
    file.write_text("".join(json.dumps({"question": f"{a}+{b}=?", "answer": str(a + b)}) + "\n" for a, b in pairs))


def main() -> None:
    """Measure once, and add the run to the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON file that the run is added to")
    options = parser.parse_args()
    before = json.loads(options.out.read_text())["runs"] if options.out and options.out.is_file() else []
    with tempfile.TemporaryDirectory() as folder:
        rows = newcomer(Path(folder))
    show("newcomer", [{key: str(value) for key, value in row.items() if key != "accuracies"} for row in rows])
    write(options.out, {"benchmark": "newcomer", "runs": [*before, rows]})


if __name__ == "__main__":
    main()
