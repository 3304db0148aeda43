"""A checkpoint is intact or absent; a damaged one is reported and skipped."""

from __future__ import annotations

import errno
import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from backends import registry
from backends.interface import FileDigests
from backends.settings import BackendSettings
from delta_cli.errors import UserError
from delta_cli.recipe import load_recipe, to_toml
from delta_cli.runs import checkpoint
from delta_cli.runs.checkpoint import State
from tests.harness import assert_same, make_recipe, train, write_model

RECIPE = to_toml(load_recipe(None))


def write_weights(folder: Path) -> FileDigests:
    save_file({"a": np.arange(100.0)}, folder / "weights.safetensors")
    return {}


def saved(root: Path, *steps: int) -> Path:
    for step in steps:
        checkpoint.save(root, State(step, step), RECIPE, write_weights)
    return root


def test_what_was_saved_is_found(tmp_path: Path) -> None:
    state = State(7, 9, "digest", best=0.5, best_step=3)
    folder = checkpoint.save(tmp_path, state, RECIPE, write_weights)
    assert checkpoint.find(tmp_path) == (folder, [])
    assert checkpoint.read_state(folder) == state
    assert (folder / "recipe.toml").read_text() == RECIPE
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["format"] == checkpoint.FORMAT
    assert set(manifest["files"]) == {"state.json", "recipe.toml", "weights.safetensors"}
    assert [path.name for path in tmp_path.iterdir()] == ["step-000007"]


def test_the_newest_is_the_one_of_the_largest_step(tmp_path: Path) -> None:
    """Also if the step has more than six digits."""
    saved(tmp_path, 999_999, 1_000_000)
    assert checkpoint.find(tmp_path)[0] == tmp_path / "step-1000000"


def truncate(folder: Path) -> None:
    file = folder / "weights.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def flip_a_bit(folder: Path) -> None:
    file = folder / "weights.safetensors"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def edit_state(folder: Path) -> None:
    (folder / "state.json").write_text('{"step": 2, "draws": 3}')


def seal_nonsense(folder: Path) -> None:
    """Write a valid manifest over an invalid state."""
    (folder / "state.json").write_text("[]")
    (folder / "manifest.json").write_text('{"format": 1, "files": {}}')


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (truncate, "weights.safetensors has"),
    "bit flip": (flip_a_bit, "weights.safetensors does not match its checksum"),
    "missing file": (lambda folder: (folder / "weights.safetensors").unlink(), "weights.safetensors cannot be read"),
    "no manifest": (lambda folder: (folder / "manifest.json").unlink(), "manifest.json cannot be read"),
    "torn manifest": (lambda folder: (folder / "manifest.json").write_text('{"for'), "manifest.json"),
    "not text": (lambda folder: (folder / "manifest.json").write_bytes(b"\xff\xfe\x00"), "manifest.json"),
    "another manifest": (lambda folder: (folder / "manifest.json").write_text("[1, 2]"), "manifest.json"),
    "nested manifest": (lambda folder: (folder / "manifest.json").write_text("[" * 10**5), "manifest.json"),
    "another state": (edit_state, "state.json"),
    "no state": (seal_nonsense, "state.json"),
    "newer format": (lambda folder: (folder / "manifest.json").write_text('{"format": 2, "files": {}}'), "format 2"),
    "empty": (lambda folder: (shutil.rmtree(folder), folder.mkdir()), "manifest.json cannot be read"),
    "a file": (lambda folder: (shutil.rmtree(folder), folder.write_text("")), "cannot be read"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_checkpoint_is_reported_and_skipped(kind: str, tmp_path: Path) -> None:
    saved(tmp_path, 2, 4)
    damage, reason = DAMAGE[kind]
    damage(tmp_path / "step-000004")
    found, (line,) = checkpoint.find(tmp_path)
    assert found == tmp_path / "step-000002"
    assert "step-000004: skipped" in line
    assert reason in line
    assert "\n" not in line


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_no_change_to_any_file_goes_unnoticed(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Overwrite, remove or insert bytes anywhere."""
    root = saved(tmp_path_factory.mktemp("checkpoints"), 2)
    folder = root / "step-000002"
    file = data.draw(st.sampled_from(sorted(path for path in folder.iterdir() if path.name != "manifest.json")))
    before = file.read_bytes()
    start = data.draw(st.integers(0, len(before)))
    stop = data.draw(st.integers(start, len(before)))
    after = before[:start] + data.draw(st.binary(max_size=8)) + before[stop:]
    file.write_bytes(after)
    assert (checkpoint.check(folder) is None) == (after == before)


@settings(max_examples=60, deadline=None)
@given(
    manifest=st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.sampled_from(["format", "files", "bytes", "sha256", "state.json", "../x"]), inner)
        ),
        max_leaves=8,
    )
)
def test_any_manifest_is_accepted_or_refused_in_one_line(
    manifest: object, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A hostile manifest never causes a traceback."""
    folder = saved(tmp_path_factory.mktemp("checkpoints"), 2) / "step-000002"
    (folder / "manifest.json").write_text(json.dumps(manifest))
    problem = checkpoint.check(folder)
    assert problem is None or "\n" not in problem


# ------------------------------------------------------------------------------------------ pruning


def steps(root: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in root.glob("step-*"))


def test_the_newest_and_the_best_are_kept(tmp_path: Path) -> None:
    saved(tmp_path, 2, 4, 6, 8)
    checkpoint.prune(tmp_path, 8, 2, best=2)
    assert steps(tmp_path) == [2, 6, 8]


def test_damaged_checkpoints_of_later_steps_do_not_count(tmp_path: Path) -> None:
    """A run that went back to step 4 keeps that checkpoint, although a damaged one of step 8 exists."""
    saved(tmp_path, 2, 4, 8)
    truncate(tmp_path / "step-000008")
    checkpoint.prune(tmp_path, 4, 1, best=None)
    assert steps(tmp_path) == [4, 8]
    assert checkpoint.find(tmp_path)[0] == tmp_path / "step-000004"


def test_a_run_keeps_its_best(model: Path, tmp_path: Path) -> None:
    """Of five checkpoints it keeps the last, and the one with the highest reward."""
    changes = {"checkpoint__every": 1, "checkpoint__keep": 1, "checkpoint__keep_best": "reward_mean"}
    train(make_recipe(model, run__steps=5, **changes), tmp_path)
    rewards = [json.loads(line)["reward_mean"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert steps(tmp_path / "checkpoints") == sorted({1 + int(np.argmax(rewards)), 5})


# ------------------------------------------------------------------------------ disks that refuse


def full(*_: object, **__: object) -> FileDigests:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_failed_save_leaves_the_one_before(tmp_path: Path) -> None:
    saved(tmp_path, 2)
    with pytest.raises(UserError, match=r"step-000004: cannot be written \(No space left on device\)") as error:
        checkpoint.save(tmp_path, State(4, 4), RECIPE, full)
    assert "\n" not in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000002"]
    assert checkpoint.find(tmp_path) == (tmp_path / "step-000002", [])


@pytest.mark.parametrize("backend", ["fake", "cpu", "mlx"])
def test_every_backend_reports_a_full_disk(backend: str, model: Path, tmp_path: Path) -> None:
    """A limit on the size of files simulates a full disk, because each library raises its own error."""
    import resource

    made = registry.create(registry.resolve(backend), BackendSettings.of(str(model)))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
        with pytest.raises(UserError, match="cannot be written") as error:
            checkpoint.save(tmp_path, State(4, 4), RECIPE, made.save)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        made.close()
    assert "\n" not in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_checkpoint_is_overwritten_on_the_way_back(model: Path, tmp_path: Path) -> None:
    """The newest checkpoint is damaged: the run resumes from the one before and saves that step again."""
    recipe = make_recipe(model, run__steps=4)
    train(recipe, tmp_path / "straight")
    train(recipe, tmp_path / "damaged")
    truncate_all = (tmp_path / "damaged" / "checkpoints" / "step-000004").glob("*.safetensors")
    for file in truncate_all:
        file.write_bytes(b"")
    heard = train(recipe, tmp_path / "damaged", resume=True)
    assert heard.notices[0].name == "damaged_checkpoint"
    assert "step-000004" in heard.notices[0].text
    assert [record["step"] for record in heard.records] == [3, 4]
    assert_same(tmp_path / "straight", tmp_path / "damaged")


def test_a_run_whose_checkpoints_are_all_damaged_does_not_start_over(model: Path, tmp_path: Path) -> None:
    recipe = make_recipe(model, run__steps=4)
    train(recipe, tmp_path)
    for file in tmp_path.glob("checkpoints/*/manifest.json"):
        file.unlink()
    before = (tmp_path / "metrics.jsonl").read_bytes()
    with pytest.raises(UserError, match="no checkpoint is intact"):
        train(recipe, tmp_path, resume=True)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


def test_the_state_of_another_model_is_refused(model: Path, tmp_path: Path) -> None:
    train(make_recipe(model, run__steps=2), tmp_path / "run")
    other = write_model(tmp_path / "other", hidden=24)
    with pytest.raises(Exception, match="does not fit") as error:
        train(make_recipe(other, run__steps=4), tmp_path / "run", resume=True)
    assert type(error.value).__name__ == "BackendError"


def test_saving_is_quick(tmp_path: Path) -> None:
    """Saving a hundred thousand parameters takes less than 100 ms; the best of five, as others use the disk too."""
    root = tmp_path / "checkpoints"
    from delta_cli.assets.random_model import write_qwen3

    write_qwen3(tmp_path / "model", vocab_size=258, hidden=64, layers=2)
    backend = registry.create("fake", BackendSettings.of(str(tmp_path / "model")))
    seconds = []
    for step in range(5):
        start = time.perf_counter()
        checkpoint.save(root, State(step, step), RECIPE, backend.save)
        seconds.append(time.perf_counter() - start)
    assert 90_000 < backend.parameters < 120_000
    assert min(seconds) < 0.1, seconds
