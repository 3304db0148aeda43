"""Studies: the plan, the grid, the numbers, and whether credit finds the mistake."""

from __future__ import annotations

import io
import json
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
from rich.cells import cell_len
from rich.console import Console
from scipy import stats

from delta_cli.data import arithmetic
from delta_cli.errors import UserError
from delta_cli.recipe.data import Arithmetic
from delta_cli.runs.folder import RunFolder
from delta_cli.study import runner
from delta_cli.study.plan import Study, load_study
from delta_cli.study.progress import StudyProgress
from delta_cli.study.render import table
from delta_cli.study.summary import RunOutcome, SeedInterval, as_json, outcomes, over_seeds, steps_to, summarise

STUDIES = sorted((Path(__file__).parents[2] / "recipes").glob("study_*.toml"))


def plan(folder: Path = Path(), **changes: object) -> Study:
    arms = ({"name": "delta", "set": ("method.preset=delta",)}, {"name": "dapo", "set": ("method.preset=dapo",)})
    return Study.model_validate(
        {"name": "small", "recipe": "quickstart.toml", "seeds": 3, "arms": arms, "folder": folder, "reference": "delta"}
        | changes
    )


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_every_study_in_the_repository_loads(path: Path) -> None:
    assert load_study(path).seeds >= 2


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("name = 3", "name"),
        ('name = "s"\nrecipe = "quickstart.toml"\nseeds = 0', "seeds"),
        ("[[arms", "not valid TOML"),
        (
            'name = "s"\nrecipe = "absent.toml"\nreference = "a"\n[[arms]]\nname = "a"\n[[arms]]\nname = "b"',
            "absent.toml",
        ),
        (
            'name = "s"\nrecipe = "r.toml"\nreference = "dapp"\n[[arms]]\nname = "a"\n[[arms]]\nname = "dapo"',
            "reference = 'dapp' is none of the arms a, dapo; write reference = \"dapo\"",
        ),
        ('name = "s"\nrecipe = "r.toml"\n[grid]\n"run.stepps" = [1, 2]', "arm stepps=1: .*run.steps"),
        ('name = "s"\nrecipe = "r.toml"\n[grid]\n"run.steps" = []', "no values"),
        ('name = "s"\nrecipe = "r.toml"\n[[arms]]\nname = "a"\nsets = []', "did you mean set"),
        ('name = "s"\nrecipe = "r.toml"\n[[arms]]\nname = "delta"\n[[arms]]\nname = "delta"', "same name"),
        (
            'name = "s"\nrecipe = "r.toml"\n[[arms]]\nname = "delta"\n[[arms]]\nname = "b"\nagainst = "c"',
            "against = 'c'",
        ),
        (
            'name = "s"\nrecipe = "r.toml"\n[[arms]]\nname = "delta"\n[[arms]]\nname = "b"\nset = ["run.step=1"]',
            "did you mean run.steps",
        ),
    ],
)
def test_a_mistake_in_a_study_is_one_line(text: str, part: str, tmp_path: Path) -> None:
    (tmp_path / "r.toml").write_text("")
    file = tmp_path / "study.toml"
    file.write_text(text)
    with pytest.raises(UserError, match=part) as error:
        load_study(file)
    assert "\n" not in str(error.value)


def test_keys_of_a_study_can_be_changed_within_their_range() -> None:
    assert load_study(STUDIES[0], seeds=3).seeds == 3
    with pytest.raises(UserError, match="--seeds 0: it must be at least 1"):
        load_study(STUDIES[0], seeds=0)


def test_a_grid_combines_values_and_arms(tmp_path: Path) -> None:
    (tmp_path / "r.toml").write_text("")
    text = """
name = "s"
recipe = "r.toml"
arms = [{ name = "delta" }, { name = "dapo", set = ["method.preset=dapo"] }]
[grid]
"update.learning_rate" = [1e-4, 0.5]
"rollout.dynamic_sampling" = [true]
"""
    (tmp_path / "study.toml").write_text(text)
    study = load_study(tmp_path / "study.toml", grid={"rollout.prompts": ["4", "8"]})
    assert len(study.arms) == 2 * 2 * 2
    assert study.arms[-1].name == "dapo-learning_rate=0.5-dynamic_sampling=true-prompts=8"
    recipe = study.recipe_of(study.arms[-1], 3)
    assert (recipe.method.preset, recipe.update.learning_rate, recipe.rollout.prompts) == ("dapo", 0.5, 8)
    assert (recipe.rollout.dynamic_sampling, recipe.run.seed) == (True, 3)
    assert study.reference == "delta-learning_rate=0.0001-dynamic_sampling=true-prompts=4"
    assert len({run.folder for run in runner.study_runs(study, tmp_path)}) == 8 * 8


def test_a_recipe_becomes_a_study_where_values_or_seeds_are_given(tmp_path: Path) -> None:
    recipe = tmp_path / "my recipe.toml"
    recipe.write_text("[run]\nsteps = 2\n")
    with pytest.raises(UserError, match=r"delta train .*; or compare values: delta study .* --grid"):
        load_study(recipe)
    study = load_study(recipe, grid={"model.path": ["tiny-base", "a/b"]}, seeds=4)
    assert (study.name, study.seeds, study.backend) == ("my-recipe", 4, "auto")
    assert [arm.name for arm in study.arms] == ["path=tiny-base", "path=a-b"]
    assert study.recipe_of(study.arms[1], 0).model.path == "a/b"
    assert [arm.name for arm in load_study(recipe, seeds=2).arms] == ["my-recipe"]


def test_a_table_says_what_was_really_run(tmp_path: Path) -> None:
    """Arms that are the same at a scale, and a heading that is not the full study's."""
    text = 'name = "s"\nquestion = "Two models"\nrecipe = "r.toml"\narms = [\n' + "".join(
        f'{{ name = "delta_{size}", set = ["run.steps={steps}"] }},\n' for size, steps in (("8b", 9), ("14b", 99))
    )
    (tmp_path / "r.toml").write_text("")
    (tmp_path / "study.toml").write_text(text + ']\n[scales]\ntiny = ["run.steps=3"]\n')
    full, tiny = load_study(tmp_path / "study.toml"), load_study(tmp_path / "study.toml", "tiny")
    assert (full.heading, full.remarks) == ("Two models", ())
    assert tiny.heading.startswith("s-tiny: tiny-base on arithmetic, ")
    assert "not of the methods" in tiny.heading
    assert "Two models" not in tiny.heading


def test_one_seed_has_no_interval(tmp_path: Path) -> None:
    study = plan(seeds=1, remarks=("dapo is the same run as delta",))
    for run in runner.study_runs(study, tmp_path):
        write_run(run.folder, [0.5, 0.6], 0.6)
    rows = summarise(study, outcomes(study, tmp_path))
    shown = table(study, rows)
    assert shown.groups[0] == (("final accuracy", "60.0%", "60.0%"), ("p", "", ""))
    assert shown.caption == "1 seed; one seed has no interval and no test; dapo is the same run as delta"
    assert as_json(study, outcomes(study, tmp_path), rows)["rows"][0]["accuracy"]["low"] is None


def write_run(folder: Path, curve: list[float], accuracy: float) -> None:
    run = RunFolder(folder)
    folder.mkdir(parents=True)
    run.begin("")
    for step, value in enumerate(curve, start=1):
        record = {"step": step, "accuracy": value, "entropy_mean": 0.1 * step, "response_length_mean": 20.0 + step}
        run.append(run.metrics, record)
    run.append(run.evaluations, {"step": len(curve), "accuracy": accuracy})
    run.model.mkdir()
    (run.model / "config.json").write_text("{}")


def test_the_numbers_of_a_study(tmp_path: Path) -> None:
    study = plan()
    final = {"delta": [0.9, 0.92, 0.94], "dapo": [0.8, 0.85, 0.93]}
    for cell in runner.study_runs(study, tmp_path):
        write_run(cell.folder, [0.5, 0.7, 0.9, 0.9, 0.9], final[cell.arm.name][cell.seed])
    found = outcomes(study, tmp_path)
    assert len(found) == 6
    assert found[0] == RunOutcome("delta", 0, 0.9, 0.78, 4, 0.5, 25.0, [0.5, 0.7, 0.9, 0.9, 0.9])

    rows = {row.arm: row for row in summarise(study, found)}
    mean, half = np.mean(final["dapo"]), stats.t.ppf(0.975, 2) * stats.sem(final["dapo"])
    assert (rows["dapo"].accuracy.low, rows["dapo"].accuracy.high) == pytest.approx((mean - half, mean + half))
    expected = stats.mannwhitneyu(final["delta"], final["dapo"], alternative="greater", method="exact")
    assert rows["dapo"].accuracy_test is not None
    assert rows["dapo"].accuracy_test.p_value == pytest.approx(expected.pvalue)
    assert rows["delta"].accuracy_test is None
    assert table(study, list(rows.values())).first == ("arm", "delta", "dapo")
    json.dumps(as_json(study, found, list(rows.values())))


def test_an_arm_can_be_tested_against_another_than_the_reference(tmp_path: Path) -> None:
    arms = ({"name": "delta"}, {"name": "delta_10"}, {"name": "dapo_10", "against": "delta_10"})
    study = plan(arms=arms)
    final = {"delta": [0.9, 0.92, 0.94], "delta_10": [0.7, 0.71, 0.72], "dapo_10": [0.8, 0.81, 0.82]}
    for cell in runner.study_runs(study, tmp_path):
        write_run(cell.folder, [0.5, 0.6], final[cell.arm.name][cell.seed])
    rows = summarise(study, outcomes(study, tmp_path))
    p_values = {row.arm: row.accuracy_test and row.accuracy_test.p_value for row in rows}
    assert p_values == {"delta": None, "delta_10": pytest.approx(1 / 20), "dapo_10": pytest.approx(1)}
    assert "dapo_10 against delta_10" in table(study, rows).caption


@pytest.mark.parametrize(("width", "tables"), [(60, 3), (90, 2), (160, 1)])
def test_the_table_is_read_in_any_width(width: int, tables: int, tmp_path: Path) -> None:
    """Each number once and whole, in a line that begins with its arm; one table where there is room."""
    study = plan(arms=({"name": "delta"}, {"name": "delta_exact_10"}), question="a question")
    for cell in runner.study_runs(study, tmp_path):
        write_run(cell.folder, [0.5, 0.6], 0.7 + cell.seed / 10)
    text = io.StringIO()
    Console(width=width, file=text).print(table(study, summarise(study, outcomes(study, tmp_path))))
    lines = text.getvalue().splitlines()
    assert max(map(cell_len, lines)) <= width
    rows = [line for line in lines if "delta_exact_10" in line]
    assert len(rows) == tables
    cells = [cell.strip() for row in rows for cell in row.split("│")[2:-1]]
    assert cells == ["80.0% [55.2%, 104.8%]", "0.590", "55.0% [55.0%, 55.0%]", "1.000", "never", "0.200", "22.0"]


def test_a_run_that_is_not_finished_is_left_out_and_run_again(tmp_path: Path) -> None:
    study = plan(seeds=2)
    first, *_ = runner.study_runs(study, tmp_path)
    write_run(first.folder, [0.5, 0.6], 0.6)
    assert first.finished(2)
    assert not first.finished(3)
    assert [run.arm for run in outcomes(study, tmp_path)] == ["delta"]


def test_the_grid_runs_what_is_missing_and_names_the_log_of_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "quickstart.toml").write_text("[run]\nsteps = 2\n")
    commands: list[list[str]] = []

    def fake_call(arguments: list[str], *_: object) -> int:
        commands.append(arguments)
        folder = Path(arguments[arguments.index("--run-dir") + 1])
        if folder.name == "dapo-seed1" and "--resume" not in arguments:
            folder.mkdir(parents=True)
            (folder / "recipe.toml").write_text("")
            return 1
        shutil.rmtree(folder, ignore_errors=True)
        write_run(folder, [0.5, 0.6], 0.6)
        return 0

    monkeypatch.setattr(runner, "call", fake_call)
    heard: list[str] = []
    study = plan(tmp_path, seeds=2)
    with pytest.raises(UserError, match=r"1 of 4 runs failed; read .*dapo-seed1\.log"):
        runner.StudyRunner(study, tmp_path / "out", heard.append).run()
    assert len(commands) == 4
    assert sum("starts" in line for line in heard) == 4
    runner.StudyRunner(study, tmp_path / "out", heard.append).run()
    assert len(commands) == 5
    assert "--resume" in commands[-1]
    assert any("dapo-seed1 resumes" in line for line in heard)


def test_after_ctrl_c_no_other_run_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "quickstart.toml").write_text("[run]\nsteps = 2\n")
    begun: list[list[str]] = []

    def fake_call(arguments: list[str], *_: object) -> int:
        begun.append(arguments)
        time.sleep(0.1)
        return 130

    def interrupted(line: str) -> None:
        if line.startswith("1/"):
            raise KeyboardInterrupt

    monkeypatch.setattr(runner, "call", fake_call)
    study = plan(tmp_path, seeds=4, jobs=1)
    with pytest.raises(KeyboardInterrupt):
        runner.StudyRunner(study, tmp_path / "out", interrupted).run()
    assert 1 <= len(begun) <= 3  # of 8: the one that was reported, and what began before it was heard of


def test_steps_to_a_target_is_the_end_of_the_first_window_at_it() -> None:
    assert steps_to([0.1, 0.9, 0.9, 0.9, 0.2], 0.9) == 4
    assert steps_to([0.9, 0.9], 0.9) is None
    assert steps_to([0.1] * 5, 0.9) is None
    assert over_seeds([3.0]) == SeedInterval(3.0, None, None, 1)


def test_the_first_wrong_token_is_where_the_derivation_is_left() -> None:
    spec = Arithmetic()
    problem = arithmetic.problems(spec, 1, 0)[0]
    right = arithmetic.solution(problem, spec)
    assert arithmetic.first_error(problem, right, spec) is None
    place = right.index("=") + 1
    wrong = right[:place] + str((int(right[place]) + 1) % 10) + right[place + 1 :]
    assert arithmetic.first_error(problem, wrong, spec) == place


def test_a_study_says_what_it_found_what_becomes_of_runs_and_how_long_it_will_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "quickstart.toml").write_text("[run]\nsteps = 2\n")
    study = plan(tmp_path, seeds=2, jobs=1)
    first, second, *_ = runner.study_runs(study, tmp_path / "out")
    write_run(first.folder, [0.5, 0.6], 0.6)
    second.folder.mkdir(parents=True)
    (second.folder / "recipe.toml").write_text("")
    console = Console(file=io.StringIO(), force_terminal=True, color_system=None, width=60)
    watch = StudyProgress(console)
    seen: list[str] = []

    def fake_call(arguments: list[str], *_: object) -> int:
        folder = Path(arguments[arguments.index("--run-dir") + 1])
        shutil.rmtree(folder, ignore_errors=True)
        write_run(folder, [0.5], 0.6)  # half way
        picture = Console(file=io.StringIO(), color_system=None, width=60)
        picture.print(watch.picture())
        seen.append(picture.file.getvalue())  # type: ignore[attr-defined]
        shutil.rmtree(folder)
        time.sleep(0.05)
        write_run(folder, [0.5, 0.6], 0.625)
        return 0

    monkeypatch.setattr(runner, "call", fake_call)
    heard: list[str] = []
    watch.runner = runner.StudyRunner(study, tmp_path / "out", heard.append)
    watch.runner.run()
    assert "4 runs, 1 at a time: 1 finished, 1 to resume, 2 to start" in heard[0]
    assert heard[0].endswith("logs: " + str(tmp_path / "out/runs/*.log"))
    ended = [line for line in heard if line[:2] in ("1/", "2/", "3/", "4/")]
    assert sum("was finished already" in line for line in ended) == 1
    assert sum("accuracy 62.5%" in line for line in ended) == 3
    assert sum("left 0:0" in line for line in ended) == 2  # after the last nothing is left
    assert "1/2" in seen[0]  # step of steps
    assert "3 runs to finish" in seen[0]
    assert "left" not in seen[0]  # no pace is known yet
    assert "left" in seen[1]
    assert max(len(line) for text in seen for line in text.splitlines()) <= 60
