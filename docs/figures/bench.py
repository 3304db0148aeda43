"""Figures of the bench for token credit."""

from __future__ import annotations

from dataclasses import asdict
from statistics import fmean
from typing import Any

from results import ROOT, Named, points, result, span, table
from scipy import stats

from delta_cli.bench.arms import ARMS
from delta_cli.bench.runner import plan, records
from delta_cli.bench.summary import BenchRow, TaskSummary, summarise
from delta_cli.bench.tasks import find_tasks
from delta_cli.cli.bench import FULL_TASKS, SEEDS

HYPOTHESIS = "delta, by side, wrong × 0.5"
FROM_300 = {  # what ran on seeds from 300 up: the task, and the folder of its answers
    "fork": ("fork", "bench_hypothesis"),
    "fork, half the learning rate": ("fork", "bench_rate"),
    "chain": ("chain", "bench_chain"),
    "addition": ("addition", "bench_sums"),
    "noisy": ("noisy", "bench_sums"),
    "sparse": ("sparse", "bench_sparse"),
    "words": ("words", "bench_words"),
}
FROM_300_ARMS = ("wrong side × 0.5", HYPOTHESIS, "arca")
PAGE_ARMS = {"wrong side × 0.5": "half", "delta, by side": "by_side", "surprisal": "surprisal"}


def _bench() -> Named:
    yield from _task("bench", result("bench/summary")["tasks"], "addition", ("solver, flipped", "random"))
    yield from _task("fork", result("bench_fork/summary")["tasks"], "fork", ("solver, flipped", "random"))
    fork = next(task for task in result("bench_fork/summary")["tasks"] if task["task"] == "fork")
    for arm, name in PAGE_ARMS.items():
        yield f"fork.{name}", points(_row(fork, arm)["area_over_dapo"]["difference"])
    chain = result("bench_chain/summary")["tasks"]
    yield from _task("chain", chain, "chain", ("random",))
    yield from _hypotheses()
    yield "bench.hours", f"{_hours():.1f}"
    for task in result("bench_adapters/summary")["tasks"]:
        yield f"bench.adapters.{task['task']}", _adapters(task["adapters"])
    explored = [row for task in result("bench_exploration/summary")["tasks"] for row in _explored(task)]
    header = ("task", "seeds", "arm", "area − DAPO's, points", "final − DAPO's, points")
    yield "bench.exploration", table(header, explored)


def _hypotheses() -> Named:
    """The two hypotheses on the seeds that were named for their tests, and what else ran from seed 300 up."""
    tests = (
        ("fork", "bench_hypothesis", 306, (HYPOTHESIS, "arca")),
        ("chain", "bench_chain", 300, (HYPOTHESIS,)),
        ("sparse", "bench_sparse", 300, (HYPOTHESIS,)),
        ("words", "bench_words", 300, (HYPOTHESIS,)),
    )
    for name, folder, first, arms in tests:
        fresh = _since(folder, name, first)
        yield f"hypothesis.{name}.seeds", str(_of(fresh, HYPOTHESIS).area_over_dapo.difference.seeds)
        for arm in arms:
            row, short = _of(fresh, arm), "arca" if arm == "arca" else "hypothesis"
            for other, found in (("dapo", row.area_over_dapo), ("lighter", row.area_over_lighter)):
                yield f"{short}.{name}.{other}", f"{points(asdict(found.difference))} (p = {found.p:.2g})"
    whole = {label: _since(folder, name, 300) for label, (name, folder) in FROM_300.items()}
    for arm, short in zip(FROM_300_ARMS, ("half", "light", "arca"), strict=True):
        yield f"fork16.{short}", points(asdict(_of(whole["fork"], arm).area_over_dapo.difference))
    solver = _of(whole["sparse"], "solver").area_over_dapo.difference
    yield "sparse.solver", points(asdict(solver))
    yield "sparse.seeds", str(solver.seeds)
    words = [*records(ROOT / "benchmarks" / "results" / "bench_words" / "answers.jsonl")]
    yield "words.minutes", span((each["seconds"] / 60 for each in words), 0)
    yield "words.memory", f"{max(each['peak_memory'] for each in words) / 2**30:.1f}"
    header = ("task", "arm", "seeds", "area − DAPO's", "p", "area − half the weight's", "p", "final − DAPO's")
    rows = [
        _compared(label, row)
        for label, task in whole.items()
        for arm in FROM_300_ARMS
        for row in task.rows
        if row.arm == arm
    ]
    yield "hypothesis.table", table(header, rows)


def _hours() -> float:
    """The full protocol's, two units at a time, by the seconds of those that ran."""
    seconds: dict[tuple[str, str], list[float]] = {}
    for folder in ("bench_fork", "bench_chain", "bench_sums", "bench_adapters"):
        for each in records(ROOT / "benchmarks" / "results" / folder / "answers.jsonl"):
            seconds.setdefault((each["question"], each["task"]), []).append(each["seconds"])
    units = plan(find_tasks(FULL_TASKS, {}), list(ARMS.values()), range(SEEDS), "cpu", quick=False)
    return sum(fmean(seconds[unit.question, unit.task.name]) for unit in units) / 2 / 3600


def _since(folder: str, task: str, first: int) -> TaskSummary:
    answers = records(ROOT / "benchmarks" / "results" / folder / "answers.jsonl")
    (found,) = summarise([each for each in answers if each["task"] == task and each["seed"] >= first])
    return found


def _of(task: TaskSummary, arm: str) -> BenchRow:
    return next(row for row in task.rows if row.arm == arm)


def _compared(label: str, row: BenchRow) -> list[str]:
    cells = [label, row.arm, str(row.area_over_dapo.difference.seeds)]
    for found in (row.area_over_dapo, row.area_over_lighter):
        cells += [points(asdict(found.difference)), _p(found.p)] if found else ["", ""]
    return [*cells, points(asdict(row.final_over_dapo.difference))]


def _adapters(table_of: dict[str, Any]) -> str:
    names = list(next(iter(table_of.values())))
    header = ("credit", *(f"{name}: AUC" for name in names), *(f"{name}: rank" for name in names[1:]))
    cells = [
        [
            credit,
            *(f"{of[name]['auc']['mean']:.2f}" for name in names),
            *(f"{of[name]['rank']['mean']:.2f}" for name in names[1:]),
        ]
        for credit, of in table_of.items()
    ]
    return table(header, cells)


def _task(name: str, tasks: list[dict[str, Any]], of: str, bad: tuple[str, ...]) -> Named:
    task = next(task for task in tasks if task["task"] == of)
    yield f"{name}.seeds", str(_row(task, "dapo")["area"]["seeds"])
    yield f"{name}.dapo", f"{100 * _row(task, 'dapo')['area']['mean']:.1f}"
    header = ("arm", "seeds", "area − DAPO's, points", "p", "final − DAPO's, points", "AUC", "noise / DAPO's")
    yield f"{name}.table", table(header, (_cells(row) for row in task["rows"] if row["arm"] != "dapo"))
    compared = [row["area_over_dapo"] for row in task["rows"] if row["area_over_dapo"]]
    yield f"{name}.error", span((100 * _standard_error(each["difference"]) for each in compared), 1)
    yield f"{name}.detectable", span((100 * each["detectable"] for each in compared), 1)
    yield f"{name}.fit", points(task["fit"]["difference"])
    yield f"{name}.fit.p", f"{task['fit']['p']:.2g}"
    for arm in bad:
        found, short = task["told_apart"][arm], arm.removeprefix("solver, ")
        yield f"{name}.{short}.difference", points(found["difference"])
        yield f"{name}.{short}.p", f"{found['p_greater']:.2g}"


def _standard_error(difference: dict[str, Any]) -> float:
    """Of the mean, from its 95 % interval."""
    quantile = float(stats.t.ppf(0.975, difference["seeds"] - 1))
    return float(difference["high"] - difference["low"]) / 2 / quantile


def _row(task: dict[str, Any], arm: str) -> dict[str, Any]:
    found: dict[str, Any] = next(row for row in task["rows"] if row["arm"] == arm)
    return found


def _cells(row: dict[str, Any]) -> list[str]:
    area, final = row["area_over_dapo"], row["final_over_dapo"]
    auc, noise = row["auc"], row["noise"]
    return [
        row["arm"],
        str(row["area"]["seeds"]) if row["area"] else "",
        points(area["difference"]) if area else "",
        _p(area["p"]) if area else "",
        points(final["difference"]) if final else "",
        f"{auc['mean']:.2f}" if auc else "",
        f"{noise['mean']:.2f}" if noise else "",
    ]


def _p(value: float) -> str:
    return f"{value:.3f}" if value >= 0.001 else "< 0.001"


def _explored(task: dict[str, Any]) -> list[list[str]]:
    rows = []
    for row in task["rows"]:
        if row["area_over_dapo"]:
            area, final = row["area_over_dapo"]["difference"], row["final_over_dapo"]["difference"]
            rows.append([task["task"], str(area["seeds"]), row["arm"], points(area), points(final)])
    return rows


SOURCES = (_bench,)
