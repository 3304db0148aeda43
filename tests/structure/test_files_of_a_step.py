"""How many files one reads to follow a training step from sampling to the recorded metrics."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from delta_cli.training.trainer import Trainer
from tests.harness import make_recipe, train

from .imports import PACKAGES, ROOT

MOST = {"fake": 35, "cpu": 50}  # that of torch is meant to come down too


@contextmanager
def traced(found: set[str]) -> Iterator[None]:
    """Collect the files of this repository whose functions are called, by this thread and those it starts."""
    folders = tuple(f"{ROOT / package}/" for package in PACKAGES)

    def see(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(folders):
            found.add(frame.f_code.co_filename.removeprefix(f"{ROOT}/"))

    before = sys.getprofile()
    threading.setprofile(see)
    sys.setprofile(see)
    try:
        yield
    finally:
        sys.setprofile(before)
        threading.setprofile(None)


@pytest.mark.parametrize("backend", MOST)
def test_a_step_passes_through_few_files(backend: str, model: Path, tmp_path: Path) -> None:
    """The second step, which has no evaluation and no checkpoint; the first one still loads and checks things."""
    if backend == "cpu":
        pytest.importorskip("torch")
    found: set[str] = set()

    def watch(trainer: Trainer) -> None:
        step = trainer._step

        def second() -> None:
            if trainer.state.step != 1:
                return step()
            with traced(found):
                return step()

        trainer._step = second  # type: ignore[method-assign]

    rare = {"evaluation__at_start": False, "evaluation__every": "never", "checkpoint__every": 50}
    train(make_recipe(model, run__steps=3, **rare), tmp_path / "run", backend, prepare=watch)
    print(f"one step on {backend}: {len(found)} files", *sorted(found), sep="\n  ")
    assert {"delta_cli/training/trainer.py", "delta_cli/credit/coefficients.py"} <= found
    assert len(found) <= MOST[backend], sorted(found)
