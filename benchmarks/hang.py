"""Stop one rank of a run for ever (SIGSTOP) at random instants: the others must say so and end, and resume exactly.

    python benchmarks/hang.py --trials 20
    python benchmarks/hang.py --trials 20 --out benchmarks/results/hang.json

A trial starts a short run of several processes and stops one of them at a random instant: of five trials four after a
random step, and one while the processes start. In turns nobody intervenes, so that the run ends after
``parallel.timeout``, or Ctrl-C is sent once, a second later. Then no process of the run may be left, the reason must
name the rank, and the resumed run must be equal to an undisturbed one, bit for bit. Exits with 1 at the first trial in
which that is not so.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from common import write
from torture import RECIPE, Torturer, children, contents

STEPS = 12  # of each run
NAMED = re.compile(r"rank (\d+)(?:, pid \d+)? (?:has not answered|has been stopped)(?:.* in phase (\w+))?")


@dataclass
class HangReport:
    """What happened; seconds run from the moment at which the rank is stopped, or Ctrl-C is sent."""

    processes: int
    timeout: float
    trials: int = 0
    ended_by_timeout: list[float] = field(default_factory=list)
    ended_by_ctrl_c: list[float] = field(default_factory=list)
    stopped_in: dict[str, int] = field(default_factory=dict)  # trials by phase
    seconds_to_the_line: float | None = None  # of one trial whose timeout is longer than the line takes


class Hanging(Torturer):
    """One recipe, stopped again and again."""

    def __init__(self, root: Path, processes: int, timeout: float, seed: int) -> None:
        super().__init__(root, "cpu", STEPS, seed, processes)
        self.timeout = timeout
        self.hangs = HangReport(processes, timeout)
        self.phases: Counter[str] = Counter()
        self.recipe.write_text(RECIPE.format(steps=STEPS, model=root / "model") + f"parallel.timeout = {timeout}\n")

    def measure(self, trials: int) -> HangReport:
        """The undisturbed run, then the trials."""
        self._attempt(self.root / "undisturbed", None)
        expected = contents(self.root / "undisturbed")
        while self.hangs.trials < trials:
            folder = self.root / f"run-{self.hangs.trials}"
            rank = self.hangs.trials % self.processes
            step = -1 if self.hangs.trials % 5 == 4 else self.random.randrange(STEPS - 1)
            if self._trial(folder, rank, step, self.hangs.trials // self.processes % 2 == 1):
                self._attempt(folder, None)
                self._compare(folder, expected)
                self.hangs.trials += 1
                print(f"{self.hangs.trials} of {trials}", flush=True)
            subprocess.run(["rm", "-rf", str(folder)], check=True)
        self.hangs.stopped_in = dict(self.phases)
        return self.hangs

    def _trial(self, folder: Path, rank: int, step: int, ctrl_c: bool) -> bool:
        """Start a run and stop a rank; whether it was still running then. Raises SystemExit if anything is amiss.

        The rank is stopped up to a second after ``step`` is recorded; −1 means while the processes start.
        """
        with self._started(folder) as process:
            while step >= 0 and process.poll() is None and _steps_done(folder) <= step:
                time.sleep(0.01)
            time.sleep(self.random.uniform(0.0, 1.0) if step >= 0 else self.random.uniform(1.0, 5.0))
            ranks = children(process.pid)
            if process.poll() is not None or len(ranks) < self.processes:
                process.communicate()
                return False
            os.kill(ranks[rank], signal.SIGSTOP)
            began = time.perf_counter()
            if ctrl_c:
                time.sleep(1.0)
                process.send_signal(signal.SIGINT)
                began = time.perf_counter()
            _, said = process.communicate(timeout=120)
            seconds = time.perf_counter() - began
        if process.returncode == 0:  # it was stopped when all was done
            return False
        (self.hangs.ended_by_ctrl_c if ctrl_c else self.hangs.ended_by_timeout).append(round(seconds, 2))
        named = NAMED.search(said)
        if named is None or int(named[1]) != rank:
            raise SystemExit(f"{folder}: rank {rank} was stopped, but the run said: {said.strip()}")
        self.phases[named[2] or "launch"] += 1
        self._check_reason(folder, rank)
        if left := _processes_of(folder):
            raise SystemExit(f"{folder}: left behind: {left}")
        return True

    def _started(self, folder: Path) -> subprocess.Popen[str]:
        command = ["train", str(self.recipe), "--run-dir", str(folder), "--backend", "cpu", "--quiet"]
        command += ["--processes", str(self.processes)]
        return subprocess.Popen(
            [sys.executable, "-c", "from delta_cli.cli import main; main()", *command],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"DELTA_RUN_MARK": str(folder)},
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background job ignores it
        )

    def _check_reason(self, folder: Path, rank: int) -> None:
        """The run's folder says which rank it was, if the run had one already."""
        with suppress(FileNotFoundError):
            ending = json.loads((folder / "end.json").read_text())
            if ending["state"] != "failed" or f"rank {rank} " not in ending["reason"]:
                raise SystemExit(f"{folder}: end.json says {ending}")

    def _compare(self, folder: Path, expected: dict[str, object]) -> None:
        found = contents(folder)
        different = [name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name)]
        if different:
            raise SystemExit(f"{folder}: differs from the undisturbed run in {', '.join(sorted(different))}")

    def line(self) -> float:
        """Seconds until a line names a rank that hangs, while the run still waits for it."""
        self.recipe.write_text(RECIPE.format(steps=1000, model=self.root / "model") + "parallel.timeout = 100\n")
        folder = self.root / "line"
        with self._started(folder) as process:
            while not any((folder / "checkpoints").glob("step-*")):
                time.sleep(0.1)
            os.kill(children(process.pid)[-1], signal.SIGSTOP)
            began = time.perf_counter()
            assert process.stderr is not None
            for line in process.stderr:
                if NAMED.search(line):
                    break
            seconds = time.perf_counter() - began
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=60)
        return round(seconds, 1)


def _steps_done(folder: Path) -> int:
    """How many steps a run has recorded."""
    metrics = folder / "metrics.jsonl"
    return metrics.read_bytes().count(b"\n") if metrics.exists() else 0


def _processes_of(folder: Path) -> list[str]:
    """Command lines of processes that were started for a run, directly or not."""
    mark, found = f"DELTA_RUN_MARK={folder}".encode(), []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if mark in (process / "environ").read_bytes().split(b"\0"):
                found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode())
    return found


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=6.0, help="parallel.timeout of the runs, seconds")
    parser.add_argument("--seed", type=int, default=0, help="of the instants")
    parser.add_argument("--out", type=Path, help="JSON with the report and the machine")
    options = parser.parse_args()
    with TemporaryDirectory() as scratch:
        hanging = Hanging(Path(scratch), options.processes, options.timeout, options.seed)
        report = hanging.measure(options.trials)
        report.seconds_to_the_line = hanging.line()
    for name, value in asdict(report).items():
        print(f"{name.replace('_', ' '):24} {value}")
    write(options.out, {"hang": asdict(report)})


if __name__ == "__main__":
    main()
