"""The paper's studies: their plans, the choice of the checkpoint, the table, and the whole protocol on a tiny scale."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from scipy import stats

from delta_cli.errors import UserError
from delta_cli.evaluation import results
from delta_cli.evaluation.evaluate import versions
from delta_cli.evaluation.results import EvaluationResult, EvaluationSettings, SampleOutcome
from delta_cli.evaluation.statistics import suite_scores
from delta_cli.evaluation.suites import load_suite
from delta_cli.runs import checkpoint
from delta_cli.runs.checkpoint import State
from delta_cli.runs.folder import RunFolder
from delta_cli.study.checkpoint_table import MeasuredRun, measured, measured_arms, measured_table
from delta_cli.study.plan import Study, load_study
from delta_cli.study.runner import study_runs

RECIPES = Path(__file__).parents[2] / "recipes"
PAPER = sorted(path for path in RECIPES.glob("paper_*.toml") if "\narms = " in path.read_text())


@pytest.mark.parametrize("path", PAPER, ids=lambda path: path.stem)
def test_a_study_of_the_paper_has_its_protocol(path: Path) -> None:
    """One seed, the best checkpoint of those kept every four steps, the paper's way to draw responses."""
    study = load_study(path)
    assert study.measure is not None
    assert (study.seeds, study.measure.checkpoint) == (1, "best")
    settings = study.suite().settings
    assert (settings.max_tokens, settings.top_p, settings.temperature) == (30_000, 0.7, 1.0)
    assert settings.samples == (16 if study.measure.suite in ("math7", "math4") else 5)
    for arm in study.arms:
        recipe = study.recipe_of(arm, 0)
        assert recipe.checkpoint.keep_best == "eval_accuracy"
        assert recipe.evaluation.every % recipe.checkpoint.every == 0
        if recipe.rewards[0].kind == "math":
            assert (recipe.evaluation.suite, recipe.evaluation.samples, recipe.evaluation.every) == ("aime25", 8, 4)


def test_the_arms_of_a_table_differ_in_nothing_but_what_they_say() -> None:
    """What an arm's recipe changes in the 8B recipe is one choice of the method, or the model."""
    from delta_cli.recipe import load_recipe
    from delta_cli.recipe.loading import differences

    base = load_recipe(RECIPES / "qwen3_8b.toml")
    for path in [p for p in PAPER if p.stem not in ("paper_code", "paper_olmo3")]:
        study = load_study(path)
        for arm in study.arms:
            changed = {name for name, _ in differences(base, study.recipe_of(arm, 0))}
            large = {"model.path", "run.steps"} if arm.name.endswith("_14b") else set()
            rest = changed - large
            assert large <= changed
            assert all(name.startswith(("delta.", "method.preset")) for name in rest), (path.stem, arm.name, rest)
            assert len({name.rpartition("_")[0] if "lambda" in name else name for name in rest}) <= 1


def test_the_papers_averages_are_those_of_its_columns() -> None:
    """Weighted by questions: 30 each, 33 of HMMT Feb 2026. A slip of a finger in a number would show here."""
    published = load_study(RECIPES / "paper_table1.toml").paper
    assert published is not None
    questions = np.array([33 if name == "HMMT26 Feb" else 30 for name in published.columns[:-1]])
    for name, row in published.rows.items():
        assert np.average(row[:-1], weights=questions) == pytest.approx(row[-1], abs=0.011), name


@pytest.mark.parametrize("path", PAPER, ids=lambda path: path.stem)
def test_the_tiny_scale_changes_the_task_and_not_the_method(path: Path) -> None:
    full, tiny = load_study(path), load_study(path, "tiny")
    assert tiny.name == f"{full.name}-tiny"
    for arm in full.arms:
        before, after = full.recipe_of(arm, 0), tiny.recipe_of(arm, 0)
        assert (after.method, after.delta) == (before.method, before.delta)
        assert (after.update.mini_batches, after.checkpoint.keep_best) == (4, "eval_accuracy")
        assert (after.model.path, after.data.source) == ("tiny-base", "arithmetic")


def plan(folder: Path, **changes: object) -> Study:
    (folder / "base.toml").write_text('[evaluation]\nsuite = "arithmetic"\n[checkpoint]\nkeep_best = "eval_accuracy"\n')
    arms = ({"name": "delta"}, {"name": "dapo", "set": ("method.preset=dapo",)})
    table = {
        "name": "small",
        "recipe": "base.toml",
        "seeds": 1,
        "arms": arms,
        "measure": {"suite": "math7"},
        "folder": folder,
        "reference": "delta",
    }
    return Study.model_validate(table | changes)


def write_measured(folder: Path, best: int, steps: dict[int, float], settings: EvaluationSettings, suite: str) -> None:
    """A run with a checkpoint of its best step, evaluated at several; accuracies by step, two benchmarks."""
    run = RunFolder(folder)
    folder.mkdir(parents=True)
    run.begin("")
    state = State(step=9, draws=9, best=0.5, best_step=best)
    checkpoint.save(run.checkpoints, state, "", lambda partial: {})
    for step, accuracy in steps.items():
        write_evaluation(folder / "evaluations" / f"{suite}-step{step}", step, accuracy, settings, suite)


def write_evaluation(folder: Path, step: int, accuracy: float, settings: EvaluationSettings, suite: str) -> None:
    folder.mkdir(parents=True)
    rng = np.random.default_rng(step)

    def benchmark(name: str, count: int) -> results.BenchmarkResult:
        correct = rng.random((count, settings.samples)) < accuracy
        outcomes = [
            [
                SampleOutcome(problem=f"p{n}", sample=k, tokens=9, truncated=False, answer=None, correct=bool(right))
                for k, right in enumerate(row)
            ]
            for n, row in enumerate(correct)
        ]
        return results.summarize(name, outcomes, settings)

    benchmarks = (benchmark("AIME24", 30), benchmark("HMMT26 Feb", 33))
    EvaluationResult(
        model="run",
        step=step,
        backend="fake",
        suite=suite,
        settings=settings,
        responses="responses/x",
        benchmarks=benchmarks,
        average=results.average(benchmarks, settings.samples),
        suite_scores=tuple(suite_scores([each.correct() for each in benchmarks]).tolist()),
        versions=versions(),
    ).write(folder)


def test_the_table_is_that_of_the_chosen_checkpoints(tmp_path: Path) -> None:
    """Evaluations of other steps and with other settings lie beside it and are not taken."""
    settings = load_suite("math7").settings
    study = plan(tmp_path, paper={"columns": ("AIME24", "Avg"), "rows": {"dapo": (12.34, 56.78)}})
    for cell in study_runs(study, tmp_path):
        better = cell.arm.name == "delta"
        write_measured(cell.folder, 4, {4: 0.6 if better else 0.4, 8: 0.9, 9: 0.1}, settings, "math7")
        other = settings.model_copy(update={"samples": 2})
        write_evaluation(cell.folder / "evaluations" / "a first one", 4, 0.99, other, "math7")
    found = measured(study, tmp_path)
    assert [(each.arm, each.step, each.evaluation.settings) for each in found] == [
        ("delta", 4, settings),
        ("dapo", 4, settings),
    ]
    delta, dapo = measured_arms(study, found)
    marks = [np.array([[m == "1" for m in row] for row in b.outcomes.values()]) for b in found[0].evaluation.benchmarks]
    assert delta.scores["AIME24"].mean == pytest.approx(100 * marks[0].mean())
    assert delta.scores["Avg"].mean == pytest.approx(100 * (30 * marks[0].mean() + 33 * marks[1].mean()) / 63)
    assert delta.test is None
    expected = stats.mannwhitneyu(
        found[0].evaluation.suite_scores, found[1].evaluation.suite_scores, alternative="greater", method="asymptotic"
    )
    assert dapo.test is not None
    assert dapo.test.p_value == pytest.approx(expected.pvalue)
    printed = shown(study, found)
    row, paper = printed[printed.index("dapo") :].splitlines()[:2]
    assert row.split()[:3] == ["dapo", "4", f"{dapo.scores['AIME24'].mean:.2f}"]
    assert paper.split() == ["paper", "12.34", "56.78"]


def shown(study: Study, found: list[MeasuredRun]) -> str:
    text = io.StringIO()
    Console(width=100, file=text).print(measured_table(study, measured_arms(study, found)))
    return text.getvalue()


def test_several_seeds_are_averaged_and_ranked_by_run(tmp_path: Path) -> None:
    settings = load_suite("math7").settings
    study = plan(tmp_path, seeds=3)
    for number, cell in enumerate(study_runs(study, tmp_path)):
        write_measured(cell.folder, number, {number: 0.7 if cell.arm.name == "delta" else 0.3}, settings, "math7")
    found = measured(study, tmp_path)
    delta, dapo = measured_arms(study, found)
    assert delta.steps == (0, 2, 4)
    own = [100 * each.evaluation.average.avg.mean for each in found if each.arm == "delta"]
    assert delta.scores["Avg"].mean == pytest.approx(np.mean(own))
    assert delta.scores["Avg"].high == pytest.approx(np.mean(own) + stats.t.ppf(0.975, 2) * stats.sem(own))
    assert dapo.test is not None
    assert dapo.test.p_value == pytest.approx(1 / 20)  # three runs above three


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ('recipe = "plain.toml"\n[measure]\nsuite = "math7"', "keep_best"),
        ('recipe = "base.toml"\n[measure]\nsuite = "math8"', "did you mean math7"),
        ('recipe = "base.toml"\n[paper]\ncolumns = ["Avg"]\nrows = { c = [1.0] }', "'c' is none of the arms a, b"),
        ('recipe = "base.toml"\n[paper]\ncolumns = ["Avg"]\nrows = { a = [1.0, 2.0] }', "2 numbers of a for 1 columns"),
    ],
)
def test_a_mistake_in_a_measured_study_is_one_line(changes: str, part: str, tmp_path: Path) -> None:
    plan(tmp_path)
    (tmp_path / "plain.toml").write_text("")
    file = tmp_path / "study.toml"
    file.write_text('name = "s"\nreference = "a"\narms = [{ name = "a" }, { name = "b" }]\n' + changes)
    with pytest.raises(UserError, match=part) as error:
        load_study(file)
    assert "\n" not in str(error.value)
    with pytest.raises(UserError, match="--scale huge: choose one of tiny"):
        load_study(file, "huge")


SMALL = """
name = "small"
recipe = "quickstart.toml"
set = ["checkpoint.keep_best=eval_accuracy"]
seeds = 1
arms = [{ name = "delta" }, { name = "dapo", set = ["method.preset=dapo"] }]
[measure]
suite = "few.toml"
[scales]
tiny = ["run.steps=3", "rollout.prompts=4", "rollout.responses=4", "evaluation.every=1", "checkpoint.every=1",
        "evaluation.problems=8", "evaluation.samples=2"]
"""
FEW = 'name = "few"\n[settings]\nsamples = 2\nmax_tokens = 48\ntemplate = "chat"\ntop_p = 1.0\n' + "".join(
    f'[[benchmarks]]\nname = "add {n}"\nsource = "arithmetic"\ndigits = {n}\nlimit = 12\n' for n in (1, 2)
)


@pytest.mark.long
def test_the_whole_protocol_killed_and_started_again_prints_the_same(tmp_path: Path) -> None:
    """From an empty folder to the table on the fake backend: in one go; and killed, stopped, and gone on with."""
    (tmp_path / "quickstart.toml").write_text(f'extends = "{RECIPES / "quickstart.toml"}"\n')
    (tmp_path / "few.toml").write_text(FEW)
    # The suite of the tiny scale is replaced by a smaller one here.
    (tmp_path / "small.toml").write_text(SMALL)
    command = [sys.executable, "-c", CODE, "study", "small.toml", "--scale", "tiny", "--backend", "fake", "--jobs", "1"]

    def start(out: str, log: str) -> subprocess.Popen[bytes]:
        with (tmp_path / log).open("wb") as output:
            return subprocess.Popen([*command, "--out", out], cwd=tmp_path, stdout=output, stderr=output)

    def trains(name: str) -> None:
        deadline = time.monotonic() + 120
        while not (tmp_path / "parts" / "runs" / name / "metrics.jsonl").exists():
            assert time.monotonic() < deadline, [file.read_text() for file in tmp_path.glob("[0-9]")]
            time.sleep(0.05)

    assert start("through", "0").wait(300) == 0, (tmp_path / "0").read_text()
    table = (tmp_path / "through" / "table.txt").read_text()
    assert "add" in table
    rows = [line.split() for line in table.splitlines() if line.startswith(("delta", "dapo"))]
    assert [row[0] for row in rows] == ["delta", "dapo"]

    first = start("parts", "1")
    trains("delta-seed0")
    first.kill()
    first.wait()
    second = start("parts", "2")  # waits for the run that the first one left behind
    trains("dapo-seed0")
    second.send_signal(signal.SIGTERM)
    assert second.wait(120) == 128 + signal.SIGTERM, (tmp_path / "2").read_text()
    assert "continue with: delta study small.toml --scale tiny" in (tmp_path / "2").read_text()
    assert start("parts", "3").wait(300) == 0, (tmp_path / "3").read_text()
    assert (tmp_path / "parts" / "table.txt").read_text() == table
    record = json.loads((tmp_path / "parts" / "study.json").read_text())
    best = {each["arm"]: each["steps"][0] for each in record["measured"]}
    for arm, step in best.items():
        lines = (tmp_path / "parts" / "runs" / f"{arm}-seed0" / "evaluations.jsonl").read_text().splitlines()
        accuracies = {json.loads(line)["step"]: json.loads(line)["accuracy"] for line in lines}
        accuracies.pop(0, None)
        assert accuracies[step] == max(accuracies.values())


# The tiny scale with the suites of this test's folder instead of the shipped one.
CODE = """
import sys
from delta_cli.study import plan
read = plan._scaled
def scaled(table, scale):
    mine = table.get("measure")
    return read(table, scale) | {"measure": mine}
plan._scaled = scaled
from delta_cli import cli
cli.main()
"""
