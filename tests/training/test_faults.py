"""Signals, full disks, dead reward workers and non-finite updates: what a run does and what it leaves behind."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backends.interface import Objective, Sequences
from delta_cli.errors import UserError
from delta_cli.recipe import to_toml
from delta_cli.runs import checkpoint
from delta_cli.runs.folder import RunFolder, read_lines
from delta_cli.training.trainer import NONFINITE_STEPS, Trainer
from tests.command import delta
from tests.harness import assert_same, lines, make_recipe, train

ROOT = Path(__file__).parents[2]
DELTA = [sys.executable, "-c", "from delta_cli.cli import main; main()"]


# -------------------------------------------------------------------------------- kill, Ctrl-C, TERM


@pytest.mark.long
def test_torture() -> None:
    """benchmarks/torture.py in short: kill the run at random instants and resume it each time."""
    command = [sys.executable, "benchmarks/torture.py", "--kills", "5", "--steps", "8"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^kills +5$", done.stdout, re.MULTILINE)


@contextmanager
def running(folder: Path, recipe: Any) -> Iterator[subprocess.Popen[str]]:
    """``delta train`` in a process of its own, once it is past its first checkpoint."""
    file = folder.with_suffix(".toml")
    file.write_text(to_toml(recipe))
    command = [*DELTA, "train", str(file), "--run-dir", str(folder), "--backend", "fake", "--quiet"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        wait_for(lambda: any(folder.glob("checkpoints/step-*")), process)
        yield process
        process.kill()


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    for _ in range(3000):
        if condition():
            return
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.02)
    raise AssertionError("nothing happened in a minute")


@pytest.mark.parametrize(
    ("number", "code"),
    [
        pytest.param(signal.SIGINT, 130, marks=pytest.mark.long),
        (signal.SIGTERM, 143),
        pytest.param(signal.SIGHUP, 129, marks=pytest.mark.long),
    ],
)
def test_a_signal_saves_and_says_how_to_go_on(number: int, code: int, model: Path, tmp_path: Path) -> None:
    with running(tmp_path / "run", make_recipe(model, run__steps=2000, evaluation__every=0)) as process:
        process.send_signal(number)
        said = process.communicate(timeout=60)[1]
    assert process.returncode == code
    step = lines(tmp_path / "run" / "metrics.jsonl")[-1]["step"]
    assert f"stopped after step {step}; continue with: delta train --resume --run-dir {tmp_path / 'run'}" in said
    assert checkpoint.find(tmp_path / "run" / "checkpoints")[0] == tmp_path / f"run/checkpoints/step-{step:06d}"


def test_the_second_signal_stops_at_once(model: Path, tmp_path: Path) -> None:
    """The first signal waits for a safe point, which a long evaluation does not have."""
    long = {"evaluation__every": 2, "evaluation__samples": 4096, "evaluation__max_tokens": 500}
    recipe = make_recipe(model, run__steps=4, evaluation__at_start=False, checkpoint__every=1, **long)
    with running(tmp_path / "run", recipe) as process:
        assert process.stderr is not None
        wait_for(lambda: (tmp_path / "run" / "rollouts" / "step-000001.jsonl.gz").exists(), process)
        time.sleep(0.5)  # until the evaluation after the second step has begun
        process.send_signal(signal.SIGINT)
        assert any("once more to stop at once" in line for line in process.stderr)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=10) == -signal.SIGINT


def test_two_processes_on_one_folder(model: Path, tmp_path: Path) -> None:
    with running(tmp_path / "run", make_recipe(model, run__steps=2000, evaluation__every=0)) as process:
        second = delta("train", "--resume", "--run-dir", tmp_path / "run", "--backend", "fake", "--quiet")
        assert second.code == 2
        assert second.err.count("\n") == 1
        assert "another process is training in this folder" in second.err
        assert process.poll() is None


# ------------------------------------------------------------------------------------------ the disk


def full_after(writes: int, method: Any) -> Callable[..., Any]:
    """The method, which from the given write on fails in the middle of a line because the disk is full."""
    count = 0

    def refuse(self: RunFolder, file: Path, record: Any) -> None:
        nonlocal count
        count += 1
        if count <= writes:
            method(self, file, record)
            return
        with file.open("a") as stream:
            stream.write('{"step": 9, "torn')
        method(self, Path("/dev/full"), record)

    return refuse


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, a disk that is always full")
@pytest.mark.parametrize(  # three evaluations and four steps
    "writes", [pytest.param(n, marks=() if n in (0, 3, 6) else pytest.mark.long) for n in range(7)]
)
def test_a_disk_that_fills_up(writes: int, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run ends with one line and loses nothing: resumed with free space, it gives the same result."""
    recipe = make_recipe(model, run__steps=4, rollout__max_tokens=8)
    train(recipe, tmp_path / "straight")
    with monkeypatch.context() as patched:
        patched.setattr(RunFolder, "append", full_after(writes, RunFolder.append))
        with pytest.raises(UserError, match=r"cannot be written \(No space left on device\).*--resume") as error:
            train(recipe, tmp_path / "full")
    assert "\n" not in str(error.value)
    train(recipe, tmp_path / "full", resume=True)
    assert_same(tmp_path / "straight", tmp_path / "full")


def refuse(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("what", ["save", "export", "rollouts", "begin"])
def test_a_disk_that_is_full(what: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = make_recipe(model, run__steps=3, rollout__max_tokens=8)
    train(recipe, tmp_path / "straight")

    def break_it(trainer: Trainer) -> None:
        if what in ("save", "export"):
            monkeypatch.setattr(trainer.learner, what, refuse)
        else:
            monkeypatch.setattr("gzip.open" if what == "rollouts" else "os.fsync", refuse)

    with pytest.raises(UserError, match=r"No space left on device.*--resume"):
        train(recipe, tmp_path / "full", prepare=break_it)
    monkeypatch.undo()
    train(recipe, tmp_path / "full", resume=RunFolder(tmp_path / "full").started)
    assert_same(tmp_path / "straight", tmp_path / "full")


def test_a_folder_that_cannot_be_written(model: Path, tmp_path: Path) -> None:
    """A file in place of the folder, and a file system without files (root may write anywhere else)."""
    taken = tmp_path / "taken"
    taken.write_text("")
    places = [taken, taken / "below"] + ([Path("/proc/delta")] if Path("/proc/self").exists() else [])
    for place in places:
        with pytest.raises(UserError, match="cannot be written") as error:
            train(make_recipe(model), place)
        assert "\n" not in str(error.value)


def test_a_killed_start_is_no_run(model: Path, tmp_path: Path) -> None:
    """The recipe is written last and whole: without it there is nothing to resume."""
    folder = RunFolder(tmp_path / "run")
    folder.hold()
    folder.release()
    assert not folder.started
    train(make_recipe(model, run__steps=1), tmp_path / "run")
    assert folder.started


# --------------------------------------------------------------------------------------- the rewards

DEADLY = """
import os
def reward(response, problem):
    if len(response) % 3 == 0 and response:
        os._exit(1)
    return len(response) % 2
"""


def test_reward_workers_that_die(model: Path, tmp_path: Path) -> None:
    """Their responses count as wrong, the run continues, and a notice reports it."""
    file = tmp_path / "deadly.py"
    file.write_text(DEADLY)
    reward = {"reward__kind": "custom", "reward__custom_file": str(file), "reward__length_penalty": 0.0}
    small = {"run__steps": 1, "rollout__responses": 4, "rollout__prompts": 2, "evaluation__at_start": False}
    heard = train(make_recipe(model, **reward, **small, evaluation__problems=1), tmp_path / "run")
    responses = list(read_lines(tmp_path / "run" / "rollouts" / "step-000001.jsonl.gz"))
    failed = [response for response in responses if response["failure"]]
    assert heard.records[0]["reward_failures"] == len(failed) > 0
    assert {response["failure"] for response in failed} == {"worker died"}
    assert {response["reward"] for response in failed} == {0.0}
    assert "reward_failures" in heard.named


# ------------------------------------------------------------------------ non-finite updates, and memory


def poisoned(trainer: Trainer, steps: set[int], loss: float, slope: float) -> None:
    """Add ``loss`` and ``slope``, which are not finite, to every update of these steps (counted from 0)."""
    accumulate = trainer.learner.accumulate

    def poison(sequences: Sequences, objective: Objective) -> float:
        def spoilt(logp: Any, rows: Any) -> tuple[float, Any]:
            true, gradient = objective(logp, rows)
            hit = trainer.state.step in steps
            return (true + loss, gradient + slope) if hit else (true, gradient)

        return accumulate(sequences, spoilt)

    trainer.learner.accumulate = poison  # type: ignore[method-assign]


POISONS = {"nan loss": (np.nan, 0.0), "infinite loss": (np.inf, 0.0), "nan": (0.0, np.nan), "infinite": (0.0, np.inf)}


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # the test provokes it
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in ("nan loss", "infinite") else pytest.mark.long) for kind in POISONS]
)
def test_a_nonfinite_update_is_skipped_and_counted(kind: str, model: Path, tmp_path: Path) -> None:
    recipe = make_recipe(model, run__steps=3, rollout__responses=16)
    heard = train(recipe, tmp_path, prepare=lambda trainer: poisoned(trainer, {1}, *POISONS[kind]))
    assert [record["nonfinite_updates"] for record in heard.records] == [0, 2, 0]
    assert [record["updates"] > 0 for record in heard.records] == [True, False, True]
    assert "nonfinite" in heard.named
    for line in (tmp_path / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_a_run_without_finite_updates_stops_and_names_the_last_good_checkpoint(model: Path, tmp_path: Path) -> None:
    recipe = make_recipe(model, run__steps=10, rollout__responses=16)
    with pytest.raises(UserError) as error:
        train(recipe, tmp_path, prepare=lambda trainer: poisoned(trainer, set(range(2, 10)), 0.0, np.nan))
    assert f"no update was finite in {NONFINITE_STEPS} steps" in str(error.value)
    assert str(tmp_path / "checkpoints" / "step-000004") in str(error.value)
    assert "\n" not in str(error.value)


def test_out_of_memory_counts_nothing_twice(model: Path, tmp_path: Path) -> None:
    """Torch repeats the mini-batch with smaller micro-batches; the metrics are those of an update that fitted."""
    torch = pytest.importorskip("torch", reason="the retry is the torch backend's")
    recipe = make_recipe(model, run__steps=1, rollout__responses=16, update__kl_coefficient=0.1)

    def scarce(trainer: Trainer) -> None:
        backend: Any = trainer.learner
        backward, calls = backend._backward, 0

        def fail_once(*arguments: Any) -> float:
            nonlocal calls
            calls += 1
            loss = backward(*arguments)
            if calls == 1:
                raise torch.OutOfMemoryError("after the gradient was added")
            return loss

        backend._backward = fail_once

    plenty = train(recipe, tmp_path / "plenty", "cpu").records[0]
    short = train(recipe, tmp_path / "short", "cpu", prepare=scarce).records[0]
    for name in ("updates", "clip_fraction", "loss", "grad_norm", "kl_old", "kl_reference", "ratio_gap"):
        assert short[name] == pytest.approx(plenty[name], rel=1e-4, abs=1e-6), name
