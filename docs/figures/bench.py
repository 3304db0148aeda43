"""Figures of the bench for token credit."""

from __future__ import annotations

from typing import Any

from results import Named, points, result, table


def _bench() -> Named:
    tasks = {task["task"]: task for task in result("bench/summary")["tasks"]}
    addition = tasks["addition"]
    yield "bench.seeds", str(_row(addition, "dapo")["area"]["seeds"])
    yield "bench.dapo", f"{100 * _row(addition, 'dapo')['area']['mean']:.1f}"
    header = ("arm", "area − DAPO's, points", "p", "final − DAPO's, points", "AUC", "noise / DAPO's")
    yield "bench.table", table(header, (_cells(row) for row in addition["rows"] if row["arm"] != "dapo"))
    for arm, name in (("solver, flipped", "flipped"), ("random", "random")):
        found = addition["told_apart"][arm]
        yield f"bench.{name}.difference", points(found["difference"])
        yield f"bench.{name}.p", f"{found['p_greater']:.2g}"
    explored = [row for task in result("bench_exploration/summary")["tasks"] for row in _explored(task)]
    header = ("task", "seeds", "arm", "area − DAPO's, points", "final − DAPO's, points")
    yield "bench.exploration", table(header, explored)


def _row(task: dict[str, Any], arm: str) -> dict[str, Any]:
    found: dict[str, Any] = next(row for row in task["rows"] if row["arm"] == arm)
    return found


def _cells(row: dict[str, Any]) -> list[str]:
    area, final = row["area_over_dapo"], row["final_over_dapo"]
    auc, noise = row["auc"], row["noise"]
    return [
        row["arm"],
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
