"""Looking at evaluations, pages that follow a run, and runs that hold nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from delta_cli.reporting.evaluation_inspection import inspect_evaluation
from delta_cli.runs.folder import RunFolder
from tests.command import delta

SMALL = ["run.steps=1", "rollout.prompts=4", "rollout.responses=4", "evaluation.problems=8", "data.limit=99"]
TRAIN = ["--backend", "fake", "--quiet", *(part for key in SMALL for part in ("--set", key))]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("week") / "run"
    assert delta("train", *TRAIN, "--run-dir", folder).code == 0
    return folder


def test_an_evaluation_is_opened_with_its_wrong_answers_first(run: Path) -> None:
    said = delta("eval", run, "--backend", "fake", "--samples", "2", "--limit", "5")
    assert said.code == 0, said.err
    [hint] = [line for line in said.out.splitlines() if line.startswith("to see the wrong answers: delta inspect ")]
    folder = Path(hint.rpartition(" ")[2])
    found = inspect_evaluation(folder)
    shares = [each.right for each in found.problems]
    assert shares == sorted(shares)
    assert len(shares) == 5
    for each in found.problems:
        assert [response.correct for response in each.responses] == sorted(r.correct for r in each.responses)
        assert all(response.question and response.gold for response in each.responses)
        marks = found.evaluation.benchmarks[0].outcomes[each.id]
        assert sorted("01"[response.correct] for response in each.responses) == sorted(marks)
    text = delta("inspect", folder).out
    assert text.startswith("held_out, ")
    first = found.problems[0]
    assert f"problem {first.id} (held_out), 0.0% right" in text or first.right > 0
    assert f"  gold: {first.responses[0].gold}" in text
    records = json.loads(delta("inspect", folder / "evaluation.json", "--format", "json").out)
    assert [record["id"] for record in records] == [each.id for each in found.problems]
    one = delta("inspect", folder, "--problem", first.responses[0].question).out
    assert one.count("problem ") - one.count("problems ") <= 3
    assert "no problem of" in delta("inspect", folder, "--problem", "absent").err
    assert "as text or json" in delta("inspect", folder, "--format", "html").err


@pytest.mark.long
def test_a_page_follows_a_run_until_it_ends(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Written again while the run trains, with a reload; once more without one when it is over."""
    page = tmp_path / "page.html"
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    assert delta("report", run, "--output", page, "--open").code == 0
    assert opened == [page.as_uri()]
    assert 'http-equiv="refresh"' not in page.read_text()
    waits: list[float] = []
    holder = RunFolder(run)
    holder.hold()

    def wait(seconds: float) -> None:
        assert 'http-equiv="refresh" content="20"' in page.read_text()
        waits.append(seconds)
        if len(waits) == 2:
            holder.release()

    monkeypatch.setattr("time.sleep", wait)
    assert delta("report", run, "--output", page, "--follow").code == 0
    assert waits == [20, 20]
    assert 'http-equiv="refresh"' not in page.read_text()


def test_runs_that_hold_nothing_are_shown_and_then_deleted(run: Path) -> None:
    root = run.parent
    assert "nothing to delete" in delta("runs", root, "--prune").out
    for name in ("died", "going"):
        (root / name / "checkpoints").mkdir(parents=True)
        (root / name / "recipe.toml").write_text((run / "recipe.toml").read_text())
    holder = RunFolder(root / "going")
    holder.hold()
    looked = delta("runs", root, "--prune").out
    assert f"{root / 'died'}: died after step 0 of 1, " in looked
    assert "going" not in looked
    assert "add --yes" in looked
    assert (root / "died").is_dir()
    assert "deleted 1 folder" in delta("runs", root, "--prune", "--yes").out
    holder.release()
    assert sorted(path.name for path in root.iterdir()) == ["going", "run"]
