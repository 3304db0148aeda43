"""Runs on several processes, which a user starts, stops, kills and resumes."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from backends.launch import torch_ranks
from delta_cli.runs.folder import RunFolder, read_lines
from tests.command import Said, delta
from tests.harness import SHORT, assert_same, contents, lines

ROOT = Path(__file__).parents[2]
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
KEYS = SHORT | {"run.steps": 4, "checkpoint.every": 1, "update.epsilon": 0.01, "evaluation.every": 2}


def arguments_of(model: Path, folder: Path, processes: int, backend: str = "cpu", **keys: Any) -> list[str]:
    """The arguments of ``delta`` for KEYS, with changes given as ``section__key=value``."""
    changes = KEYS | {"model.path": str(model)} | {name.replace("__", "."): value for name, value in keys.items()}
    sets = [part for name, value in changes.items() for part in ("--set", f"{name}={json.dumps(value)}")]
    return ["train", "--backend", backend, "--run-dir", str(folder), "--processes", str(processes), "--quiet", *sets]


def command(*arguments: Any, **keys: Any) -> list[str]:
    return [sys.executable, "-m", "delta_cli", *arguments_of(*arguments, **keys)]


def started(*arguments: Any, **keys: Any) -> Said:
    """Run the command in a process of its own, because it starts the ranks."""
    line = command(*arguments, **keys)
    done = subprocess.run(line, env=ENVIRONMENT, cwd=ROOT, capture_output=True, text=True, timeout=300)
    return Said(done.returncode, done.stdout, done.stderr)


def run(model: Path, folder: Path, processes: int, **keys: Any) -> Said:
    """Train to the end; a run of one process takes place in this one."""
    arguments = (model, folder, processes)
    said = delta(*arguments_of(*arguments, **keys)) if processes == 1 else started(*arguments, **keys)
    assert said.code == 0, said.err[-3000:]
    return said


def resume(folder: Path, processes: int, *changes: str) -> None:
    arguments = ["train", "--resume", "--run-dir", str(folder), "--processes", str(processes), "--quiet"]
    arguments += [part for change in changes for part in ("--set", change)]
    subprocess.run(
        [sys.executable, "-m", "delta_cli", *arguments, "--backend", "cpu"],
        env=ENVIRONMENT,
        cwd=ROOT,
        check=True,
        timeout=300,
    )


def assert_close(folder: Path, expected: Path) -> None:
    """Two runs have the same responses, and numbers that differ by rounding only."""
    for name in ("metrics.jsonl", "evaluations.jsonl"):
        for found, other in zip(lines(folder / name), lines(expected / name), strict=True):
            for key in found.keys() & other.keys() - {"processes"}:
                near = pytest.approx(other[key], rel=1e-3, abs=1e-4) if isinstance(other[key], float) else other[key]
                assert found[key] == near, (name, key)
    for file in sorted(RunFolder(expected).rollouts.glob("step-*")):
        texts = [
            [record["tokens"] for record in read_lines(each / "rollouts" / file.name)] for each in (folder, expected)
        ]
        assert texts[0] == texts[1]


def assert_exported(folder: Path, out: Path) -> None:
    """One process exports the model from the last checkpoint of several ranks: it is the one they exported."""
    assert delta("export", folder, out, "--backend", "cpu", "--checkpoint", "last").code == 0
    found, expected = (load_file(each / "model.safetensors") for each in (out, RunFolder(folder).model))
    assert found.keys() == expected.keys()
    assert all(np.array_equal(found[name], expected[name]) for name in expected)


@pytest.mark.long
def test_a_curriculum_chooses_the_same_problems_on_two_processes(model: Path, tmp_path: Path) -> None:
    """Also after a resume with another number of processes."""
    (tmp_path / "short.py").write_text(
        "def reward(response, problem):\n    return float(int(problem.answer) % 3 > 0 and len(response) < 9)\n"
    )
    keys = {"data__curriculum": "pass_rate", "data__limit": 16, "reward__kind": "custom", "checkpoint__keep": 9,
            "reward__custom_file": str(tmp_path / "short.py"), "reward__length_penalty": 0.0}  # fmt: skip
    for processes in (1, 2):
        run(model, tmp_path / str(processes), processes, **keys)
    assert_close(tmp_path / "2", tmp_path / "1")
    for step in ("step-000004", "step-000003"):
        rates = [(tmp_path / name / "checkpoints" / step / "pass_rates.jsonl").read_text() for name in ("1", "2")]
        assert rates[0] == rates[1] != ""
    shutil.rmtree(tmp_path / "2" / "checkpoints" / "step-000004")
    shutil.rmtree(tmp_path / "2" / "checkpoints" / "step-000003")
    resume(tmp_path / "2", 1)
    assert_close(tmp_path / "2", tmp_path / "1")


@pytest.fixture(scope="module")
def alone(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of one process."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    run(model, folder, 1)
    return folder


@pytest.mark.parametrize(("processes", "sharding"), [(2, "none"), pytest.param(3, "full", marks=pytest.mark.long)])
def test_the_number_of_processes_does_not_change_the_result(
    processes: int, sharding: str, model: Path, alone: Path, tmp_path: Path
) -> None:
    done = run(model, tmp_path / "run", processes, parallel__sharding=sharding)
    assert done.out == done.err == ""
    assert_close(tmp_path / "run", alone)
    for record in read_lines(tmp_path / "run" / "metrics.jsonl"):
        assert record["processes"] == processes
        assert record["peak_memory_least"] <= record["peak_memory"]
    resume_states = RunFolder(tmp_path / "run").checkpoints.glob("step-000004/*.safetensors")
    assert len(list(resume_states)) == (2 if sharding == "none" else 2 * processes)
    assert_exported(tmp_path / "run", tmp_path / "exported")


@pytest.mark.long
def test_processes_hold_copies_of_split_weights(model: Path, alone: Path, tmp_path: Path) -> None:
    """Two hold a copy together, and the first two write it. The run goes on with other processes and shardings."""
    folder = tmp_path / "run"
    run(model, folder, 4, parallel__sharding="hybrid", parallel__shard_size=2)
    assert_close(folder, alone)
    names = {file.name for file in RunFolder(folder).checkpoints.glob("step-000004/*.safetensors")}
    assert names == {f"{stem}-0000{rank}-of-00002.safetensors" for stem in ("weights", "moments") for rank in (1, 2)}
    assert_exported(folder, tmp_path / "exported")

    run(model, tmp_path / "longer", 1, run__steps=6)
    for name, processes, *changes in (
        ("same", 4),
        ("full", 3, 'parallel.sharding="full"', "parallel.shard_size=0"),
        ("whole", 1, 'parallel.sharding="none"', "parallel.shard_size=0"),
    ):
        shutil.copytree(folder, tmp_path / name)
        resume(tmp_path / name, processes, "run.steps=6", *changes)
        assert_close(tmp_path / name, tmp_path / "longer")

    refused = started(model, tmp_path / "three", 3, parallel__sharding="hybrid", parallel__shard_size=2)
    assert refused.code == 2
    assert "parallel.shard_size = 2: 3 processes cannot form sets of 2; set it to a divisor of 3" in refused.err


@pytest.mark.long
def test_the_samplers_features_serve_on_several_processes(model: Path, tmp_path: Path) -> None:
    """Each rank keeps the features of the responses it draws, whichever rank updates on them."""
    for processes in (1, 2):
        run(model, tmp_path / str(processes), processes, update__old_logprobs="rollout", delta__scope="group")
    assert_close(tmp_path / "2", tmp_path / "1")
    assert {record["scored"] for record in read_lines(tmp_path / "2" / "metrics.jsonl")} == {0.0}


@pytest.mark.long
def test_ranks_take_prompts_from_a_queue(model: Path, alone: Path, tmp_path: Path) -> None:
    """Whichever rank draws a prompt, the batch is that of one process, with the sampler's features too."""
    run(model, tmp_path / "queue", 2, parallel__prompt_queue=True)
    assert_close(tmp_path / "queue", alone)
    run(model, tmp_path / "kept", 2, parallel__prompt_queue=True, update__old_logprobs="rollout")
    assert {record["scored"] for record in read_lines(tmp_path / "kept" / "metrics.jsonl")} == {0.0}


def until(condition: Any, seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def straight(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run of two processes."""
    folder = tmp_path_factory.mktemp("straight") / "run"
    run(model, folder, 2, parallel__sharding="optimizer")
    return folder


@pytest.mark.long
def test_ranks_write_checkpoints_in_the_background(straight: Path, model: Path, tmp_path: Path) -> None:
    """Each rank its part; the run resumes from the last one bit for bit, also after a stop."""
    folder = tmp_path / "run"
    keys = {"parallel__sharding": "optimizer", "checkpoint__async_save": True}
    process = subprocess.Popen(command(model, folder, 2, **keys), env=ENVIRONMENT, cwd=ROOT, stderr=subprocess.PIPE)
    until((folder / "checkpoints" / "step-000001").exists)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    resume(folder, 2)
    found, expected = contents(folder), contents(straight)
    assert found.pop("recipe.toml") != expected.pop("recipe.toml")
    assert found == expected


@pytest.mark.long
@pytest.mark.parametrize("how", ["stopped", "killed"])
def test_an_interrupted_run_resumes_to_the_same_result(how: str, straight: Path, model: Path, tmp_path: Path) -> None:
    """Stopped by a signal to the command, or one rank killed: on as many processes the same bits, on others the same
    numbers."""
    broken = tmp_path / "broken"
    process = subprocess.Popen(
        command(model, broken, 2, parallel__sharding="optimizer"), env=ENVIRONMENT, cwd=ROOT, stderr=subprocess.PIPE
    )
    until((broken / "checkpoints" / "step-000001").exists)
    if how == "stopped":
        process.send_signal(signal.SIGINT)
        code = 130
    else:
        children = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=True)
        os.kill(int(children.stdout.split()[-1]), signal.SIGKILL)
        code = 137
    began = time.monotonic()
    _, errors = process.communicate(timeout=60)
    assert time.monotonic() - began < 10 if how == "killed" else True
    assert process.returncode == code, errors
    text = errors.decode()
    said = r"stopped after step \d" if how == "stopped" else r"delta: rank \d was ended by SIGKILL"
    assert re.search(said, text)
    assert "Traceback" not in text
    ending = json.loads((broken / "end.json").read_text())
    assert ending["state"] == ("stopped" if how == "stopped" else "failed")
    assert how == "stopped" or re.fullmatch(r"rank \d was ended by SIGKILL", ending["reason"])
    other = tmp_path / "other"
    subprocess.run(["cp", "-r", str(broken), str(other)], check=True)
    resume(broken, 2)
    assert_same(straight, broken)
    resume(other, 3 if how == "stopped" else 1)
    assert_close(other, straight)


BREAK = """
import os, sys
from backends.interface import BackendError
from backends.torch.backend import TorchEngine
accumulate = TorchEngine.accumulate
def broken(self, *arguments):
    if os.environ["RANK"] == "1":
        raise {error}
    return accumulate(self, *arguments)
TorchEngine.accumulate = broken
from delta_cli.cli import main
sys.argv = ["delta"] + {arguments!r}
main()
"""


@pytest.mark.long
@pytest.mark.parametrize("error", ['BackendError("the card is on fire; put it out")', 'KeyError("a mistake")'])
def test_one_rank_reports_for_all_and_none_is_left_waiting(error: str, model: Path, tmp_path: Path) -> None:
    arguments = arguments_of(model, tmp_path / "run", 1)
    began = time.monotonic()
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", BREAK.format(error=error, arguments=arguments)],
            env=ENVIRONMENT | rank | {"DELTA_FAILURE": str(tmp_path / "failed")},
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for rank in torch_ranks(3)
    ]
    outputs = [rank.communicate(timeout=120)[1].decode() for rank in ranks]
    assert time.monotonic() - began < 60  # most of which the imports take
    assert all(rank.returncode for rank in ranks)
    assert outputs[0] == outputs[2] == ""
    if "BackendError" in error:
        assert outputs[1] == "delta: rank 1: the card is on fire; put it out\n"
        assert ranks[1].returncode == 2
    else:
        assert outputs[1].startswith("delta: rank 1 failed:\nTraceback")


def test_the_fake_backend_is_one_process(model: Path, tmp_path: Path) -> None:
    refused = started(model, tmp_path / "run", 2, backend="fake")
    assert refused.code == 2
    assert refused.err.count("\n") == 1
    assert "trains in one process" in refused.err
