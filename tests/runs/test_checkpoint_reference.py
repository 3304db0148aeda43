"""Which step of a run is evaluated or exported; no evaluation overwrites another."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from delta_cli.errors import UserError
from delta_cli.evaluation.results import EvaluationResult
from delta_cli.recipe import load_recipe
from delta_cli.runs import checkpoint
from delta_cli.runs.checkpoint_reference import export_model, find_checkpoint
from tests.command import delta
from tests.harness import make_recipe, train, write_model

STEPS = 5


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 5 steps with a checkpoint after each, which also remembers the best by accuracy."""
    root = tmp_path_factory.mktemp("reference")
    model = write_model(root / "base")
    changes = {"checkpoint__every": 1, "checkpoint__keep": 9, "checkpoint__keep_best": "accuracy"}
    train(make_recipe(model, run__steps=STEPS, evaluation__every=0, **changes), root / "run")
    return root / "run"


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(trained, tmp_path / "run"))


def best_step(run: Path) -> int:
    """The first step with the best recorded accuracy; not the last here, because no answer is right."""
    rewards = [json.loads(line)["accuracy"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    return int(np.argmax(rewards)) + 1


def test_the_exported_model_is_used_if_it_holds_the_step(run: Path) -> None:
    for which in (None, "last", str(STEPS)):
        reference = find_checkpoint(str(run), which)
        assert (reference.step, reference.checkpoint, reference.weights) == (STEPS, None, str(run / "model"))
    reference = find_checkpoint(str(run), "2")
    assert (reference.step, reference.checkpoint) == (2, run / "checkpoints" / "step-000002")


def test_best_is_the_step_with_the_best_metric(run: Path) -> None:
    best = best_step(run)
    assert best < STEPS
    assert find_checkpoint(str(run), "best").step == best
    assert checkpoint.read_state(run / "checkpoints" / f"step-{STEPS:06d}").best_step == best


@pytest.mark.parametrize("which", ["base", "0"])
def test_base_is_the_model_that_the_run_started_from(run: Path, which: str, tmp_path: Path) -> None:
    reference = find_checkpoint(str(run), which)
    base = load_recipe(run / "recipe.toml").model.path
    assert (reference.step, reference.checkpoint, reference.weights) == (0, None, base)
    with pytest.raises(UserError, match="choose another one to export"):
        export_model(reference, "fake", tmp_path / "out")


def test_a_run_alone_is_compared_with_its_base(run: Path) -> None:
    """Both are evaluated on the held-out problems; a second call draws nothing again."""
    said = delta("compare", run, "--backend", "fake")
    assert said.code == 0, said.err
    assert f"{run} after step {STEPS} against {run} after step 0, on held_out" in " ".join(said.out.split())
    files = sorted((run / "evaluations").glob("*/responses/*/*.jsonl"))
    assert len(files) == 2
    before = [file.read_bytes() for file in files]
    again = delta("compare", run, "--backend", "fake", "--json")
    table = json.loads(again.out)
    assert (table["before"], table["after"]) == (f"{run} after step 0", f"{run} after step {STEPS}")
    assert [file.read_bytes() for file in files] == before
    listed = delta("compare", run, "--list")
    assert all(f"held_out-step{step}" in "".join(listed.out.split()) for step in (0, STEPS))


def test_last_means_a_checkpoint_newer_than_the_model(run: Path) -> None:
    """After a resume with more steps was stopped, the exported model is still that of step 5."""
    (run / "model" / "delta.json").write_text('{"format": 1, "step": 3}')
    reference = find_checkpoint(str(run))
    assert (reference.step, reference.checkpoint) == (STEPS, run / "checkpoints" / f"step-{STEPS:06d}")
    assert find_checkpoint(str(run), "3").checkpoint is None


def test_a_checkpoint_is_preferred_to_a_model_of_unknown_step(run: Path) -> None:
    (run / "model" / "delta.json").unlink()
    assert find_checkpoint(str(run)).checkpoint == run / "checkpoints" / f"step-{STEPS:06d}"
    shutil.rmtree(run / "checkpoints")
    reference = find_checkpoint(str(run))
    assert (reference.step, reference.weights) == (None, str(run / "model"))


def test_damaged_checkpoints_are_reported_and_never_chosen(run: Path) -> None:
    shutil.rmtree(run / "model")
    newest = run / "checkpoints" / f"step-{STEPS:06d}"
    (newest / "state.safetensors").write_bytes(b"")
    said: list[str] = []
    assert find_checkpoint(str(run), None, said.append).step == STEPS - 1
    assert str(newest) in said[0]
    with pytest.raises(UserError, match="has 0 bytes"):
        find_checkpoint(str(run), str(STEPS))


@pytest.mark.parametrize(
    ("which", "part"),
    [
        ("7", r"not there \(there are checkpoints of the steps 1, 2, 3, 4, 5\)"),
        ("newest", "choose best, last, base or"),
    ],
)
def test_a_missing_step_is_refused_and_the_existing_ones_are_listed(run: Path, which: str, part: str) -> None:
    with pytest.raises(UserError, match=part) as error:
        find_checkpoint(str(run), which)
    assert "\n" not in str(error.value)


def test_without_keep_best_there_is_no_best(run: Path) -> None:
    for state in run.glob("checkpoints/*/state.json"):
        table = json.loads(state.read_text()) | {"best": None, "best_step": None}
        state.write_text(json.dumps(table))
        (state.parent / "manifest.json").unlink()
        checkpoint._seal(state.parent, {})
    with pytest.raises(UserError, match=r"checkpoint\.keep_best"):
        find_checkpoint(str(run), "best")


def test_a_model_has_no_checkpoints() -> None:
    with pytest.raises(UserError, match="is a model, not a run"):
        find_checkpoint("tiny-base", "best")


def test_an_export_holds_the_weights_of_its_step(run: Path, tmp_path: Path) -> None:
    """The last step's export equals the model that training exported; another step's does not."""
    shutil.copytree(run / "model", tmp_path / "trained")
    shutil.rmtree(run / "model")
    trained = load_file(tmp_path / "trained" / "model.safetensors")
    for which, step in (("last", STEPS), ("2", 2), ("best", best_step(run))):
        out = tmp_path / f"out-{which}"
        said = delta("export", run, out, "--checkpoint", which, "--backend", "fake")
        assert said.code == 0
        assert f"after step {step} of {run}" in said.out
        assert json.loads((out / "delta.json").read_text())["step"] == step
        weights = load_file(out / "model.safetensors")
        assert weights.keys() == trained.keys()
        assert all(np.array_equal(weights[name], trained[name]) for name in weights) == (step == STEPS)
    assert delta("export", run, out, "--backend", "fake").code == 2
    assert delta("export", tmp_path, tmp_path / "new", "--backend", "fake").code == 2


def test_evaluations_of_other_steps_limits_and_settings_lie_side_by_side(run: Path) -> None:
    def evaluate(*options: str) -> EvaluationResult:
        said = delta("eval", run, "--backend", "fake", "--quiet", "--json", *options)
        assert said.code == 0
        return EvaluationResult.model_validate_json(said.out)

    whole = evaluate()
    assert (whole.step, whole.limit, whole.model, whole.format) == (STEPS, None, str(run), 2)
    cut = evaluate("--limit", "2")
    assert (cut.limit, cut.average.questions) == (2, 2)
    second = evaluate("--checkpoint", "2")
    assert second.step == 2
    seeded = evaluate("--seed", "7")
    assert seeded.settings.seed == 7
    folder = run / "evaluations"
    assert {each.name: EvaluationResult.read(each) for each in folder.iterdir()} == {
        f"held_out-step{STEPS}": whole,
        f"held_out-step{STEPS}-limit2": cut,
        "held_out-step2": second,
        f"held_out-step{STEPS}-2": seeded,
    }
    assert evaluate("--seed", "7") == seeded  # the same command finds its folder
    assert len(list(folder.iterdir())) == 4
    refused = delta("eval", run, "--backend", "fake", "--quiet", "--out", folder / "held_out-step2")
    assert refused.code == 2
    assert "holds a different evaluation" in refused.err


def test_the_checkpoint_draws_the_responses(run: Path) -> None:
    """Its responses are longer than those of the last step, because the task rewards short ones."""
    for step in (1, STEPS):
        options = ["--checkpoint", str(step), "--samples", "8", "--backend", "fake", "--quiet"]
        assert delta("eval", run, *options).code == 0
    early, late = (EvaluationResult.read(run / "evaluations" / f"held_out-step{step}") for step in (1, STEPS))
    assert early.average.mean_length > late.average.mean_length + 1
