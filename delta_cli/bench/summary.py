"""What the answers say: means with 95 % intervals over seeds, paired comparisons, and what the seeds could detect."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import stats

from delta_cli.bench.arms import ARMS, DAPO, Role
from delta_cli.runs.folder import JsonObject
from delta_cli.study.summary import SeedInterval, over_seeds

LEVEL, POWER = 0.05, 0.8
LIGHTER = "wrong side × 0.5"  # the second reference, because lightening the wrong side alone may explain a gain


@dataclass(frozen=True)
class PairedComparison:
    """The mean difference of two arms over the seeds that both have, by a paired t test."""

    difference: SeedInterval
    p: float  # two-sided
    p_greater: float  # one-sided: the first arm is above the second
    detectable: float  # the difference that a test at 5 % finds in 80 of 100 repetitions with so many seeds


@dataclass(frozen=True)
class BenchRow:
    """An arm on a task; None where nothing was measured."""

    arm: str
    role: Role
    area: SeedInterval | None = None
    final: SeedInterval | None = None
    area_over_dapo: PairedComparison | None = None
    final_over_dapo: PairedComparison | None = None
    area_over_lighter: PairedComparison | None = None
    p_adjusted: float | None = None  # of area_over_dapo, Holm's correction over the task's arms of role credit
    auc: SeedInterval | None = None  # before any update
    auc_trained: SeedInterval | None = None  # after 8 updates
    noise: SeedInterval | None = None  # noise over signal of the gradient, relative to DAPO's
    cosine: SeedInterval | None = None  # of a mini-batch's gradient with the reference, less DAPO's
    forwards: float | None = None  # passes over the batch before the update
    seconds: float | None = None  # of scoring and credit in a step
    step_seconds: float | None = None
    peak_memory: float | None = None  # bytes, the most that a run used

    @property
    def verdict(self) -> str:
        """What the pre-registered comparison with DAPO on the area says."""
        found = self.area_over_dapo
        if found is None:
            return ""
        if found.p < LEVEL:
            adjusted = self.p_adjusted is not None and self.p_adjusted >= LEVEL
            word = "above DAPO" if found.difference.mean > 0 else "below DAPO"
            return f"{word} (not after Holm's correction)" if adjusted else word
        return f"no difference seen; {found.difference.seeds} seeds detect {100 * found.detectable:.1f} points"


@dataclass(frozen=True)
class AdapterCredit:
    """A credit after 8 updates of an adapter."""

    auc: SeedInterval | None
    rank: SeedInterval | None  # Spearman's correlation with its weights after 8 updates of full weights


@dataclass(frozen=True)
class TaskSummary:
    """A task's rows, and how clearly the bench tells good from bad there."""

    task: str
    rows: list[BenchRow]
    fit: PairedComparison | None  # the solver's credit over DAPO
    told_apart: dict[str, PairedComparison]  # the solver's credit over each bad one
    adapters: dict[str, dict[str, AdapterCredit]]  # by credit and adapter


def summarise(found: Sequence[JsonObject]) -> list[TaskSummary]:
    """A summary of each task, in the order of the records."""
    return [_task(name, [r for r in found if r["task"] == name]) for name in dict.fromkeys(r["task"] for r in found)]


def compare(first: dict[int, float], second: dict[int, float]) -> PairedComparison | None:
    """Compare the values of two arms by seed; None with fewer than two seeds in common."""
    seeds = sorted(first.keys() & second.keys())
    if len(seeds) < 2:
        return None
    differences = np.array([first[seed] - second[seed] for seed in seeds])
    spread = float(differences.std(ddof=1))
    error = spread / np.sqrt(len(seeds))
    if error == 0:
        p_greater = 0.5 if differences.mean() == 0 else float(differences.mean() < 0)
        p = 1.0 if differences.mean() == 0 else 0.0
    else:
        t = float(differences.mean()) / error
        p_greater = float(stats.t.sf(t, len(seeds) - 1))
        p = 2 * float(stats.t.sf(abs(t), len(seeds) - 1))
    quantiles = stats.t.ppf([1 - LEVEL / 2, POWER], len(seeds) - 1)
    return PairedComparison(over_seeds(differences.tolist()), p, p_greater, float(quantiles.sum() * error))


def holm(ps: Sequence[float]) -> list[float]:
    """Holm's adjusted p values, in the order of ``ps``."""
    order, largest = np.argsort(ps, kind="stable"), 0.0
    adjusted = np.zeros(len(ps))
    for rank, index in enumerate(order):
        largest = max(largest, min(1.0, (len(ps) - rank) * ps[index]))
        adjusted[index] = largest
    return adjusted.tolist()


def _task(name: str, found: list[JsonObject]) -> TaskSummary:
    arms = list(dict.fromkeys(record["arm"] for record in found if record["question"] != "adapters"))
    rows = [_row(arm, found) for arm in arms]
    tested = [row for row in rows if row.role == "credit" and row.area_over_dapo is not None]
    adjusted = dict(zip((row.arm for row in tested), holm([_p(row) for row in tested]), strict=True))
    rows = [BenchRow(**vars(row) | {"p_adjusted": adjusted.get(row.arm)}) for row in rows]
    areas = {arm: _values(found, "learning", arm, "area") for arm in arms}
    good = next((row.arm for row in rows if row.role == "good"), None)
    bad = [row.arm for row in rows if row.role == "bad" or row.arm == "random"]
    apart = {arm: compared for arm in bad if good and (compared := compare(areas[good], areas[arm]))}
    fit = compare(areas[good], areas[DAPO.name]) if good and DAPO.name in areas else None
    return TaskSummary(name, rows, fit, apart, _adapters(found))


def _p(row: BenchRow) -> float:
    assert row.area_over_dapo is not None
    return row.area_over_dapo.p


def _row(arm: str, found: Sequence[JsonObject]) -> BenchRow:
    def values(question: str, number: str, of: str = arm) -> dict[int, float]:
        return _values(found, question, of, number)

    area, final = values("learning", "area"), values("learning", "final")
    runs = [record for record in found if record["arm"] == arm and record["question"] == "learning"]
    reference = arm == DAPO.name
    noise, plain = values("gradient", "ratio"), values("gradient", "ratio", DAPO.name)
    cosine, plain_cosine = values("gradient", "cosine"), values("gradient", "cosine", DAPO.name)
    return BenchRow(
        arm,
        ARMS[arm].role if arm in ARMS else "credit",
        _interval(area.values()),
        _interval(final.values()),
        None if reference else compare(area, values("learning", "area", DAPO.name)),
        None if reference else compare(final, values("learning", "final", DAPO.name)),
        None if arm == LIGHTER else compare(area, values("learning", "area", LIGHTER)),
        auc=_interval(values("finding", "auc_0").values()),
        auc_trained=_interval(values("finding", "auc_8").values()),
        noise=_interval(noise[seed] / plain[seed] for seed in noise.keys() & plain.keys()),
        cosine=_interval(cosine[seed] - plain_cosine[seed] for seed in cosine.keys() & plain_cosine.keys()),
        forwards=_median(record.get("forwards", 1) for record in runs),
        seconds=_median(record["seconds_credit"] for record in runs if "seconds_credit" in record),
        step_seconds=_median(record["seconds_step"] for record in runs if "seconds_step" in record),
        peak_memory=_median(record["peak_memory"] for record in runs if "peak_memory" in record),
    )


def _values(found: Iterable[JsonObject], question: str, arm: str, number: str) -> dict[int, Any]:
    """A number by seed."""
    return {
        record["seed"]: record[number]
        for record in found
        if (record["question"], record["arm"]) == (question, arm) and record.get(number) is not None
    }


def _adapters(found: Sequence[JsonObject]) -> dict[str, dict[str, AdapterCredit]]:
    """What was measured with adapters, by credit and adapter."""
    tables = [record["table"] for record in found if record["question"] == "adapters"]
    if not tables:
        return {}

    def over(credit: str, adapter: str, number: str) -> SeedInterval | None:
        return _interval(found for table in tables if (found := table[credit][adapter][number]) is not None)

    return {
        credit: {name: AdapterCredit(over(credit, name, "auc"), over(credit, name, "rank")) for name in adapters}
        for credit, adapters in tables[0].items()
    }


def _interval(values: Iterable[float]) -> SeedInterval | None:
    found = list(values)
    return over_seeds(found) if found else None


def _median(values: Iterable[float]) -> float | None:
    found = list(values)
    return float(np.median(found)) if found else None
