"""Checkpoints that are written in the background: the same ones, later, and training hardly waits for them."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from backends.interface import FileDigests, WriteState
from delta_cli.errors import UserError
from delta_cli.recipe import Recipe, to_toml
from delta_cli.rollout import unused_batches
from delta_cli.runs import checkpoint
from delta_cli.runs.folder import RunFolder
from delta_cli.training import checkpoint_writer
from delta_cli.training.trainer import Trainer
from tests.harness import contents, make_recipe, train
from tests.vllm.server import COMPLETIONS, serving

RESPONSES = 8 * 4  # of a step
WRITING = 1.0  # seconds that a slow disk takes for a checkpoint


def background(model: Path, **changes: Any) -> Recipe:
    return make_recipe(model, checkpoint__async_save=True, rollout__max_tokens=8, **changes)


def with_disk(disk: Callable[[WriteState, Path], FileDigests]) -> Callable[[Trainer], None]:
    """Prepares a trainer whose copied states are written by ``disk``."""

    def prepare(trainer: Trainer) -> None:
        copy_state = trainer.learner.copy_state

        def copied(room: int) -> WriteState | None:
            write = copy_state(room)
            return None if write is None else lambda folder: disk(write, folder)

        trainer.learner.copy_state = copied  # type: ignore[method-assign]

    return prepare


def assert_equal(one: Path, other: Path) -> None:
    """Everything but the recipe is the same bit for bit."""
    found, expected = contents(one), contents(other)
    assert found.pop("recipe.toml") != expected.pop("recipe.toml")
    assert found == expected


@pytest.fixture(scope="module")
def straight(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that waits for its checkpoints."""
    folder = tmp_path_factory.mktemp("straight") / "run"
    train(make_recipe(model, rollout__max_tokens=8), folder)
    return folder


def test_a_checkpoint_delays_training_by_a_tenth_of_its_writing(model: Path, straight: Path, tmp_path: Path) -> None:
    begun: list[float] = []
    seconds: list[float] = []
    ended: list[float] = []

    def slow(write: WriteState, folder: Path) -> FileDigests:
        begun.append(time.perf_counter())
        time.sleep(WRITING)
        digests = write(folder)
        ended.append(time.perf_counter())
        return digests

    def prepare(trainer: Trainer) -> None:
        with_disk(slow)(trainer)
        save = trainer.checkpoints.save

        def timed(*arguments: Any) -> None:
            start = time.perf_counter()
            save(*arguments)
            seconds.append(time.perf_counter() - start)
            assert trainer.state.step not in checkpoint.steps(trainer.folder.checkpoints)

        trainer.checkpoints.save = timed  # type: ignore[method-assign]

    train(background(model, checkpoint__keep=5), tmp_path / "run", prepare=prepare)
    assert len(begun) == 3
    assert seconds[0] <= WRITING / 10
    assert all(end <= start for end, start in zip(ended, begun[1:], strict=False)), "two were under way together"
    assert checkpoint.steps(RunFolder(tmp_path / "run").checkpoints) == [2, 4, 6]
    assert_equal(tmp_path / "run", straight)


KILLED = """
import os, signal, sys
from pathlib import Path
from backends.fake.backend import FakeEngine
copy_state = FakeEngine.copy_state
def copied(self, room):
    write = copy_state(self, room)
    def torn(folder):
        digests = write(folder)
        if folder.name.endswith("000004"):
            os.truncate(next(folder.iterdir()), 1000)
            os.kill(os.getpid(), signal.SIGKILL)
        return digests
    return torn
FakeEngine.copy_state = copied
from delta_cli.cli import main
main()
"""


def kill_while_writing(recipe: Recipe, folder: Path) -> None:
    """Run a recipe in a process that is killed while it writes the checkpoint of step 4."""
    file = folder.with_name("recipe.toml")
    file.write_text(to_toml(recipe))
    arguments = ["train", str(file), "--backend", "fake", "--run-dir", str(folder), "--quiet"]
    killed = subprocess.run([sys.executable, "-c", KILLED, *arguments], check=False, timeout=120)
    assert killed.returncode == -signal.SIGKILL
    assert checkpoint.steps(folder / "checkpoints") == [2]
    assert (folder / "checkpoints" / ".partial-step-000004").exists()


def test_a_kill_while_writing_resumes_from_the_checkpoint_before(model: Path, straight: Path, tmp_path: Path) -> None:
    recipe, folder = background(model), tmp_path / "run"
    kill_while_writing(recipe, folder)
    train(recipe, folder, resume=True)
    assert_equal(folder, straight)


@pytest.mark.long
def test_a_kill_while_writing_loses_no_batch_that_was_drawn_ahead(model: Path, tmp_path: Path) -> None:
    """Two batches ahead: equal to the bit to a run that waits for its checkpoints, and nothing is drawn twice."""
    keys: dict[str, Any] = {"engine__kind": "vllm", "engine__async_steps": 2, "evaluation__every": "never"}
    folder = tmp_path / "run"
    with serving(model) as (_, url):
        train(make_recipe(model, rollout__max_tokens=8, engine__url=[url], **keys), tmp_path / "straight")
    with serving(model) as (_, url):
        kill_while_writing(background(model, engine__url=[url], **keys), folder)
    with serving(model) as (server, url):
        train(background(model, engine__url=[url], **keys), folder, resume=True)
        asked = [body for _, route, body in server.calls if route == COMPLETIONS]
        drawn = [body for body in asked if "prompt_logprobs" not in body and body["max_tokens"] == 8]
    assert (folder / "checkpoints" / "step-000004" / unused_batches.RECORDS).exists()
    assert len(drawn) == 2 * RESPONSES, "steps 5 and 6 only: a checkpoint holds the batches of 3 and 4"
    assert_equal(folder, tmp_path / "straight")


def test_a_disk_that_refuses_ends_the_run_in_a_line(model: Path, straight: Path, tmp_path: Path) -> None:
    def full(write: WriteState, folder: Path) -> FileDigests:
        if folder.name.endswith("000004"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(folder)

    recipe, folder = background(model), tmp_path / "run"
    with pytest.raises(UserError, match=r"step-000004: cannot be written \(No space left on device\).*--resume"):
        train(recipe, folder, prepare=with_disk(full))
    assert checkpoint.find(folder / "checkpoints") == (folder / "checkpoints" / "step-000002", [])
    train(recipe, folder, resume=True)
    assert_equal(folder, straight)


def test_a_copy_that_does_not_fit_is_not_made(
    model: Path, straight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A notice says once that training waits."""
    monkeypatch.setattr(checkpoint_writer, "free_memory", lambda: 1000)
    watcher = train(background(model), tmp_path / "run")
    assert [notice.name for notice in watcher.notices].count("checkpoint_copy") == 1
    found, expected = contents(tmp_path / "run"), contents(straight)
    for name in ("recipe.toml", "notices.jsonl"):
        assert found.pop(name) != expected.pop(name)
    assert found == expected
