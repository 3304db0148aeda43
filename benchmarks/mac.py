"""Everything that this project would like to know about a Mac, in one command and one file.

    python benchmarks/mac.py

Takes about ten minutes and asks nothing: the doctor, a short training run, its numbers against another backend's, a
training step against mlx-lm-lora's, the memory of an update, and tokens per second of a 4-bit model of 1.7 billion
random weights. It writes mac-report.json; please attach that to an issue. A part that fails or lacks a package is
noted in the file, and the others still run. The file holds versions, timings and the output of these commands, no names
of files outside the scratch folder.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from common import machine

HERE = Path(__file__).resolve().parent
LIMIT = 600  # seconds for one part
KEPT = 20_000  # characters of output
QUICKSTART = "run.steps=20"
SHORT = ("run.steps=1", "rollout.prompts=4", "evaluation.problems=4")


def parts(run: Path, small: bool) -> dict[str, tuple[str, list[str]]]:
    """The package that each part needs, and its command."""
    delta = ["-m", "delta_cli"]
    overrides = [word for setting in (SHORT if small else (QUICKSTART,)) for word in ("--set", setting)]
    batch = ["--set", "update.micro_batch_tokens=512"] if small else []
    other = "cpu" if find_spec("torch") and find_spec("transformers") else "fake"
    sizes = ["--tokens", "64", "--hybrid-tokens", "32", "--rounds", "1"] if small else []
    rounds = ["--rounds", "1"] if small else []
    return {
        "doctor": ("mlx", [*delta, "doctor", "--backend", "mlx", *batch]),
        "quickstart": ("mlx", [*delta, "train", "--backend", "mlx", "--run-dir", str(run), *overrides]),
        "parity": ("mlx", [*delta, "parity", str(run), "--backends", f"mlx,{other}"]),
        "step": ("mlx_lm_lora", [str(HERE / "step_mlx.py"), *rounds, "--out", str(run.parent / "step.json")]),
        "memory": ("transformers", [str(HERE / "update_mlx.py"), *sizes, "--out", str(run.parent / "memory.json")]),
        "tokens": (
            "mlx",
            [str(HERE / "mac_tokens.py"), *(["--small"] if small else []), str(run.parent / "tokens.json")],
        ),
    }


def part(needs: str, command: list[str], result: Path) -> dict[str, Any]:
    """Run one part: its seconds, exit status, output and the JSON that it wrote."""
    if find_spec(needs) is None:
        return {"skipped": f"needs {needs}"}
    start = time.perf_counter()
    try:
        done = subprocess.run(
            [sys.executable, *command], capture_output=True, text=True, timeout=LIMIT, check=False, cwd=HERE.parent
        )
        status, output = str(done.returncode), done.stdout + done.stderr
    except subprocess.TimeoutExpired as error:
        status, output = f"ended after {LIMIT} s", str(error.output or "")
    found: dict[str, Any] = {"status": status, "seconds": round(time.perf_counter() - start, 1)}
    found["output"] = output[-KEPT:]
    if result.is_file():
        found["result"] = json.loads(result.read_text())
    return found


def main() -> None:
    """Run all parts and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="mac-report.json", help="where to write the report")
    parser.add_argument("--small", action="store_true", help="tiny sizes, to try the script itself")
    args = parser.parse_args()
    report: dict[str, Any] = {"machine": machine(), "parts": {}}
    with TemporaryDirectory() as scratch:
        for name, (needs, command) in parts(Path(scratch) / "run", args.small).items():
            print(f"{name} …", flush=True)
            report["parts"][name] = found = part(needs, command, Path(scratch) / f"{name}.json")
            print(f"  {found.get('skipped') or 'exit ' + found['status']} {found.get('seconds', '')}", flush=True)
            Path(args.out).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(f"please attach {args.out} to an issue")


if __name__ == "__main__":
    main()
