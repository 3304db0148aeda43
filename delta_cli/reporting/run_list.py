"""``delta runs``: the runs below a folder, what each trains, how far it is and whether it is still running."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from filelock import FileLock, Timeout
from rich.console import Console, ConsoleOptions, RenderableType
from rich.table import Table
from rich.text import Text

from delta_cli.errors import UserError
from delta_cli.recipe import load_recipe
from delta_cli.runs import checkpoint, export_stamp
from delta_cli.runs.folder import RunFolder, read_lines
from delta_cli.runs.status import read_status
from delta_cli.text import NONE, fits, percent, visible

RunState = Literal["going", "done", "stopped", "failed", "died", "damaged"]
STYLES: dict[RunState, str] = {"going": "cyan", "done": "green", "failed": "red", "died": "red", "damaged": "red"}
DEPTH = 4  # folder levels that are searched; those of a study are in studies/NAME/runs


@dataclass(frozen=True)
class RunSummary:
    """What ``delta runs`` shows of one run."""

    path: Path
    state: RunState
    reason: str  # if failed or damaged
    method: str
    model: str
    step: int
    steps: int
    accuracy: float | None  # of the last held-out evaluation
    best: float | None  # held-out accuracy so far
    changed: float  # seconds since the epoch

    @property
    def unfinished(self) -> bool:
        """Whether it can be resumed."""
        return self.state in ("stopped", "failed", "died")

    def as_json(self) -> dict[str, Any]:
        """A line of ``delta runs --json``."""
        return asdict(self) | {"path": str(self.path)}


def find_runs(root: Path) -> list[RunSummary]:
    """The runs in a folder and below it, the one that changed last at the end of the list."""
    folders = [file.parent for depth in range(DEPTH) for file in root.glob("*/" * depth + "recipe.toml")]
    found = [summary_of(folder) for folder in folders if (folder / "checkpoints").is_dir()]
    return sorted(found, key=lambda run: run.changed)


def empty_runs(runs: Sequence[RunSummary]) -> list[RunSummary]:
    """The runs that ended without anything to resume or to use: no checkpoint, no model."""
    return [run for run in runs if run.state in ("stopped", "failed", "died") and _holds_nothing(RunFolder(run.path))]


def _holds_nothing(run: RunFolder) -> bool:
    return not checkpoint.steps(run.checkpoints) and not (run.model / "config.json").exists()


def folder_bytes(folder: Path) -> int:
    """Bytes of the files in a folder."""
    return sum(file.lstat().st_size for file in folder.rglob("*") if file.is_file())


def summary_of(folder: Path) -> RunSummary:
    """What is shown of the run in a folder."""
    run = RunFolder(folder)
    try:
        recipe = load_recipe(run.recipe)
        metrics = list(read_lines(run.metrics)) if run.metrics.exists() else []
        evaluations = list(read_lines(run.evaluations)) if run.evaluations.exists() else []
    except UserError as error:
        return RunSummary(folder, "damaged", str(error), "", "", 0, 0, None, None, run.recipe.stat().st_mtime)
    step = max((record["step"] for record in metrics if isinstance(record.get("step"), int)), default=0)
    state, reason = _state(run, step, recipe.run.steps)
    accuracies = [each["accuracy"] for each in evaluations if isinstance(each.get("accuracy"), float | int)]
    preset, credit = recipe.method.preset, recipe.method.credit
    newest = max(file.stat().st_mtime for file in (run.recipe, run.metrics, run.checkpoints) if file.exists())
    return RunSummary(
        path=folder,
        state=state,
        reason=reason,
        method=preset if credit in (None, preset) else f"{preset}+{credit}",
        model=recipe.model.path,
        step=step,
        steps=recipe.run.steps,
        accuracy=accuracies[-1] if accuracies else None,
        best=max(accuracies, default=None),
        changed=newest,
    )


def _state(run: RunFolder, step: int, steps: int) -> tuple[RunState, str]:
    if held(run.path):
        return "going", ""
    if step >= steps and export_stamp.step_of(run.model) == step:
        return "done", ""
    ending = read_status(run.path)
    if ending is None or ending.state == "done":  # done, and then its recipe was given more steps
        return "died" if ending is None else "stopped", ""
    return ending.state, ending.reason


def held(folder: Path) -> bool:
    """Whether a process is training in the folder."""
    lock = FileLock(folder / ".lock")
    if not (folder / ".lock").exists():
        return False
    try:
        lock.acquire(timeout=0)
    except (Timeout, OSError):
        return True
    lock.release()
    return False


@dataclass(frozen=True)
class RunTable:
    """A table with a line for each run and as many columns as the width allows; names are never cut."""

    runs: Sequence[RunSummary]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        """The layout with the most columns that fits."""
        for columns in (("method", "model"), ("method",), ()):
            table = self._table(columns)
            if fits(table, console, options):
                break
        yield table
        for run in self.runs:
            if run.reason:
                yield Text(visible(f"{run.path}: {run.reason}"), style="dim")

    def _table(self, also: Sequence[str]) -> Table:
        table = Table(box=None, pad_edge=False, padding=(0, 1))
        table.add_column("run", overflow="fold")
        table.add_column("state", no_wrap=True)
        for name in ("step", "last %", "best %"):
            table.add_column(name, justify="right", no_wrap=True)
        for name in also:
            table.add_column(name, no_wrap=True)
        for run in self.runs:
            about = {"method": run.method, "model": run.model}
            table.add_row(
                Text(visible(str(run.path))),
                Text(run.state, style=STYLES.get(run.state, "")),
                f"{run.step}/{run.steps}",
                _share(run.accuracy),
                _share(run.best),
                *(Text(visible(about[name])) for name in also),
            )
        return table


def _share(value: float | None) -> str:
    return NONE if value is None else percent(value).removesuffix("%")
