"""Figures of the bench for token credit."""

from __future__ import annotations

from dataclasses import asdict
from statistics import fmean
from typing import Any

from results import ROOT, Named, points, result, span, table
from scipy import stats

from delta_cli.bench.arms import ARMS
from delta_cli.bench.runner import plan, records
from delta_cli.bench.summary import BenchRow, TaskSummary, compare, summarise
from delta_cli.bench.tasks import find_tasks
from delta_cli.cli.bench import FULL_TASKS, SEEDS
from delta_cli.runs.folder import JsonObject

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
SWEEP = {  # where every weight of the wrong side ran
    "fork": ("fork", "bench_fork"),
    **{label: FROM_300[label] for label in ("fork, half the learning rate", "chain", "addition", "noisy")},
}
WRONG_SIDES = ("0.75", "0.5", "0.25", "0")
README_TASKS = ("fork", "chain", "addition", "noisy")
README_ARMS = {
    "solver": "a solver's marks",
    "arca": "ARCA",
    HYPOTHESIS: '`method.preset = "delta_light"`: DelTA by side, wrong responses at half weight',
    "delta": "DelTA, the paper's",
    "wrong side × 0.25": "no credit, `method.weight_negative = 0.25`",
}
PAGE_ARMS = {
    "wrong side × 0.5": "half",
    "delta, by side": "by_side",
    "surprisal": "surprisal",
    HYPOTHESIS: "light",
    "arca": "arca",
}


def _bench() -> Named:
    yield from _task("bench", result("bench/summary")["tasks"], "addition", ("solver, flipped", "random"))
    yield from _task("fork", result("bench_fork/summary")["tasks"], "fork", ("solver, flipped", "random"))
    fork = next(task for task in result("bench_fork/summary")["tasks"] if task["task"] == "fork")
    for arm, name in PAGE_ARMS.items():
        yield f"fork.{name}", points(_row(fork, arm)["area_over_dapo"]["difference"])
    chain = result("bench_chain/summary")["tasks"]
    yield from _task("chain", chain, "chain", ("random",))
    for arm, name in {"delta": "delta", "delta, by side": "by_side"}.items():
        yield f"chain.{name}", points(_row(chain[0], arm)["area_over_dapo"]["difference"])
    yield "chain.delta.seeds", str(_row(chain[0], "delta")["area"]["seeds"])
    yield from _hypotheses()
    yield "bench.sweep", _sweep()
    yield "bench.readme", _readme()
    for task in result("bench_sums/summary")["tasks"]:
        for arm in ("solver", "delta"):
            yield f"sums.{task['task']}.{arm}", points(_row(task, arm)["area_over_dapo"]["difference"])
    for arm, name in {"dapo": "dapo", "wrong side × 0": "zero"}.items():
        runs = [each for each in _runs("bench_sums", "addition") if each["arm"] == arm]
        yield f"bench.entropy.{name}", f"{fmean(each['entropy'] for each in runs):.3f}"
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
    solver = _of(whole["sparse"], "solver").area_over_dapo.difference
    yield "sparse.solver", points(asdict(solver))
    yield "sparse.seeds", str(solver.seeds)
    words = _runs("bench_words", "words")
    yield "words.minutes", span((each["seconds"] / 60 for each in words), 0)
    yield "words.memory", f"{max(each['peak_memory'] for each in words) / 2**30:.1f}"
    for arm in ("delta", "surprisal", "entropy", "arca"):
        found = [each for each in _runs("bench_words", "words", "finding") if each["arm"] == arm]
        for updates in (0, 8):
            yield f"words.{arm}.auc_{updates}", f"{fmean(each[f'auc_{updates}'] for each in found):.2f}"
    header = ("task", "arm", "seeds", "area − DAPO's", "p", "area − half the weight's", "p", "final − DAPO's")
    rows = [
        _compared(label, row)
        for label, task in whole.items()
        for arm in FROM_300_ARMS
        for row in task.rows
        if row.arm == arm and row.area_over_dapo
    ]
    yield "hypothesis.table", table(header, rows)


def _sweep() -> str:
    """Areas less DAPO's by the weight of the wrong side, and the hypothesis's arm less the weight 0.25."""
    arms = (*(f"wrong side × {weight}" for weight in WRONG_SIDES), HYPOTHESIS)
    rows = []
    for label, (name, folder) in SWEEP.items():
        areas = _areas(folder, name)
        cells = [*(_less(areas, arm, "dapo") for arm in arms), _less(areas, HYPOTHESIS, "wrong side × 0.25")]
        rows.append([label, span((len(areas[arm]) for arm in arms), 0), *cells])
    return table(("task", "seeds", *WRONG_SIDES, "the sum", "the sum − 0.25"), rows)


def _readme() -> str:
    """Areas less DAPO's of the arms and tasks that the README shows."""
    areas = [_areas(folder, name) for name, folder in (SWEEP[task] for task in README_TASKS)]
    rows = ([title, *(_less(each, arm, "dapo") for each in areas)] for arm, title in README_ARMS.items())
    return table(("arm", *README_TASKS), rows)


def _less(areas: dict[str, dict[int, float]], arm: str, other: str) -> str:
    """How far an arm's area is above another's, over their seeds."""
    found = compare(areas[arm], areas[other])
    assert found is not None
    return points(asdict(found.difference))


def _areas(folder: str, task: str) -> dict[str, dict[int, float]]:
    """Areas of the learning runs of a folder on a task, by arm and seed."""
    areas: dict[str, dict[int, float]] = {}
    for run in _runs(folder, task):
        areas.setdefault(run["arm"], {})[run["seed"]] = run["area"]
    return areas


def _runs(folder: str, task: str, question: str = "learning") -> list[JsonObject]:
    """The answers of a folder to one question about a task."""
    return [each for each in _answers(folder) if each["question"] == question and each["task"] == task]


def _answers(folder: str) -> list[JsonObject]:
    return records(ROOT / "benchmarks" / "results" / folder / "answers.jsonl")


def _hours() -> float:
    """The full protocol's, two units at a time, by the seconds of those that ran."""
    seconds: dict[tuple[str, str], list[float]] = {}
    for folder in ("bench_fork", "bench_chain", "bench_sums", "bench_adapters"):
        for each in _answers(folder):
            seconds.setdefault((each["question"], each["task"]), []).append(each["seconds"])
    units = plan(find_tasks(FULL_TASKS, {}), list(ARMS.values()), range(SEEDS), "cpu", quick=False)
    return sum(fmean(seconds[unit.question, unit.task.name]) for unit in units) / 2 / 3600


def _since(folder: str, task: str, first: int) -> TaskSummary:
    (found,) = summarise([each for each in _answers(folder) if each["task"] == task and each["seed"] >= first])
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
