"""What a study found: the numbers of each run, their mean and interval over seeds, and rank tests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from delta_cli.evaluation.statistics import RankTest, mann_whitney
from delta_cli.runs.folder import RunFolder, read_lines
from delta_cli.study.plan import Study
from delta_cli.study.runner import study_runs


@dataclass(frozen=True)
class RunOutcome:
    """The numbers of one run."""

    arm: str
    seed: int
    accuracy: float  # held out, after the last step
    area: float  # area under the learning curve: mean training accuracy over the steps
    steps_to_target: int | None  # first step at which the mean accuracy of 3 steps reaches the target; None: never
    entropy: float  # nats, mean over the last tenth of the steps
    length: float  # tokens of a response, mean over the last tenth of the steps
    curve: list[float]  # training accuracy at each step


@dataclass(frozen=True)
class SeedInterval:
    """A mean over seeds with its 95 % interval (Student's t); one seed has no interval."""

    mean: float
    low: float | None
    high: float | None
    seeds: int

    def text(self, form: str) -> str:
        """The mean and the interval, each in the format ``form``, such as ".1%"."""
        interval = "" if self.low is None or self.high is None else f" [{self.low:{form}}, {self.high:{form}}]"
        return f"{self.mean:{form}}{interval}"


@dataclass(frozen=True)
class ArmSummary:
    """One row of the table."""

    arm: str
    accuracy: SeedInterval
    area: SeedInterval
    steps_to_target: SeedInterval | None  # over the seeds that reached the target
    reached: int  # seeds that reached the target
    entropy: SeedInterval
    length: SeedInterval
    accuracy_test: RankTest | None  # that the arm it is tested against is higher; None for the reference
    area_test: RankTest | None


def outcomes(study: Study, out: Path) -> list[RunOutcome]:
    """The numbers of every finished run."""
    return [
        _outcome(run.arm.name, run.seed, RunFolder(run.folder), study.target)
        for run in study_runs(study, out)
        if (run.folder / "model" / "config.json").exists()
    ]


def summarise(study: Study, found: Sequence[RunOutcome]) -> list[ArmSummary]:
    """A row for each arm with finished runs: the reference first, then by area. Tests need two runs of both arms."""
    by_arm = {arm.name: [run for run in found if run.arm == arm.name] for arm in study.arms}
    rows = [
        _row(arm.name, by_arm[arm.name], by_arm.get(study.against(arm) or "")) for arm in study.arms if by_arm[arm.name]
    ]
    return sorted(rows, key=lambda row: (row.arm != study.reference, -row.area.mean))


def as_json(study: Study, found: Sequence[RunOutcome], rows: Iterable[ArmSummary]) -> dict[str, Any]:
    """Everything a reader needs to check the table."""
    return {
        "study": study.model_dump(mode="json", exclude={"folder"}),
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


def steps_to(curve: Sequence[float], target: float) -> int | None:
    """The first step at which the mean accuracy of the last three steps reaches the target; None if never."""
    means = np.convolve(curve, np.ones(3) / 3, "valid") if len(curve) >= 3 else np.array([])
    reached = np.flatnonzero(means >= target - 1e-12)
    return int(reached[0]) + 3 if len(reached) else None


def _row(name: str, runs: Sequence[RunOutcome], reference: Sequence[RunOutcome] | None) -> ArmSummary:
    def interval(field: str) -> SeedInterval:
        return over_seeds([getattr(run, field) for run in runs])

    def test(field: str) -> RankTest | None:
        if not reference or min(len(reference), len(runs)) < 2:
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
    """Mean and 95 % interval of the values of all seeds."""
    mean = float(np.mean(values))
    if len(values) < 2:
        return SeedInterval(mean, None, None, len(values))
    half = float(stats.t.ppf(0.975, len(values) - 1) * np.std(values, ddof=1) / np.sqrt(len(values)))
    return SeedInterval(mean, mean - half, mean + half, len(values))
