"""A run stops within seconds of the request in every phase, and resumes to the same result."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from delta_cli.errors import Interrupted, UserError
from delta_cli.training.trainer import Trainer
from tests.harness import Watcher, assert_same, make_recipe, train

from .test_resume import installed

WAIT, LIMIT = 0.2, 5.0  # seconds: from the start of a phase to the request, and from there to the end of the run
SHORT = {"data__limit": 16, "evaluation__problems": 2, "evaluation__every": 1, "checkpoint__every": 1, "run__steps": 2}
LONG: dict[str, dict[str, Any]] = {  # makes a phase take minutes
    "rollout": {"rollout__max_tokens": 1000, "rollout__responses": 256},
    "evaluate": {"rollout__max_tokens": 8, "evaluation__max_tokens": 1000, "evaluation__samples": 256},
    "reward": {"rollout__max_tokens": 8},
}
SLEEPS = "import time\ndef reward(response, problem):\n    time.sleep(60 if response else 0)\n    return 0.0\n"


def stop_in(phase: str, recipe: Any, folder: Path, backend: str, prepare: Any = lambda trainer: None) -> float:
    """Ask to stop soon after a phase begins; return the seconds until the run has saved and ended."""
    began: list[float] = []
    watcher = Watcher(lambda name: began.append(time.monotonic()) if name == phase and not began else None)

    def asked() -> bool:
        return bool(began) and time.monotonic() - began[0] > WAIT

    with pytest.raises(Interrupted) as stopped:
        train(recipe, folder, backend, observer=watcher, stop_asked=asked, prepare=prepare)
    assert stopped.value.dropped == phase
    return time.monotonic() - began[0] - WAIT


@pytest.mark.parametrize("backend", ["fake", "cpu", "mlx"])
@pytest.mark.parametrize("phase", LONG)
def test_a_long_phase_is_abandoned(phase: str, backend: str, model: Path, tmp_path: Path) -> None:
    changes = SHORT | LONG[phase] | {"evaluation__at_start": phase == "evaluate"}
    if phase == "reward":
        (tmp_path / "sleeps.py").write_text(SLEEPS)
        changes |= {
            "reward__kind": "custom",
            "reward__custom_file": str(tmp_path / "sleeps.py"),
            "reward__timeout": 99.0,
        }
    recipe = make_recipe(model, **changes)
    assert stop_in(phase, recipe, tmp_path / "run", installed(backend)) < LIMIT


@pytest.mark.parametrize("phase", ["score", "update"])
@pytest.mark.parametrize("backend", [pytest.param("fake", marks=pytest.mark.long), "cpu", "mlx"])
def test_a_forward_is_abandoned_between_micro_batches(phase: str, backend: str, model: Path, tmp_path: Path) -> None:
    """Micro-batches are slowed down here. A resume repeats the abandoned step and gives the same result."""
    changes = SHORT | {"rollout__max_tokens": 8, "update__micro_batch_tokens": 48, "evaluation__at_start": False}
    recipe = make_recipe(model, update__old_logprobs="recompute", **changes)

    def slow(trainer: Trainer) -> None:
        interrupt = trainer.learner.interrupt

        def wait() -> None:
            time.sleep(0.1)
            interrupt()

        trainer.learner.interrupt = wait

    assert stop_in(phase, recipe, tmp_path / "stopped", installed(backend), slow) < LIMIT
    train(recipe, tmp_path / "stopped", backend, resume=True)
    train(recipe, tmp_path / "straight", backend)
    assert_same(tmp_path / "straight", tmp_path / "stopped")


def test_updates_that_have_begun_are_finished(model: Path, tmp_path: Path) -> None:
    """After the first mini-batch the weights are between two steps and cannot be saved."""
    recipe = make_recipe(model, **SHORT | {"rollout__max_tokens": 8, "evaluation__at_start": False})
    moved: list[int] = []

    def count(trainer: Trainer) -> None:
        step = trainer.learner.step
        trainer.learner.step = lambda *a: (moved.append(1), step(*a))[1]  # type: ignore[method-assign]

    with pytest.raises(Interrupted) as stopped:
        train(recipe, tmp_path / "stopped", stop_asked=lambda: bool(moved), prepare=count)
    assert stopped.value.step == 1
    train(recipe, tmp_path / "stopped", resume=True)
    train(recipe, tmp_path / "straight")
    assert_same(tmp_path / "straight", tmp_path / "stopped")


@pytest.mark.parametrize(("score", "verb"), [("recompute", "score"), ("rollout", "rollout")])
def test_nonfinite_log_probabilities_end_the_run(score: str, verb: str, model: Path, tmp_path: Path) -> None:
    def spoil(trainer: Trainer) -> None:
        original = getattr(trainer.learner, verb)

        def spoilt(*arguments: Any) -> Any:
            found = original(*arguments)
            found.logprobs[:] = np.nan
            return found

        setattr(trainer.learner, verb, spoilt)

    recipe = make_recipe(
        model, update__old_logprobs=score, **SHORT | {"rollout__max_tokens": 8, "evaluation__at_start": False}
    )
    with pytest.raises(UserError, match="first log-probabilities are not finite"):
        train(recipe, tmp_path / "run", prepare=spoil)
