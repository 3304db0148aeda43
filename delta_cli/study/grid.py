"""Run the grid: every run a process of its own, some at a time, going on where an earlier call stopped."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from delta_cli.errors import UserError
from delta_cli.recipe import to_toml
from delta_cli.study.plan import Arm, Study
from delta_cli.training.run_folder import RunFolder, read_lines


@dataclass(frozen=True)
class Cell:
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


def cells(study: Study, out: Path) -> Iterator[Cell]:
    """Seed by seed, so that a study that is cut short has compared every arm on the same seeds."""
    for seed in range(study.seeds):
        for arm in study.arms:
            yield Cell(arm, seed, out / "runs" / f"{arm.name}-seed{seed}")


def run_grid(study: Study, plan_folder: Path, out: Path, report: Callable[[int, int, Cell], None]) -> None:
    """Run what is not finished; ``report(done, total, cell)`` hears of each run that is.

    Raises UserError that names the log of the first run that failed; the others are not lost. Ctrl-C
    reaches the runs as well: those going on save and stop, and no other begins.
    """
    everything = list(cells(study, out))
    failed: list[Cell] = []
    with ThreadPoolExecutor(study.jobs) as pool:
        running = {pool.submit(_run, study, plan_folder, out, cell): cell for cell in everything}
        try:
            for done, future in enumerate(as_completed(running), start=1):
                if not future.result():
                    failed.append(running[future])
                report(done, len(everything), running[future])
        except BaseException:  # Ctrl-C above all: what waits must not begin
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    if failed:
        log = failed[0].folder.with_suffix(".log")
        raise UserError(f"{len(failed)} of {len(everything)} runs failed; read {log}, then call again to go on")


def _run(study: Study, plan_folder: Path, out: Path, cell: Cell) -> bool:
    """One run to its end, in a process; whether it got there."""
    recipe = study.recipe_of(cell.arm, cell.seed, plan_folder)
    if cell.finished(recipe.run.steps):
        return True
    resolved = out / "recipes" / f"{cell.folder.name}.toml"
    resolved.parent.mkdir(parents=True, exist_ok=True)
    resolved.write_text(to_toml(recipe), encoding="utf-8")
    command = [sys.executable, "-m", "delta_cli", "train", str(resolved), "--backend", study.backend]
    command += ["--run-dir", str(cell.folder), "--quiet"]
    if (cell.folder / "recipe.toml").exists():
        command.append("--resume")
    cell.folder.parent.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {"OMP_NUM_THREADS": str(study.threads)}
    with cell.folder.with_suffix(".log").open("ab") as log:
        code = subprocess.run(command, stdout=log, stderr=log, env=environment, check=False).returncode
    return code == 0
