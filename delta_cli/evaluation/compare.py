"""Is one policy better than another? Two evaluations of the same suite, problem by problem."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from delta_cli.errors import UserError
from delta_cli.evaluation import statistics
from delta_cli.evaluation.results import BenchmarkResult, Evaluation, EvaluationSettings, Record
from delta_cli.evaluation.statistics import Bools, Estimate, RankTest

FREE_SETTINGS = {"seed"}  # may differ: both are samples of the same distributions


class Row(Record):
    """avg@k of both on the problems they share, and the difference, first minus second."""

    name: str
    questions: int
    first: Estimate
    second: Estimate
    difference: Estimate  # interval: paired bootstrap over problems


class Comparison(Record):
    """What ``delta compare --json`` prints."""

    first: str
    second: str
    suite: str
    settings: EvaluationSettings  # of the first
    benchmarks: tuple[Row, ...]
    average: Row  # weighted by questions
    unshared: int  # problems that only one of them has: left out
    test: RankTest  # of the suite scores
    statement: str  # the test in words


@dataclass(frozen=True)
class _Pair:
    """Outcomes of both on the shared problems of a benchmark."""

    name: str
    first: Bools  # [P, k]
    second: Bools  # [P, k]


def compare(first: Evaluation, second: Evaluation) -> Comparison:
    """Compare two evaluations. Raises UserError, naming what differs, unless suite and settings are the same."""
    _require_alike(first, second)
    others = {each.name: each for each in second.benchmarks}
    pairs = [_pair(each, others[each.name]) for each in first.benchmarks]
    rows = [_row(pair, first.settings.samples) for pair in pairs]
    every = sum(len({*each.outcomes, *others[each.name].outcomes}) for each in first.benchmarks)
    test = statistics.mann_whitney(
        statistics.suite_scores([pair.first for pair in pairs]),
        statistics.suite_scores([pair.second for pair in pairs]),
    )
    return Comparison(
        first=first.label,
        second=second.label,
        suite=first.suite,
        settings=first.settings,
        benchmarks=tuple(rows),
        average=_average(rows, pairs, first.settings.samples),
        unshared=every - sum(row.questions for row in rows),
        test=test,
        statement=_statement(test, first.label, second.label),
    )


def _statement(test: RankTest, first: str, second: str) -> str:
    how = "exact distribution" if test.method == "exact" else "normal approximation corrected for ties and continuity"
    return (
        f"One-sided Mann–Whitney U test that {first} scores higher than {second}, over {test.first} and {test.second} "
        f"repeated scores of the full suite, {how}: U = {test.statistic:g}, p = {test.p_value:.3g}. The repeats "
        "sample two fixed policies; they do not tell how training with another seed would turn out."
    )


def _require_alike(first: Evaluation, second: Evaluation) -> None:
    mine, theirs = ({"suite": each.suite, **each.settings.model_dump()} for each in (first, second))
    differences = [
        f"{key} is {mine[key]!r} and {theirs[key]!r}"
        for key in mine
        if key not in FREE_SETTINGS and mine[key] != theirs[key]
    ]
    names = [{benchmark.name for benchmark in each.benchmarks} for each in (first, second)]
    differences += [f"only one has benchmark '{name}'" for name in sorted(names[0] ^ names[1])]
    if differences:
        raise UserError(
            f"{first.label} and {second.label} were not evaluated alike: {'; '.join(differences)}; "
            "evaluate both with the same suite and settings"
        )


def _pair(first: BenchmarkResult, second: BenchmarkResult) -> _Pair:
    shared = [problem for problem in first.outcomes if problem in second.outcomes]
    if not shared:
        raise UserError(
            f"benchmark '{first.name}': no problem has the same id in both evaluations; evaluate both on the same data"
        )
    return _Pair(first.name, first.correct(shared), second.correct(shared))


def _row(pair: _Pair, samples: int) -> Row:
    first, second = pair.first.mean(axis=1), pair.second.mean(axis=1)
    return Row(
        name=pair.name,
        questions=len(first),
        first=statistics.estimate(first, samples),
        second=statistics.estimate(second, samples),
        difference=statistics.paired_bootstrap([first - second]),
    )


def _average(rows: Sequence[Row], pairs: Sequence[_Pair], samples: int) -> Row:
    questions = [row.questions for row in rows]
    return Row(
        name="Avg",
        questions=sum(questions),
        first=statistics.weighted_average([row.first for row in rows], questions, samples),
        second=statistics.weighted_average([row.second for row in rows], questions, samples),
        difference=statistics.paired_bootstrap([pair.first.mean(axis=1) - pair.second.mean(axis=1) for pair in pairs]),
    )
