"""Comparisons of made-up evaluations against numpy and scipy on their outcomes, and what they look like."""

from __future__ import annotations

from collections.abc import Mapping
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console, RenderableType
from scipy import stats

from delta_cli.errors import UserError
from delta_cli.evaluation import results
from delta_cli.evaluation.compare import Comparison, compare
from delta_cli.evaluation.results import EvaluationResult, EvaluationSettings, SampleOutcome
from delta_cli.evaluation.saved_results import comparable, evaluations_of
from delta_cli.evaluation.statistics import suite_scores
from delta_cli.evaluation.tables import render, render_comparison, render_evaluations

SETTINGS = EvaluationSettings(samples=8)
Marks = Mapping[str, np.ndarray]  # by benchmark: [P, k]


def marks(seed: int, chance: float, first: int = 20, second: int = 10) -> dict[str, np.ndarray]:
    """Outcomes of 8 samples; problems differ in difficulty, in the same way for every seed."""
    ease = np.random.default_rng(0).random((first + second, 1))
    correct = np.random.default_rng([seed]).random((first + second, 8)) < chance * ease
    return {"AIME24": correct[:first], "HMMT25 Feb": correct[first:]}


def evaluation(
    model: str, outcomes: Marks, settings: EvaluationSettings = SETTINGS, suite: str = "s"
) -> EvaluationResult:
    def groups(correct: np.ndarray) -> list[list[SampleOutcome]]:
        return [
            [
                SampleOutcome(
                    problem=f"p{index}", sample=sample, tokens=10, truncated=False, answer=str(int(mark)), correct=mark
                )
                for sample, mark in enumerate(row)
            ]
            for index, row in enumerate(correct.tolist())
        ]

    found = tuple(results.summarize(name, groups(correct), settings) for name, correct in outcomes.items())
    return EvaluationResult(
        model=model,
        backend="fake",
        suite=suite,
        settings=settings,
        responses="responses/0",
        benchmarks=found,
        average=results.average(found, settings.samples),
        suite_scores=tuple(suite_scores([each.correct() for each in found]).tolist()),
        versions={},
    )


def text(renderable: RenderableType, width: int = 80) -> str:
    console = Console(file=StringIO(), width=width, color_system=None)
    console.print(renderable)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_differences_and_the_test_are_those_of_the_outcomes() -> None:
    first, second = marks(1, 0.6), marks(2, 1.0)
    comparison = compare(evaluation("a", first), evaluation("b", second))
    assert comparison.average.difference.mean > 0  # an improvement has a plus
    for row in comparison.benchmarks:
        difference = second[row.name].mean(1) - first[row.name].mean(1)
        assert row.difference.mean == pytest.approx(difference.mean())
        assert row.difference.standard_error == pytest.approx(difference.std() / np.sqrt(len(difference)), rel=0.03)
    everything = [np.concatenate(list(each.values())) for each in (first, second)]
    difference = everything[1].mean(1) - everything[0].mean(1)
    assert comparison.average.difference.mean == pytest.approx(difference.mean())
    assert comparison.average.difference.low < difference.mean() < comparison.average.difference.high
    expected = stats.mannwhitneyu(everything[1].mean(0), everything[0].mean(0), alternative="greater")
    assert comparison.test.statistic == expected.statistic
    assert comparison.test.p_value == pytest.approx(expected.pvalue)
    assert comparison.test.p_value < 0.01
    assert Comparison.model_validate_json(comparison.model_dump_json()) == comparison


def test_the_same_outcomes_differ_by_nothing() -> None:
    same = evaluation("a", marks(1, 0.5))
    average = compare(same, same).average.difference
    assert (average.mean, average.low, average.high) == (0, 0, 0)


def test_pairing_by_problem_is_narrower_than_without() -> None:
    """Problems differ much in difficulty, policies little: the paired error is under the one of two separate means."""
    average = compare(evaluation("a", marks(1, 1.0)), evaluation("b", marks(2, 0.9))).average
    assert average.difference.standard_error < 0.7 * np.hypot(
        average.before.standard_error, average.after.standard_error
    )


def test_equal_policies_are_rarely_told_apart() -> None:
    """100 comparisons of a policy with itself at another seed: the 95 % interval misses 0 in 1 to 12 of them."""
    misses = 0
    for seed in range(100):
        average = compare(evaluation("a", marks(2 * seed, 0.7)), evaluation("b", marks(2 * seed + 1, 0.7))).average
        misses += not average.difference.low <= 0 <= average.difference.high
    assert 1 <= misses <= 12


def test_only_shared_problems_count_whatever_their_order() -> None:
    whole = evaluation("a", marks(1, 0.8))
    part = marks(2, 0.6)
    part["AIME24"] = part["AIME24"][:12]
    other = evaluation("b", part)
    shuffled = other.benchmarks[0].model_copy(
        update={"outcomes": dict(reversed(list(other.benchmarks[0].outcomes.items())))}
    )
    comparison = compare(whole, other.model_copy(update={"benchmarks": (shuffled, other.benchmarks[1])}))
    assert (comparison.average.questions, comparison.unshared) == (22, 8)
    difference = part["AIME24"].mean() - marks(1, 0.8)["AIME24"][:12].mean()
    assert comparison.benchmarks[0].difference.mean == pytest.approx(difference)
    assert "Left out: 8 problems in only one of the evaluations" in " ".join(
        text(render_comparison(comparison)).split()
    )


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (evaluation("b", marks(1, 0.5), suite="t"), "suite is 's' and 't'"),
        (evaluation("b", marks(1, 0.5), SETTINGS.model_copy(update={"top_p": 1.0})), "top_p is 0.7 and 1.0"),
        (evaluation("b", {"AIME24": marks(1, 0.5)["AIME24"]}), "only one has benchmark 'HMMT25 Feb'"),
    ],
)
def test_unlike_evaluations_are_refused_with_the_difference(other: EvaluationResult, message: str) -> None:
    with pytest.raises(UserError, match=message):
        compare(evaluation("a", marks(1, 0.5)), other)


def test_another_seed_may_be_compared_and_no_shared_problem_may_not() -> None:
    mine = evaluation("a", marks(1, 0.5))
    compare(mine, evaluation("b", marks(1, 0.5), SETTINGS.model_copy(update={"seed": 9})))
    renamed = tuple(
        each.model_copy(update={"outcomes": {f"x{key}": value for key, value in each.outcomes.items()}})
        for each in mine.benchmarks
    )
    with pytest.raises(UserError, match="no problem has the same id"):
        compare(mine, mine.model_copy(update={"benchmarks": renamed}))


def test_an_evaluation_with_outcomes_cut_off_is_refused() -> None:
    table = evaluation("a", marks(1, 0.5)).model_dump()
    table["benchmarks"][0]["outcomes"]["p3"] = "01"
    with pytest.raises(ValueError, match="2 of 8 outcomes of problem 'p3'"):
        EvaluationResult.model_validate(table)


def test_the_statement_says_which_test_was_made() -> None:
    comparison = compare(evaluation("a", marks(1, 1.0)), evaluation("b", marks(2, 0.6)))
    statement = comparison.statement
    assert "One-sided Mann–Whitney U test that b scores higher than a, over 8 and 8 repeated scores" in statement
    assert "normal approximation" in statement  # scores of 30 questions repeat, so there are ties
    assert f"U = {comparison.test.statistic:g}, p = {comparison.test.p_value:.3g}" in statement


def test_the_table_has_the_papers_layout() -> None:
    made = evaluation("some/model[bold]", marks(1, 0.7))
    shown = text(render(made), width=120)
    lines = [line.split() for line in shown.splitlines()]
    assert ["AIME24", "HMMT25", "Feb", "Avg"] in lines  # the average last
    columns = (*made.benchmarks, made.average)
    cells = [f"{100 * each.avg.mean:.2f} ±{100 * each.avg.standard_error:.2f}".split() for each in columns]
    assert ["avg@8", *(part for cell in cells for part in cell)] in lines
    assert {line.split()[0] for line in shown.splitlines() if "@" in line} == {
        "avg@8",
        "pass@2",
        "pass@4",
        "pass@8",
        "maj@8",
    }
    assert "some/model[bold]" in shown  # not read as markup
    assert "Avg is weighted" in shown
    alone = evaluation("m", {"AIME24": marks(1, 0.7)["AIME24"]})
    assert "Avg" not in text(render(alone))  # nothing is said about a column that is not there
    assert "Avg" not in text(render_comparison(compare(alone, alone)))


@pytest.mark.parametrize("width", [60, 80, 120])
def test_seven_benchmarks_fit_a_terminal_and_use_its_width(width: int) -> None:
    seven = {f"HMMT2{index} Feb": marks(index, 0.7)["AIME24"] for index in range(7)}
    made = evaluation("runs/a-rather-long-name-of-a-run-1", seven)
    for shown in (text(render(made), width), text(render_comparison(compare(made, made)), width)):
        assert shown.count("\nquestions  ") == {60: 2, 80: 1, 120: 1}[width]  # tables
        assert "95 % interval" in shown
        for each in (*made.benchmarks, made.average):
            assert f"{100 * each.avg.mean:.2f}" in shown  # not cut short
        assert all(len(line) <= width for line in shown.splitlines())
    one = text(render(evaluation("m", {"AIME24": marks(1, 0.7)["AIME24"]})), width)
    assert f"{100 * made.benchmarks[1].avg.mean:.2f} ±" in one  # on one line, where there is room


def write(folder: Path, model: str, step: int | None, chance: float, suite: str = "s", samples: int = 8) -> None:
    folder.mkdir(parents=True)
    outcomes = {name: rows[:, :samples] for name, rows in marks(step or 0, chance).items()}
    made = evaluation(model, outcomes, SETTINGS.model_copy(update={"samples": samples}), suite)
    made.model_copy(update={"step": step}).write(folder)


def run_folder(path: Path) -> Path:
    path.mkdir()
    (path / "recipe.toml").touch()
    return path


def test_a_run_is_compared_by_its_newest_evaluation_that_is_like_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = run_folder(Path("run"))
    write(tmp_path / "evaluations/base/s", "base", None, 0.5)
    for step, chance in ((9, 0.7), (10, 0.9)):  # as numbers, not as text
        write(run / f"evaluations/s-step{step}", "run", step, chance)
    write(run / "evaluations/s-step11", "run", 11, 0.9, samples=4)
    write(run / "evaluations/t-step12", "run", 12, 0.9, suite="t")
    before, after = comparable(Path("base"), run)  # a model by its name
    assert (before.path, after.evaluation.step) == (Path("evaluations/base/s"), 10)
    assert [each.evaluation.step for each in evaluations_of(run)] == [9, 10, 11, 12]
    assert comparable(run / "evaluations/s-step9", run)[1].evaluation.step == 10
    listed = text(render_evaluations(evaluations_of(run)), 60)
    assert [line.split()[0] for line in listed.splitlines()] == ["step", "9", "10", "11", "12"]


def test_evaluations_that_cannot_be_chosen_from_are_listed(tmp_path: Path) -> None:
    runs = [run_folder(tmp_path / name) for name in ("a", "b")]
    with pytest.raises(UserError, match="holds no evaluation; make one: delta eval"):
        comparable(*runs)
    for run in runs:
        write(run / "evaluations/s-step1", run.name, 1, 0.5)
        write(run / "evaluations/t-step1", run.name, 1, 0.5, suite="t")
    with pytest.raises(UserError, match="2 ways; name the two evaluations: s-step1, t-step1 against s-step1, t-step1"):
        comparable(*runs)
    write(tmp_path / "c/u", "c", 1, 0.5, suite="u")
    with pytest.raises(UserError, match="no two are of the same suite and settings"):
        comparable(runs[0], tmp_path / "c")
    with pytest.raises(UserError, match="no such file or folder"):
        comparable(tmp_path / "absent", runs[0])
