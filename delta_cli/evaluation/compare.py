"""Is one policy better than another? Two evaluations of the same suite, problem by problem."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from backends.arrays import Bools
from delta_cli.errors import UserError
from delta_cli.evaluation import statistics
from delta_cli.evaluation.results import BenchmarkResult, EvaluationResult, EvaluationSettings, FrozenModel
from delta_cli.evaluation.statistics import Estimate, RankTest

FREE_SETTINGS = {"seed"}  # may differ: both are samples of the same distributions


class ComparisonRow(FrozenModel):
    """avg@k of both on their shared problems, and the difference, after minus before."""

    name: str
    questions: int
    before: Estimate
    after: Estimate
    difference: Estimate  # interval: paired bootstrap over problems


class Comparison(FrozenModel):
    """What ``delta compare --json`` prints."""

    before: str
    after: str
    suite: str
    settings: EvaluationSettings  # of the evaluation before
    benchmarks: tuple[ComparisonRow, ...]
    average: ComparisonRow  # weighted by questions
    unshared: int  # problems in only one evaluation, which are left out
    test: RankTest  # of the suite scores
    statement: str  # the test in words


@dataclass(frozen=True)
class _Pair:
    """Outcomes of both on the problems of a benchmark that they share."""

    name: str
    before: Bools  # [P, k]
    after: Bools  # [P, k]


def compare(before: EvaluationResult, after: EvaluationResult) -> Comparison:
    """Is ``after`` better than ``before``? Raises UserError if suite or settings differ, and names the difference."""
    _require_alike(before, after)
    others = {each.name: each for each in after.benchmarks}
    pairs = [_pair(each, others[each.name]) for each in before.benchmarks]
    rows = [_row(pair, before.settings.samples) for pair in pairs]
    every = sum(len({*each.outcomes, *others[each.name].outcomes}) for each in before.benchmarks)
    test = statistics.mann_whitney(
        statistics.suite_scores([pair.after for pair in pairs]),
        statistics.suite_scores([pair.before for pair in pairs]),
    )
    return Comparison(
        before=before.label,
        after=after.label,
        suite=before.suite,
        settings=before.settings,
        benchmarks=tuple(rows),
        average=_average(rows, pairs, before.settings.samples),
        unshared=every - sum(row.questions for row in rows),
        test=test,
        statement=_statement(test, before.label, after.label),
    )


def unlike(before: EvaluationResult, after: EvaluationResult) -> list[str]:
    """The differences in suite, settings and benchmarks that keep two evaluations from being compared."""
    mine, theirs = ({"suite": each.suite, **each.settings.model_dump()} for each in (before, after))
    differences = [
        f"{key} is {mine[key]!r} and {theirs[key]!r}"
        for key in mine
        if key not in FREE_SETTINGS and mine[key] != theirs[key]
    ]
    names = [{benchmark.name for benchmark in each.benchmarks} for each in (before, after)]
    return differences + [f"only one has benchmark '{name}'" for name in sorted(names[0] ^ names[1])]


def _statement(test: RankTest, before: str, after: str) -> str:
    how = "exact distribution" if test.method == "exact" else "normal approximation corrected for ties and continuity"
    return (
        f"One-sided Mann–Whitney U test that {after} scores higher than {before}, over {test.first} and {test.second} "
        f"repeated scores of the full suite, {how}: U = {test.statistic:g}, p = {test.p_value:.3g}. The repeats "
        "sample two fixed policies; they say nothing about training with another seed."
    )


def _require_alike(before: EvaluationResult, after: EvaluationResult) -> None:
    if differences := unlike(before, after):
        raise UserError(
            f"{before.label} and {after.label} cannot be compared: {'; '.join(differences)}; "
            "evaluate both with the same suite and settings"
        )


def _pair(before: BenchmarkResult, after: BenchmarkResult) -> _Pair:
    shared = [problem for problem in before.outcomes if problem in after.outcomes]
    if not shared:
        raise UserError(
            f"benchmark '{before.name}': no problem has the same id in both evaluations; evaluate both on the same data"
        )
    return _Pair(before.name, before.correct(shared), after.correct(shared))


def _row(pair: _Pair, samples: int) -> ComparisonRow:
    before, after = pair.before.mean(axis=1), pair.after.mean(axis=1)
    return ComparisonRow(
        name=pair.name,
        questions=len(before),
        before=statistics.estimate(before, samples),
        after=statistics.estimate(after, samples),
        difference=statistics.paired_bootstrap([after - before]),
    )


def _average(rows: Sequence[ComparisonRow], pairs: Sequence[_Pair], samples: int) -> ComparisonRow:
    questions = [row.questions for row in rows]
    return ComparisonRow(
        name="Avg",
        questions=sum(questions),
        before=statistics.weighted_average([row.before for row in rows], questions, samples),
        after=statistics.weighted_average([row.after for row in rows], questions, samples),
        difference=statistics.paired_bootstrap([pair.after.mean(axis=1) - pair.before.mean(axis=1) for pair in pairs]),
    )
