"""What a study found: numbers of each run, their mean and interval over seeds, and rank tests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from delta_cli.evaluation.statistics import RankTest, mann_whitney
from delta_cli.runs.folder import RunFolder, read_lines
from delta_cli.study.grid import study_runs
from delta_cli.study.plan import Study


@dataclass(frozen=True)
class RunOutcome:
    """The numbers of one run."""

    arm: str
    seed: int
    accuracy: float  # held out, after the last step
    area: float  # mean training accuracy over the steps: the area under the learning curve
    steps_to_target: int | None  # first step whose mean accuracy over 3 steps is at the target; None: never
    entropy: float  # nats, mean over the last tenth of the steps
    length: float  # tokens, likewise
    curve: list[float]  # training accuracy at each step


@dataclass(frozen=True)
class SeedInterval:
    """A mean over seeds with its 95 % interval (Student's t)."""

    mean: float
    low: float
    high: float
    seeds: int


@dataclass(frozen=True)
class ArmSummary:
    """One row of the table."""

    arm: str
    accuracy: SeedInterval
    area: SeedInterval
    steps_to_target: SeedInterval | None  # over the seeds that got there
    reached: int  # seeds that got to the target
    entropy: SeedInterval
    length: SeedInterval
    accuracy_test: RankTest | None  # the arm it is tested against is above it; None for the reference
    area_test: RankTest | None


def outcomes(study: Study, out: Path) -> list[RunOutcome]:
    """The numbers of every run that is finished."""
    return [
        _outcome(cell.arm.name, cell.seed, RunFolder(cell.folder), study.target)
        for cell in study_runs(study, out)
        if (cell.folder / "model" / "config.json").exists()
    ]


def summarise(study: Study, found: Sequence[RunOutcome]) -> list[ArmSummary]:
    """A row for each arm with finished runs, the reference first, then by area; tests where both have several."""
    by_arm = {arm.name: [o for o in found if o.arm == arm.name] for arm in study.arms}
    complete = {name: runs for name, runs in by_arm.items() if runs}
    against = {arm.name: arm.against or study.reference for arm in study.arms}
    rows = [
        _row(name, runs, complete.get(against[name]) if against[name] != name else None)
        for name, runs in complete.items()
    ]
    return sorted(rows, key=lambda row: (row.arm != study.reference, -row.area.mean))


def as_json(study: Study, found: Sequence[RunOutcome], rows: Iterable[ArmSummary]) -> dict[str, Any]:
    """Everything a reader needs to check the table."""
    return {
        "study": study.model_dump(),
        "test": "one-sided Mann-Whitney U over seeds, alternative: the arm it is tested against is larger",
        "interval": "95 %, Student's t over seeds",
        "rows": [asdict(row) for row in rows],
        "runs": [asdict(outcome) for outcome in found],
    }


def _outcome(arm: str, seed: int, run: RunFolder, target: float) -> RunOutcome:
    records = list(read_lines(run.metrics))
    curve = [record["accuracy"] for record in records]
    last = records[-max(1, len(records) // 10) :]
    final = list(read_lines(run.evaluations))[-1]["accuracy"]
    return RunOutcome(
        arm=arm,
        seed=seed,
        accuracy=final,
        area=float(np.mean(curve)),
        steps_to_target=steps_to(curve, target),
        entropy=float(np.mean([record["entropy_mean"] for record in last])),
        length=float(np.mean([record["response_length_mean"] for record in last])),
        curve=curve,
    )


def steps_to(curve: Sequence[float], target: float, window: int = 3) -> int | None:
    """The first step at which the mean accuracy of the last ``window`` steps is at the target."""
    means = np.convolve(curve, np.ones(window) / window, "valid") if len(curve) >= window else np.array([])
    reached = np.flatnonzero(means >= target - 1e-12)
    return int(reached[0]) + window if len(reached) else None


def _row(name: str, runs: Sequence[RunOutcome], reference: Sequence[RunOutcome] | None) -> ArmSummary:
    def interval(field: str) -> SeedInterval:
        return over_seeds([getattr(run, field) for run in runs])

    def test(field: str) -> RankTest | None:
        if reference is None or min(len(reference), len(runs)) < 2:
            return None
        return mann_whitney(*(np.array([getattr(run, field) for run in side]) for side in (reference, runs)))

    steps = [run.steps_to_target for run in runs if run.steps_to_target is not None]
    return ArmSummary(
        arm=name,
        accuracy=interval("accuracy"),
        area=interval("area"),
        steps_to_target=over_seeds(steps) if steps else None,
        reached=len(steps),
        entropy=interval("entropy"),
        length=interval("length"),
        accuracy_test=test("accuracy"),
        area_test=test("area"),
    )


def over_seeds(values: Sequence[float]) -> SeedInterval:
    """Mean and 95 % interval; the interval of a single value is the value."""
    mean = float(np.mean(values))
    if len(values) < 2:
        return SeedInterval(mean, mean, mean, len(values))
    half = float(stats.t.ppf(0.975, len(values) - 1) * np.std(values, ddof=1) / np.sqrt(len(values)))
    return SeedInterval(mean, mean - half, mean + half, len(values))
