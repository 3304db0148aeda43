"""Run the grid: every run a process of its own, some at a time, going on where an earlier call stopped."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path

from filelock import FileLock, Timeout

from delta_cli.errors import UserError
from delta_cli.evaluation.results import FILE, EvaluationResult
from delta_cli.recipe import to_toml
from delta_cli.runs import checkpoint, export_stamp
from delta_cli.runs.folder import RunFolder, read_lines
from delta_cli.study.plan import Arm, Measure, Study
from delta_cli.text import duration, percent

PrintLine = Callable[[str], None]


@dataclass(frozen=True)
class StudyRun:
    """One run of the grid."""

    arm: Arm
    seed: int
    folder: Path

    def finished(self, steps: int) -> bool:
        """Whether its last step and its model are there."""
        run = RunFolder(self.folder)
        if not (run.model / "config.json").exists() or not run.metrics.exists():
            return False
        return max((record["step"] for record in read_lines(run.metrics)), default=0) >= steps

    def step(self, measure: Measure) -> int | None:
        """The step that is measured; None before the run has ended, or where a checkpoint cannot be read."""
        run = RunFolder(self.folder)
        if measure.checkpoint == "last":
            return export_stamp.step_of(run.model)
        found = checkpoint.steps(run.checkpoints)
        if not found:
            return None
        try:
            return checkpoint.read_state(checkpoint.folder_of(run.checkpoints, found[-1])).best_step
        except (OSError, ValueError, TypeError):
            return None  # delta eval will say what is wrong with it

    def evaluation(self, study: Study, plan_folder: Path) -> EvaluationResult | None:
        """The evaluation of the checkpoint that the study measures, where it is there."""
        assert study.measure is not None
        step, suite = self.step(study.measure), study.suite(plan_folder)
        for file in sorted((self.folder / "evaluations").glob(f"*/{FILE}")):
            found = EvaluationResult.read(file)
            same = (found.suite, found.step, found.limit, found.settings) == (suite.name, step, None, suite.settings)
            if same and step is not None:
                return found
        return None


def study_runs(study: Study, out: Path) -> Iterator[StudyRun]:
    """Seed by seed, so that a study that is cut short has compared every arm on the same seeds."""
    root = out.parent / study.runs_of if study.runs_of else out
    for seed in range(study.seeds):
        for arm in study.arms:
            yield StudyRun(arm, seed, root / "runs" / f"{arm.name}-seed{seed}")


@dataclass(frozen=True)
class ActiveRun:
    """A run under way."""

    cell: StudyRun
    steps: int
    started: float  # monotonic seconds

    def step(self) -> int:
        """The steps that it has done so far."""
        metrics = RunFolder(self.cell.folder).metrics
        return max((record["step"] for record in read_lines(metrics)), default=0) if metrics.exists() else 0


@dataclass
class Grid:
    """The runs of a study, in processes that end with it."""

    study: Study
    plan_folder: Path
    out: Path
    report: PrintLine
    stopped: threading.Event = field(default_factory=threading.Event)
    going: dict[str, ActiveRun] = field(default_factory=dict)  # runs under way, by name
    times: list[float] = field(default_factory=list)  # seconds of each run that this call has finished
    ahead: int = 0  # runs that this call has yet to finish
    processes: set[subprocess.Popen[bytes]] = field(default_factory=set)

    def run(self) -> None:
        """Run what is not finished; ``report`` is told of every run that begins or ends.

        Raises UserError that names the log of the first run that failed; the others are not lost. What
        ends this, Ctrl-C or another signal, reaches the runs: those going on save and stop, and no other begins.
        """
        everything = list(study_runs(self.study, self.out))
        finished = [cell for cell in everything if self._complete(cell)]
        self.ahead = len(everything) - len(finished)
        self.report(self._found(everything, finished))
        failed: list[StudyRun] = []
        with ThreadPoolExecutor(self.study.jobs) as pool:
            running = {pool.submit(self._run, cell): cell for cell in everything}
            try:
                for done, future in enumerate(as_completed(running), start=1):
                    cell = running[future]
                    if not future.result():
                        failed.append(cell)
                    self.report(f"{done}/{len(everything)}  {self._ended(cell, cell in failed, cell in finished)}")
            except BaseException as error:
                self.stopped.set()
                if not isinstance(error, KeyboardInterrupt):  # a terminal's Ctrl-C has reached the runs already
                    for process in list(self.processes):
                        process.terminate()
                pool.shutdown(wait=True, cancel_futures=True)
                raise
        if failed:
            log = _log(failed[0])
            raise UserError(f"{len(failed)} of {len(everything)} runs failed; read {log}, then call again to go on")

    def left(self) -> float | None:
        """Seconds to the end at the pace of the runs that this call has finished; None before the first."""
        if not self.times or not self.ahead:
            return None
        waiting = max(self.ahead - len(self.going), 0) * sum(self.times) / len(self.times) / self.study.jobs
        mean, now = sum(self.times) / len(self.times), time.monotonic()
        return waiting + max((max(mean - (now - run.started), 0.0) for run in list(self.going.values())), default=0.0)

    def _found(self, everything: Sequence[StudyRun], finished: Sequence[StudyRun]) -> str:
        """What an earlier call has left: runs finished, begun and still to begin; and where logs are."""
        begun = sum((cell.folder / "recipe.toml").exists() for cell in everything if cell not in finished)
        parts = [
            f"{len(finished)} finished" * bool(finished),
            f"{begun} to go on with" * bool(begun),
            f"{self.ahead - begun} to begin" * (self.ahead > begun),
        ]
        states = ", ".join(part for part in parts if part)
        logs = _log(everything[0]).parent / "*.log"
        return f"{self.out}: {len(everything)} runs, {self.study.jobs} at a time: {states}; logs: {logs}"

    def _complete(self, cell: StudyRun) -> bool:
        """Whether nothing is left to do for a run."""
        if not cell.finished(self.study.recipe_of(cell.arm, cell.seed, self.plan_folder).run.steps):
            return False
        return self.study.measure is None or cell.evaluation(self.study, self.plan_folder) is not None

    def _ended(self, cell: StudyRun, failed: bool, before: bool) -> str:
        """What became of a run: how it ended, how long it took, and how long the rest will take."""
        name = cell.folder.name
        if failed:
            return f"{name}  failed; log: {_log(cell)}"
        if before:
            return f"{name}  was done"
        accuracy = ""
        if (file := RunFolder(cell.folder).evaluations).exists():
            accuracy = "".join(
                f"  accuracy {percent(record.get('accuracy'))}" for record in list(read_lines(file))[-1:]
            )
        left = self.left()
        rest = "" if left is None else f"  left {duration(left)}"
        return f"{name}  done  {duration(self.times[-1]) if self.times else ''}{accuracy}{rest}"

    def _run(self, cell: StudyRun) -> bool:
        """One run to its end and its measurement; whether it got there. Keeps the books on it."""
        if self._complete(cell):
            return True
        started = time.monotonic()
        steps = self.study.recipe_of(cell.arm, cell.seed, self.plan_folder).run.steps
        self.going[cell.folder.name] = ActiveRun(cell, steps, started)
        try:
            good = self._run_and_measure(cell)
        finally:
            self.going.pop(cell.folder.name, None)
            self.ahead -= 1
        if good:
            self.times.append(time.monotonic() - started)
        return good

    def _run_and_measure(self, cell: StudyRun) -> bool:
        """One run to its end and its measurement; whether it got there."""
        study = self.study
        recipe = study.recipe_of(cell.arm, cell.seed, self.plan_folder)
        self._wait(cell)
        if not cell.finished(recipe.run.steps):
            resolved = self.out / "recipes" / f"{cell.folder.name}.toml"
            resolved.parent.mkdir(parents=True, exist_ok=True)
            resolved.write_text(to_toml(recipe), encoding="utf-8")
            command = ["train", str(resolved), "--run-dir", str(cell.folder), "--quiet"]
            going_on = (cell.folder / "recipe.toml").exists()
            if self._call(cell, "goes on" if going_on else "begins", command + ["--resume"] * going_on) != 0:
                return False
        if study.measure is None or cell.evaluation(study, self.plan_folder) is not None:
            return True
        chosen, suite = study.measure.checkpoint, study.suite_name(self.plan_folder)
        command = ["eval", str(cell.folder), "--checkpoint", chosen, "--suite", suite, "--quiet"]
        return self._call(cell, "is measured", command) == 0

    def _wait(self, cell: StudyRun) -> None:
        """Until the process of an earlier call, which was killed without it, has left the run."""
        lock = FileLock(cell.folder / ".lock")
        while cell.folder.is_dir() and not self.stopped.is_set():
            try:
                lock.acquire(timeout=1)
                lock.release()
                return
            except Timeout:
                continue

    def _call(self, cell: StudyRun, what: str, arguments: Sequence[str]) -> int:
        """``delta`` with these arguments in a process of its own; its exit code."""
        if self.stopped.is_set():
            return 1
        self.report(f"{cell.folder.name} {what}; log: {_log(cell)}")
        return call([*arguments, "--backend", self.study.backend], _log(cell), self.study.threads, self.processes)


def call(arguments: Sequence[str], log: Path, threads: int, processes: set[subprocess.Popen[bytes]]) -> int:
    """Run ``delta`` and append what it prints to ``log``; it is among ``processes`` while it runs."""
    log.parent.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    with log.open("ab") as output:
        command = [sys.executable, "-m", "delta_cli", *arguments]
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
        processes.add(process)
        try:
            return process.wait()
        finally:
            processes.discard(process)


def _log(cell: StudyRun) -> Path:
    return cell.folder.with_name(f"{cell.folder.name}.log")
