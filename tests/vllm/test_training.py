"""Runs that sample with a fake vLLM server learn what a local run learns, even if processes die or stop."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from backends.interface import BackendError
from delta_cli.credit import CORRECTIONS, Correction
from delta_cli.errors import Interrupted, UserError
from delta_cli.recipe import load_recipe, to_toml
from delta_cli.runs.folder import RunFolder, read_lines
from tests.harness import make_recipe, train, write_model
from tests.vllm.server import RELOAD, Fault, install, serving

LENGTHS = ("response_length_mean", "reward_mean", "tokens")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A Python whose environment has vLLM, or what looks like it."""
    monkeypatch.setenv("PYTHONPATH", str(install(tmp_path / "site")))
    return sys.executable


def metrics(folder: Path) -> list[dict[str, object]]:
    return list(read_lines(RunFolder(folder).metrics))


def first_reward_and_last(folder: Path) -> tuple[float, float]:
    rewards = [float(str(record["reward_mean"])) for record in metrics(folder)]
    return rewards[0], float(np.mean(rewards[-2:]))


@pytest.mark.parametrize("ahead", [0, pytest.param(1, marks=pytest.mark.long)])
def test_a_run_learns(model: Path, tmp_path: Path, ahead: int) -> None:
    """As many steps as the local engine takes; with ahead = 1 each batch is older by the updates of one step."""
    with serving(model) as (server, url):
        recipe = make_recipe(model, engine__kind="vllm", engine__url=[url], engine__async_steps=ahead, run__steps=8)
        train(recipe, tmp_path / "run")
        assert server.seen.count(RELOAD) == (9 if ahead == 0 else 8)
    before, after = first_reward_and_last(tmp_path / "run")
    assert after > before / 2 > -0.1  # lengths are negative rewards: responses have become less than half as long
    records = metrics(tmp_path / "run")
    updates = [int(str(record["updates"])) for record in records]
    assert [record["staleness"] for record in records] == [0, *(updates[:-1] if ahead else [0] * 7)]
    assert all(("seconds_waited" in record) == bool(ahead and step) for step, record in enumerate(records))
    if not ahead:
        assert max(float(str(record["engine_gap_max"])) for record in records) < 1e-5


@pytest.mark.long
def test_the_batch_does_not_depend_on_when_it_was_drawn(model: Path, tmp_path: Path) -> None:
    """The weights do not move, so a run that draws ahead draws exactly what the other one does."""
    for ahead in (0, 1):
        with serving(model) as (_, url):
            changes = {"engine__kind": "vllm", "engine__url": [url], "engine__async_steps": ahead}
            recipe = make_recipe(
                model, update__learning_rate=0.0, rollout__dynamic_sampling=True, run__steps=4, **changes
            )
            train(recipe, tmp_path / f"{ahead}")
    one, other = (
        [
            record["tokens"]
            for file in sorted(RunFolder(tmp_path / f"{ahead}").rollouts.iterdir())
            for record in read_lines(file)
        ]
        for ahead in (0, 1)
    )
    assert one == other


@pytest.mark.long
def test_a_stopped_run_that_draws_ahead_goes_on(model: Path, tmp_path: Path) -> None:
    with serving(model) as (server, url):
        recipe = make_recipe(model, engine__kind="vllm", engine__url=[url], engine__async_steps=1)

        def stop() -> bool:
            return server.seen.count(RELOAD) >= 4

        with pytest.raises(Interrupted):
            train(recipe, tmp_path / "run", stop_asked=stop)
        train(recipe, tmp_path / "run", resume=True)
    assert [record["step"] for record in metrics(tmp_path / "run")] == [1, 2, 3, 4, 5, 6]


@pytest.mark.long
def test_a_launched_server_ends_with_the_run(model: Path, tmp_path: Path, vllm: str) -> None:
    recipe = make_recipe(model, engine__kind="vllm", engine__launch=True, engine__python=vllm, run__steps=2)
    watcher = train(recipe, tmp_path / "run")
    assert any("starting vLLM" in notice.text for notice in watcher.notices)
    assert (tmp_path / "run" / "vllm.log").exists()
    assert not servers_of(tmp_path), "the server outlived the run"


@pytest.mark.long
def test_a_launched_server_that_dies_is_started_again(model: Path, tmp_path: Path, vllm: str) -> None:
    """It dies in the middle of a batch, when its weights are newer than those it was launched on."""
    once = ["--die-once", str(tmp_path / "died")]
    changes = {"engine__kind": "vllm", "engine__launch": True, "engine__python": vllm, "run__steps": 3}
    train(make_recipe(model, engine__arguments=once, **changes), tmp_path / "died-run")
    train(make_recipe(model, **changes), tmp_path / "run")
    assert (tmp_path / "died").exists()
    for one, other in zip(metrics(tmp_path / "died-run"), metrics(tmp_path / "run"), strict=True):
        assert [one[name] for name in LENGTHS] == [other[name] for name in LENGTHS]
    assert not servers_of(tmp_path)


@pytest.mark.long
def test_a_killed_run_takes_its_server_along(model: Path, tmp_path: Path, vllm: str) -> None:
    """A killed run cannot clean up after itself."""
    recipe = make_recipe(model, engine__kind="vllm", engine__launch=True, engine__python=vllm, run__steps=10_000)
    (tmp_path / "recipe.toml").write_text(to_toml(recipe))
    command = [
        sys.executable,
        "-m",
        "delta_cli",
        "train",
        str(tmp_path / "recipe.toml"),
        "--backend",
        "fake",
        "--quiet",
    ]
    run = subprocess.Popen([*command, "--run-dir", str(tmp_path / "run")], stdout=subprocess.DEVNULL)
    wait_for(lambda: (tmp_path / "run" / "metrics.jsonl").exists() and servers_of(tmp_path))
    run.send_signal(signal.SIGKILL)
    run.wait()
    wait_for(lambda: not servers_of(tmp_path))


def servers_of(folder: Path) -> list[int]:
    """Processes on this machine that have our stand-in's environment."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes()
            if b"vllm.entrypoints" in command and str(folder).encode() in (process / "environ").read_bytes():
                found.append(int(process.name))
        except OSError:
            continue
    return found


def wait_for(condition: Callable[[], object], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.1)


@pytest.mark.long
@pytest.mark.parametrize("ahead", [0, 1])
def test_a_lost_run_has_saved_what_it_had(model: Path, tmp_path: Path, ahead: int) -> None:
    """If a server is lost for good, the run ends with one line, and it resumes with another server."""
    changes = {"engine__kind": "vllm", "engine__deadline": 1.5, "engine__async_steps": ahead, "checkpoint__every": 1}
    with serving(model) as (server, url):
        server.faults.append(Fault(RELOAD, "status 500 out of memory", after=3, times=-1))
        with pytest.raises(BackendError, match=r"did not come back within 1\.5 s .*--resume"):
            train(make_recipe(model, engine__url=[url], **changes), tmp_path / "run")
        server.faults.clear()
    with serving(model) as (_, url):
        train(make_recipe(model, engine__url=[url], **changes), tmp_path / "run", resume=True)
    assert [record["step"] for record in metrics(tmp_path / "run")] == [1, 2, 3, 4, 5, 6]


def test_recipes_that_cannot_be_say_why(model: Path) -> None:
    def refused(said: str, *changes: str) -> None:
        with pytest.raises(UserError, match=said):
            load_recipe(None, changes)

    refused("either engine.url", "engine.kind=vllm")
    refused("either engine.url", "engine.kind=vllm", "engine.launch=true", 'engine.url=["http://a:1"]')
    refused('engine.async_steps applies to vLLM; set engine.kind = "vllm"', "engine.async_steps=1")
    refused(
        "cannot share a GPU", "engine.kind=vllm", "engine.launch=true", "engine.async_steps=1", "engine.colocated=true"
    )
    refused("whole distribution", "rollout.top_p=0.9")


def test_the_correction_is_on_by_default(tmp_path: Path) -> None:
    assert not load_recipe(None, []).correction.resolve().active
    recipe = load_recipe(None, ["engine.kind=vllm", "engine.launch=true"])
    assert recipe.correction.resolve() == CORRECTIONS["decoupled_token_is"]
    (tmp_path / "recipe.toml").write_text(to_toml(recipe))
    assert load_recipe(tmp_path / "recipe.toml", []) == recipe
    changed = load_recipe(None, ["engine.kind=vllm", "engine.launch=true", "correction.high=5.0"])
    assert changed.correction.resolve() == Correction("token", high=5.0)


def test_an_environment_without_vllm_is_told_at_once(model: Path, tmp_path: Path) -> None:
    for python, said in ((sys.executable, "has no vllm"), (str(tmp_path / "python"), "is not a Python")):
        recipe = make_recipe(model, engine__kind="vllm", engine__launch=True, engine__python=python)
        with pytest.raises(BackendError, match=said):
            train(recipe, tmp_path / "run")
