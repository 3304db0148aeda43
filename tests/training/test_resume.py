"""N steps, a stop and M more steps equal N + M steps bit for bit, for every kind of stop, backend and method."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from backends import registry
from backends.interface import BackendError
from delta_cli.errors import Interrupted, UserError
from delta_cli.runs.folder import read_lines
from tests.harness import Watcher, assert_same, contents, make_recipe, train

# 12 problems in batches of 4: an epoch ends after the third step. Evaluations and checkpoints come at other steps.
SMALL = {
    "data__limit": 16,
    "rollout__max_tokens": 8,
    "evaluation__problems": 2,
    "evaluation__every": 2,
    "checkpoint__every": 3,
}
LORA = {"model__lora__rank": 2, "update__learning_rate": 0.05}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "fake": ("fake", {}),
    "fake-dynamic": ("fake", {"rollout__dynamic_sampling": True, "rollout__dynamic_sampling_limit": 3}),
    "fake-reference": ("fake", {"update__kl_coefficient": 0.1, "update__epochs": 2, "reward__flip": 0.2}),
    "cpu": ("cpu", {}),
    "cpu-lora": ("cpu", LORA),
    "cpu-dora": ("cpu", LORA | {"model__lora__dora": True}),
    "cpu-int8": ("cpu", {"update__moments": "int8", "update__offload": True}),
    "mlx": ("mlx", {}),
    "mlx-lora": ("mlx", LORA),
    "mlx-dora": ("mlx", LORA | {"model__lora__dora": True}),
    "mlx-dynamic": ("mlx", {"rollout__dynamic_sampling": True, "rollout__dynamic_sampling_limit": 3}),
}
SHORT = ("fake", "fake-dynamic", "cpu", "mlx-lora")  # the variants of `make test`


class Crash(BaseException):
    """Ends a run as abruptly as a kill."""


def stopping(after: int) -> tuple[Watcher, Callable[[], bool]]:
    """An observer, and a ``stop_asked`` that is true once phase number ``after`` begins."""
    phases = 0

    def count(name: str) -> None:
        nonlocal phases
        phases += 1

    return Watcher(count), lambda: phases > after


def crashing(after: int) -> Watcher:
    """An observer that crashes the run when phase number ``after`` begins."""
    phases = 0

    def count(name: str) -> None:
        nonlocal phases
        phases += 1
        if phases > after:
            raise Crash

    return Watcher(count)


def run_to_end(recipe: Any, folder: Path, backend: str = "fake") -> int:
    """Train, stop at every eleventh phase and resume, until the run is done; return how often it was stopped."""
    for stops in range(100):
        watcher, asked = stopping(11)
        try:
            train(recipe, folder, backend, resume=stops > 0, observer=watcher, stop_asked=asked)
        except Interrupted:
            continue
        return stops
    raise AssertionError("the run never ends")


def installed(backend: str) -> str:
    try:
        return registry.resolve(backend)
    except BackendError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize(
    "variant", [pytest.param(name, marks=() if name in SHORT else pytest.mark.long) for name in VARIANTS]
)
def test_stopped_again_and_again(variant: str, model: Path, tmp_path: Path) -> None:
    """The result is that of an uninterrupted run."""
    backend, changes = VARIANTS[variant]
    recipe = make_recipe(model, **(SMALL | changes), run__steps=5)
    train(recipe, tmp_path / "straight", installed(backend))
    assert run_to_end(recipe, tmp_path / "stopped", backend) >= 2
    assert_same(tmp_path / "straight", tmp_path / "stopped")


PHASES = 22  # of the run below: four a step, three evaluations, two checkpoints, the export


@pytest.fixture(scope="module")
def straight(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The uninterrupted run."""
    folder = tmp_path_factory.mktemp("straight")
    heard: list[str] = []
    train(make_recipe(model, **SMALL, run__steps=4), folder, observer=Watcher(heard.append))
    assert len(heard) == PHASES
    return folder


@pytest.mark.parametrize(
    "phase", [pytest.param(phase, marks=() if phase % 3 == 0 else pytest.mark.long) for phase in range(PHASES)]
)
def test_stopped_or_killed_in_any_phase(phase: int, straight: Path, model: Path, tmp_path: Path) -> None:
    recipe = make_recipe(model, **SMALL, run__steps=4)
    watcher, asked = stopping(phase)
    try:
        train(recipe, tmp_path / "stopped", observer=watcher, stop_asked=asked)
    except Interrupted:
        train(recipe, tmp_path / "stopped", resume=True)
    assert_same(straight, tmp_path / "stopped")

    with pytest.raises(Crash):
        train(recipe, tmp_path / "killed", observer=crashing(phase))
    train(recipe, tmp_path / "killed", resume=True)
    assert_same(straight, tmp_path / "killed")


def test_a_stop_saves_what_is_done_and_drops_the_rest(model: Path, tmp_path: Path) -> None:
    """Step 2 begins after an evaluation and the four phases of step 1 (rollout, reward, score, update)."""
    watcher, asked = stopping(6)
    with pytest.raises(Interrupted) as stopped:
        train(make_recipe(model, **SMALL), tmp_path, observer=watcher, stop_asked=asked)
    assert stopped.value.step == 1
    assert (tmp_path / "checkpoints" / "step-000001" / "manifest.json").exists()
    assert [record["step"] for record in read_lines(tmp_path / "metrics.jsonl")] == [1]


def test_a_run_is_made_longer(straight: Path, model: Path, tmp_path: Path) -> None:
    """A finished run is resumed with more steps: the result is that of a run started with as many."""
    changes = SMALL | {"evaluation__every": 1, "checkpoint__every": 1}
    train(make_recipe(model, **changes, run__steps=2), tmp_path / "longer")
    train(make_recipe(model, **changes, run__steps=4), tmp_path / "longer", resume=True)
    train(make_recipe(model, **changes, run__steps=4), tmp_path / "at once")
    assert_same(tmp_path / "longer", tmp_path / "at once")
    assert "steps = 4" in (tmp_path / "longer" / "recipe.toml").read_text()


def test_a_finished_run_has_nothing_to_do(model: Path, tmp_path: Path) -> None:
    recipe = make_recipe(model, **SMALL, run__steps=2)
    train(recipe, tmp_path)
    before = contents(tmp_path)
    assert train(recipe, tmp_path, resume=True).records == []
    assert contents(tmp_path) == before


def test_fewer_steps_than_are_done_are_refused(straight: Path, model: Path, tmp_path: Path) -> None:
    shutil.copytree(straight, tmp_path / "run")
    before = contents(tmp_path / "run")
    with pytest.raises(UserError, match=r"already has \d steps, more than run.steps = 1"):
        train(make_recipe(model, **SMALL | {"run__steps": 1}), tmp_path / "run", resume=True)
    assert contents(tmp_path / "run") == before


def test_a_hole_in_the_metrics_is_named(straight: Path, model: Path, tmp_path: Path) -> None:
    shutil.copytree(straight, tmp_path / "run")
    metrics = tmp_path / "run" / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    metrics.write_text("".join(lines[:1] + lines[3:]))
    watcher = train(make_recipe(model, **SMALL, run__steps=len(lines)), tmp_path / "run", resume=True)
    assert [notice.text.split(": ")[1] for notice in watcher.notices if notice.name == "metrics_missing"] == [
        "no line for steps 2 to 3; curves and sums leave them out"
    ]
    assert any(record["name"] == "metrics_missing" for record in read_lines(tmp_path / "run" / "notices.jsonl"))


def test_other_problems_are_refused(model: Path, tmp_path: Path) -> None:
    """The order of the data depends on the problems, so a run cannot be resumed with others."""
    data = tmp_path / "problems.jsonl"
    rows = [f'{{"question": "{i}+{i}=?", "answer": "{2 * i}"}}\n' for i in range(16)]
    data.write_text("".join(rows))
    recipe = make_recipe(model, **SMALL, data__source=str(data), data__template="plain", run__steps=2)
    train(recipe, tmp_path / "run")
    data.write_text("".join(reversed(rows)))
    with pytest.raises(UserError, match="not the ones this run started with"):
        train(recipe, tmp_path / "run", resume=True)
    data.write_text("".join(rows))
    train(recipe, tmp_path / "run", resume=True)


@pytest.mark.parametrize("backend", ["fake", "cpu", "mlx"])
def test_a_stop_does_not_wait_for_the_rollout(backend: str, model: Path, tmp_path: Path) -> None:
    """The run stops at the next finished response; on resume it draws the abandoned step again."""
    recipe = make_recipe(model, **SMALL, run__steps=2)
    heard: list[int] = []
    watcher = Watcher()
    watcher.advance = lambda responses, tokens: heard.append(responses)  # type: ignore[method-assign]
    with pytest.raises(Interrupted):
        train(recipe, tmp_path / "stopped", installed(backend), observer=watcher, stop_asked=lambda: len(heard) > 12)
    assert len(heard) == 13  # two in the evaluation before the first step, and eleven of that step's 32
    train(recipe, tmp_path / "stopped", backend, resume=True)
    train(recipe, tmp_path / "straight", backend)
    assert_same(tmp_path / "straight", tmp_path / "stopped")
