"""Kill a run at random instants, resume it each time, and compare the end with an undisturbed run.

    python benchmarks/torture.py --kills 50
    python benchmarks/torture.py --kills 50 --backend cpu --out torture.json

A tiny model learns to end its responses early, with a checkpoint and an evaluation after every
step, so that a good part of the time goes into writing files. Each attempt is a process of its own
(``delta train``), killed with SIGKILL after a random part of the time that an undisturbed run
takes. After every kill all checkpoints in the folder must be whole. A run that gets to its end must
have the weights, optimizer, metrics, evaluations and rollouts of the undisturbed one, bit for bit;
then another one begins. Exits with 1 at the first difference.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from common import write
from make_tiny_base import write_tokenizer
from safetensors import safe_open

from delta_cli.assets.random_model import write_qwen3
from delta_cli.runs import checkpoint
from delta_cli.runs.folder import RunFolder, read_lines

RECIPE = """
run.steps = {steps}
model.path = "{model}"
data = {{ limit = 64, held_out = 0.25 }}
rollout = {{ prompts = 4, responses = 8, max_tokens = 12 }}
reward.length_penalty = 10.0
update = {{ learning_rate = 0.03, mini_batches = 2 }}
evaluation = {{ every = 1, problems = 4 }}
checkpoint = {{ every = 1, keep = 2, keep_best = "reward_mean" }}
"""

CLOCKS = ("seconds", "tokens_per_second", "rollout_tokens_per_second", "peak_memory", "swapped")


@dataclass
class Report:
    """What was done, and what the kills hit."""

    backend: str
    kills: int = 0
    before_the_first_checkpoint: int = 0
    inside_a_save: int = 0  # a checkpoint half-written
    inside_a_line: int = 0  # of a .jsonl file
    runs: int = 0  # that came to their end, equal to the undisturbed one
    undisturbed_seconds: float = 0.0  # the fastest run from its start to its end
    seconds: float = 0.0
    slowest_end: float = 0.0  # seconds from a kill to the end of every process


class Torturer:
    """One recipe, and the folders of its runs."""

    def __init__(self, root: Path, backend: str, steps: int, seed: int, processes: int) -> None:
        self.root = root
        self.processes = processes
        self.random = random.Random(seed)
        self.report = Report(backend)
        self.recipe = root / "torture.toml"
        write_qwen3(
            root / "model", vocab_size=258, hidden=16, layers=1, heads=2, kv_heads=1, head_dim=8, intermediate=32
        )
        write_tokenizer(root / "model")
        self.recipe.write_text(RECIPE.format(steps=steps, model=root / "model"))

    def run(self, kills: int) -> Report:
        """The undisturbed run, then ``kills`` kills; raises SystemExit at the first difference."""
        began = time.perf_counter()
        straight = self.root / "undisturbed"
        self.report.undisturbed_seconds = math.inf
        self._attempt(straight, None)
        expected = contents(straight)
        while self.report.kills < kills:
            self._torment(self.root / f"run-{self.report.runs}", kills, expected)
        self.report.seconds = time.perf_counter() - began
        return self.report

    def _torment(self, folder: Path, kills: int, expected: dict[str, Any]) -> None:
        """One run, killed until it comes to its end."""
        finished = False
        while not finished:
            patience = self.random.uniform(0, self.report.undisturbed_seconds) if self.report.kills < kills else None
            finished = self._attempt(folder, patience)
            if not finished:
                self._examine(RunFolder(folder))
        found = contents(folder)
        different = [name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name)]
        if different:
            raise SystemExit(f"{folder}: differs from the undisturbed run in {', '.join(sorted(different))}")
        self.report.runs += 1

    def _attempt(self, folder: Path, patience: float | None) -> bool:
        """Start or resume; whether it came to its end before ``patience`` seconds were over."""
        began, fresh = time.perf_counter(), not RunFolder(folder).started
        go_on = [str(self.recipe)] if fresh else ["--resume"]
        command = ["train", *go_on, "--run-dir", str(folder), "--backend", self.report.backend, "--quiet"]
        command += ["--processes", str(self.processes)]
        with subprocess.Popen(
            [sys.executable, "-c", "from delta_cli.cli import main; main()", *command],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            try:
                _, said = process.communicate(timeout=patience)
            except subprocess.TimeoutExpired:
                self._kill(process)
                return False
        if process.returncode:
            raise SystemExit(f"{folder}: delta train ended with {process.returncode}: {said.strip()}")
        if fresh:
            self.report.undisturbed_seconds = min(self.report.undisturbed_seconds, time.perf_counter() - began)
        return True

    def _kill(self, process: subprocess.Popen[str]) -> None:
        """Kill the process or, of several ranks, one; the others have to end by themselves."""
        ranks = children(process.pid) if self.processes > 1 else []
        if ranks:
            with suppress(ProcessLookupError):
                os.kill(self.random.choice(ranks), signal.SIGKILL)
        else:
            process.kill()
        began = time.perf_counter()
        process.communicate()
        self.report.slowest_end = max(self.report.slowest_end, time.perf_counter() - began)

    def _examine(self, run: RunFolder) -> None:
        """Check what the kill left: whole checkpoints, and perhaps unfinished files, which are ignored."""
        self.report.kills += 1
        found, damaged = checkpoint.find(run.checkpoints)
        if damaged:
            raise SystemExit(f"unreadable checkpoint: {damaged[0]}")
        files = (run.metrics, run.evaluations, run.notices)
        self.report.before_the_first_checkpoint += found is None
        self.report.inside_a_save += any(run.checkpoints.glob(".partial-*"))
        self.report.inside_a_line += any(f.exists() and not (f.read_bytes() or b"\n").endswith(b"\n") for f in files)


def children(process: int) -> list[int]:
    """The processes that a process has started."""
    return [int(each) for each in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def contents(folder: Path) -> dict[str, Any]:
    """Everything of a run that must not depend on how often it was killed."""
    run = RunFolder(folder)
    found: dict[str, Any] = {}
    for file in [run.metrics, run.evaluations, run.notices, *sorted(run.rollouts.iterdir())]:
        records = read_lines(file) if file.exists() else []
        found[file.name] = [{k: v for k, v in record.items() if not k.startswith(CLOCKS)} for record in records]
    for file in [*run.checkpoints.glob("step-*/*.safetensors"), *run.model.glob("*.safetensors")]:
        with safe_open(file, "numpy") as stored:
            for name in stored.keys():  # noqa: SIM118  (not a dictionary)
                found[f"{file.parent.name}/{file.name}: {name}"] = stored.get_tensor(name).tobytes()
    return found


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--steps", type=int, default=30, help="of each run")
    parser.add_argument("--backend", default="fake", choices=["fake", "cpu", "mlx"])
    parser.add_argument("--processes", type=int, default=1, help="of a run, one of which is killed (cpu, mlx)")
    parser.add_argument("--seed", type=int, default=0, help="of the instants")
    parser.add_argument("--out", type=Path, help="JSON with the report and the machine")
    options = parser.parse_args()
    with TemporaryDirectory() as scratch:
        torturer = Torturer(Path(scratch), options.backend, options.steps, options.seed, options.processes)
        report = torturer.run(options.kills)
    for name, value in asdict(report).items():
        print(f"{name.replace('_', ' '):28} {round(value, 1) if isinstance(value, float) else value}")
    write(options.out, {"torture": asdict(report)})


if __name__ == "__main__":
    main()
