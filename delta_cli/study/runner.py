"""Run a study: each run in a process of its own, several at a time; a later call continues where this one stopped."""

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


@dataclass(frozen=True)
class StudyRun:
    """One run of a study: an arm with a seed."""

    arm: Arm
    seed: int
    folder: Path

    @property
    def log(self) -> Path:
        """The file with what its processes print."""
        return self.folder.with_name(f"{self.folder.name}.log")

    def steps_done(self) -> int:
        """The last step in its metrics; 0 without one."""
        metrics = RunFolder(self.folder).metrics
        return max((record["step"] for record in read_lines(metrics)), default=0) if metrics.exists() else 0

    def finished(self, steps: int) -> bool:
        """Whether its last step is done and its model is exported."""
        return (RunFolder(self.folder).model / "config.json").exists() and self.steps_done() >= steps

    def measured_step(self, measure: Measure) -> int | None:
        """The step to measure; None before the run has ended or if no checkpoint can be read."""
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

    def evaluation(self, study: Study) -> EvaluationResult | None:
        """The evaluation of the checkpoint that the study measures, if it exists."""
        assert study.measure is not None
        step, suite = self.measured_step(study.measure), study.suite()
        for file in sorted((self.folder / "evaluations").glob(f"*/{FILE}")):
            found = EvaluationResult.read(file)
            same = (found.suite, found.step, found.limit, found.settings) == (suite.name, step, None, suite.settings)
            if same and step is not None:
                return found
        return None


def study_runs(study: Study, out: Path) -> Iterator[StudyRun]:
    """All runs, seed by seed, so that a study which is stopped early has compared all arms on the same seeds."""
    root = out.parent / study.runs_of if study.runs_of else out
    for seed in range(study.seeds):
        for arm in study.arms:
            yield StudyRun(arm, seed, root / "runs" / f"{arm.name}-seed{seed}")


@dataclass(frozen=True)
class ActiveRun:
    """A run that is being trained or measured."""

    run: StudyRun
    steps: int  # of the whole run
    started: float  # monotonic seconds


@dataclass
class StudyRunner:
    """Trains and measures the runs of a study in processes that end with this one."""

    study: Study
    out: Path
    print_line: Callable[[str], None]  # called when a run starts or ends
    stopped: threading.Event = field(default_factory=threading.Event)
    active: dict[str, ActiveRun] = field(default_factory=dict)  # by the name of the run's folder
    seconds: list[float] = field(default_factory=list)  # of each run that this call has finished
    remaining: int = 0  # runs that this call has yet to finish
    processes: set[subprocess.Popen[bytes]] = field(default_factory=set)

    def run(self) -> None:
        """Run what is not finished.

        Raises UserError with the log of the first run that failed, after the others have finished. If this process is
        interrupted, by Ctrl-C or another signal, active runs save and stop, and no further run starts.
        """
        everything = list(study_runs(self.study, self.out))
        finished = [run for run in everything if self._complete(run)]
        self.remaining = len(everything) - len(finished)
        self.print_line(self._summary(everything, finished))
        failed: list[StudyRun] = []
        with ThreadPoolExecutor(self.study.jobs) as pool:
            running = {pool.submit(self._run, run): run for run in everything}
            try:
                for done, future in enumerate(as_completed(running), start=1):
                    run = running[future]
                    if not future.result():
                        failed.append(run)
                    self.print_line(f"{done}/{len(everything)}  {self._result(run, run in failed, run in finished)}")
            except BaseException as error:
                self.stopped.set()
                if not isinstance(error, KeyboardInterrupt):  # Ctrl-C in a terminal has reached the runs already
                    for process in list(self.processes):
                        process.terminate()
                pool.shutdown(wait=True, cancel_futures=True)
                raise
        if failed:
            raise UserError(
                f"{len(failed)} of {len(everything)} runs failed; read {failed[0].log}, then run this command again"
            )

    def seconds_left(self) -> float | None:
        """Estimated seconds to the end of the study; None before this call has finished a run and at the end."""
        if not self.seconds or not self.remaining:
            return None
        mean, now = sum(self.seconds) / len(self.seconds), time.monotonic()
        waiting = max(self.remaining - len(self.active), 0) * mean / self.study.jobs
        return waiting + max((max(mean - (now - run.started), 0.0) for run in list(self.active.values())), default=0.0)

    def _summary(self, everything: Sequence[StudyRun], finished: Sequence[StudyRun]) -> str:
        """How many runs an earlier call finished or started, how many are new, and where the logs are."""
        started = sum((run.folder / "recipe.toml").exists() for run in everything if run not in finished)
        parts = [
            f"{len(finished)} finished" * bool(finished),
            f"{started} to resume" * bool(started),
            f"{self.remaining - started} to start" * (self.remaining > started),
        ]
        states = ", ".join(part for part in parts if part)
        logs = everything[0].log.parent / "*.log"
        return f"{self.out}: {len(everything)} runs, {self.study.jobs} at a time: {states}; logs: {logs}"

    def _complete(self, run: StudyRun) -> bool:
        """Whether nothing is left to do for a run."""
        if not run.finished(self.study.recipe_of(run.arm, run.seed).run.steps):
            return False
        return self.study.measure is None or run.evaluation(self.study) is not None

    def _result(self, run: StudyRun, failed: bool, before: bool) -> str:
        """How a run ended, how long it took, and how long the rest will take."""
        name = run.folder.name
        if failed:
            return f"{name}  failed; log: {run.log}"
        if before:
            return f"{name}  was finished already"
        file = RunFolder(run.folder).evaluations
        last = list(read_lines(file))[-1:] if file.exists() else []
        accuracy = "".join(f"  accuracy {percent(record.get('accuracy'))}" for record in last)
        left = self.seconds_left()
        rest = "" if left is None else f"  left {duration(left)}"
        return f"{name}  done  {duration(self.seconds[-1]) if self.seconds else ''}{accuracy}{rest}"

    def _run(self, run: StudyRun) -> bool:
        """Train and measure one run; returns whether it succeeded."""
        if self._complete(run):
            return True
        started = time.monotonic()
        recipe = self.study.recipe_of(run.arm, run.seed)
        self.active[run.folder.name] = ActiveRun(run, recipe.run.steps, started)
        try:
            self._wait_for_lock(run)
            good = (run.finished(recipe.run.steps) or self._train(run, to_toml(recipe))) and self._measure(run)
        finally:
            self.active.pop(run.folder.name, None)
            self.remaining -= 1
        if good:
            self.seconds.append(time.monotonic() - started)
        return good

    def _train(self, run: StudyRun, recipe: str) -> bool:
        resolved = self.out / "recipes" / f"{run.folder.name}.toml"
        resolved.parent.mkdir(parents=True, exist_ok=True)
        resolved.write_text(recipe, encoding="utf-8")
        resume = (run.folder / "recipe.toml").exists()
        command = ["train", str(resolved), "--run-dir", str(run.folder), "--quiet", *(["--resume"] if resume else [])]
        return self._call(run, "resumes" if resume else "starts", command)

    def _measure(self, run: StudyRun) -> bool:
        measure = self.study.measure
        if measure is None or run.evaluation(self.study) is not None:
            return True
        command = ["eval", str(run.folder), "--checkpoint", measure.checkpoint, "--suite", self.study.suite_name()]
        return self._call(run, "is measured", [*command, "--quiet"])

    def _wait_for_lock(self, run: StudyRun) -> None:
        """Wait until no process holds the run: one may be left of an earlier call that was killed."""
        lock = FileLock(run.folder / ".lock")
        while run.folder.is_dir() and not self.stopped.is_set():
            try:
                lock.acquire(timeout=1)
                lock.release()
                return
            except Timeout:
                continue

    def _call(self, run: StudyRun, what: str, arguments: Sequence[str]) -> bool:
        """Run ``delta`` with these arguments for a run; returns whether it succeeded."""
        if self.stopped.is_set():
            return False
        self.print_line(f"{run.folder.name} {what}; log: {run.log}")
        command = [*arguments, "--backend", self.study.backend]
        return call(command, run.log, self.study.threads, self.processes) == 0


def call(arguments: Sequence[str], log: Path, threads: int, processes: set[subprocess.Popen[bytes]]) -> int:
    """Run ``delta``, append its output to ``log`` and return its exit code; it is in ``processes`` while it runs."""
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
