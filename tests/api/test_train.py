"""Training from Python: the same run as the command's, its records as tables, and what can be done with it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import delta_cli
from delta_cli.api.metrics_table import MetricsTable
from delta_cli.errors import UserError
from tests.command import delta

SMALL = {"run.steps": 2, "rollout": {"prompts": 4, "responses": 4}, "evaluation.problems": 8, "data.limit": 99}
AS_OPTIONS = [
    *("--set", "run.steps=2", "--set", "rollout.prompts=4", "--set", "rollout.responses=4"),
    *("--set", "evaluation.problems=8", "--set", "data.limit=99"),
]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> delta_cli.Run:
    folder = tmp_path_factory.mktemp("api") / "run"
    return delta_cli.train("quickstart", backend="fake", folder=folder, display="quiet", **SMALL)


def test_it_is_the_run_of_the_command(run: delta_cli.Run, tmp_path: Path) -> None:
    """Same recipe, same metrics but for times and memory, same weights."""
    assert delta("train", "--backend", "fake", "--quiet", "--run-dir", tmp_path / "b", *AS_OPTIONS).code == 0
    assert (run.folder / "recipe.toml").read_text() == (tmp_path / "b" / "recipe.toml").read_text()
    same = ("reward_mean", "loss", "grad_norm", "tokens")
    for mine, line in zip(run.metrics, (tmp_path / "b" / "metrics.jsonl").read_text().splitlines(), strict=True):
        assert [mine[name] for name in same] == [json.loads(line)[name] for name in same]
    weights = "model/model.safetensors"
    assert (run.folder / weights).read_bytes() == (tmp_path / "b" / weights).read_bytes()


def test_the_records_are_tables(run: delta_cli.Run) -> None:
    table = run.metrics
    assert len(table) == 2
    assert table.columns[:2] == ["step", "accuracy"]
    np.testing.assert_array_equal(table.column("step"), [1.0, 2.0])
    assert table[-1]["step"] == 2
    assert len(table[1:]) == 1
    with pytest.raises(KeyError, match="the columns are step"):
        table.column("acuracy")
    assert str(table).splitlines()[0].split()[:2] == ["step", "accuracy"]
    assert "<td>2</td>" in table._repr_html_()
    assert [record["step"] for record in run.evaluations] == [0, 2]
    assert repr(run).startswith(f"<Run {run.folder}: done, step 2 of 2, held-out accuracy ")


def test_a_table_of_nothing_and_a_long_one() -> None:
    assert len(MetricsTable([])) == 0
    assert str(MetricsTable([])) == ""
    long = MetricsTable([{"step": step, "note": "x" if step else None} for step in range(100)])
    assert len(str(long).splitlines()) == 18
    assert np.isnan(long.column("note")).all()


def test_a_run_without_evaluations_is_evaluated_on_its_held_out_problems(tmp_path: Path) -> None:
    never = SMALL | {"run.steps": 1, "evaluation.every": "never"}
    run = delta_cli.train("quickstart", backend="fake", folder=tmp_path / "run", display="quiet", **never)
    assert len(run.evaluations) == 0
    assert run.evaluate(samples=1).average.questions == 5


def test_a_run_is_evaluated_compared_inspected_and_reported(run: delta_cli.Run, tmp_path: Path) -> None:
    result = run.evaluate(samples=2, limit=4)
    assert result.settings.samples == 2
    assert result.step == 2
    gain = run.compare()
    assert gain.average.questions == 5
    assert gain.average.difference.low <= gain.average.difference.mean <= gain.average.difference.high
    page = run.inspect(step=1)
    assert "✓" in str(page) or "✗" in str(page)
    assert page._repr_html_().startswith('<iframe srcdoc="&lt;!doctype html')
    assert run.report(tmp_path / "page.html").stat().st_size > 10_000


def test_a_run_is_resumed_and_what_decides_the_result_stays(run: delta_cli.Run, tmp_path: Path) -> None:
    folder = tmp_path / "r"
    delta_cli.train("quickstart", backend="fake", folder=folder, display="quiet", **SMALL)
    longer = delta_cli.train(folder=folder, resume=True, backend="fake", display="quiet", **{"run.steps": 3})
    assert [record["step"] for record in longer.metrics] == [1, 2, 3]
    with pytest.raises(UserError, match=r"resuming would change run\.seed: 0 → 1"):
        delta_cli.train(folder=folder, resume=True, backend="fake", **{"run.seed": 1})
    with pytest.raises(UserError, match="holds a run already"):
        delta_cli.train(folder=folder, backend="fake", display="quiet", **SMALL)


def test_mistakes_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for arguments, message in (
        ({"run": {"step": 3}}, "unknown key run.step"),
        ({"recipe": "quickstrat"}, "did you mean quickstart"),
        ({"recipe": {"run": {"steps": -1}}}, "at least 1"),
        ({"resume": True}, "give it, as in folder="),
        ({"parallel.processes": 2}, "use delta train"),
    ):
        with pytest.raises(UserError, match=message):
            delta_cli.train(backend="fake", **arguments)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="holds no run"):
        delta_cli.Run(tmp_path)
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = delta_cli.trian  # type: ignore[attr-defined]


SCRIPT = """
import delta_cli
run = delta_cli.train(
    "quickstart", backend="fake", display="quiet", rollout={"prompts": 4, "responses": 4}, reward={"kind": "custom",
    "custom_file": "mine.py"}, **{"run.steps": 1, "evaluation.problems": 4, "data.limit": 40}
)
print(run.metrics[0]["reward_mean"], run.state)
"""


@pytest.mark.long
def test_a_script_without_a_main_guard_trains_with_a_reward_of_its_own(tmp_path: Path) -> None:
    """Its workers do not run the script again: it prints once."""
    (tmp_path / "mine.py").write_text("def reward(response, problem):\n    return 0.25\n")
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "0.25 done\n"
