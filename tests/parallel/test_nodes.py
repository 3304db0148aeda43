"""Ranks on several machines, which this one stands in for: the example files, with and without a disk in common."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from backends.launch import _free_ports
from delta_cli.cli.options import quickstart
from delta_cli.runs.folder import RunFolder, read_lines
from tests.harness import contents
from tests.parallel.test_runs import ENVIRONMENT, ROOT, arguments_of, run, until

pytestmark = pytest.mark.long

EXAMPLES = ROOT / "examples"
PATHS = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
SRUN = """
import os, signal, subprocess, sys
tasks = [
    subprocess.Popen(sys.argv[1:], env=os.environ | {"SLURM_PROCID": str(task), "SLURM_LOCALID": str(task)})
    for task in range(int(os.environ["SLURM_NTASKS"]))
]
signal.signal(signal.SIGTERM, lambda *_: [task.send_signal(signal.SIGTERM) for task in tasks])
sys.exit(max(task.wait() for task in tasks))
"""


def options(model: Path, **keys: object) -> list[str]:
    """The options of ``delta train`` for KEYS, without the run's folder and the number of processes."""
    arguments = arguments_of(model, Path("run"), 1, **keys)[1:]
    for name in ("--run-dir", "--processes"):
        place = arguments.index(name)
        del arguments[place : place + 2]
    return arguments


def assert_equal(folder: Path, expected: Path) -> None:
    """Two runs are equal bit for bit, but for the number of processes that ``delta train`` itself starts."""
    one, other = contents(folder), contents(expected)
    assert one.pop("recipe.toml") != other.pop("recipe.toml")
    assert one.keys() == other.keys()
    assert not [name for name, value in one.items() if value != other[name]]


def two_nodes(folders: list[Path], arguments: list[str]) -> list[tuple[int, str]]:
    """Exit code and output of the example file on each of two machines, whose relative paths are below ``folders``."""
    variables = {"GPUS": "1", "PORT": str(_free_ports(1)[0]), "PATH": PATHS}
    command = [str(EXAMPLES / "two_nodes.sh")]
    nodes = [
        subprocess.Popen(
            [*command, str(number), "127.0.0.1", *arguments],
            env=ENVIRONMENT | variables,
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for number, folder in enumerate(folders)
    ]
    outputs = [node.communicate(timeout=300)[0] for node in nodes]
    return [(node.returncode, output) for node, output in zip(nodes, outputs, strict=True)]


@pytest.fixture
def machines(tmp_path: Path) -> list[Path]:
    """The disks of two machines."""
    folders = [tmp_path / "first", tmp_path / "second"]
    for folder in folders:
        folder.mkdir()
    return folders


def test_two_machines_without_a_common_disk_train_as_two_processes_do(
    model: Path, machines: list[Path], tmp_path: Path
) -> None:
    """Whole weights: only the first machine writes. To resume, the other needs a copy of the run's folder."""
    run(model, tmp_path / "together", 2)
    line = [*options(model), "--run-dir", "runs/two"]
    for code, output in two_nodes(machines, line):
        assert code == 0, output[-3000:]
    assert_equal(machines[0] / "runs/two", tmp_path / "together")
    assert not (machines[1] / "runs").exists()

    longer = ["--resume", "--run-dir", "runs/two", "--backend", "cpu", "--quiet", "--set", f"run.steps={6}"]
    refused = two_nodes(machines, longer)
    assert all(code for code, _ in refused)
    assert "rank 1: checkpoint in runs/two/checkpoints/step-000004 is missing" in "".join(said for _, said in refused)
    assert "Traceback" not in refused[1][1].partition("delta: rank 1")[0]

    shutil.copytree(machines[0] / "runs", machines[1] / "runs")
    for code, output in two_nodes(machines, longer):
        assert code == 0, output[-3000:]
    assert [record["step"] for record in read_lines(RunFolder(machines[0] / "runs/two").metrics)] == [1, 2, 3, 4, 5, 6]


def test_split_weights_need_a_common_disk(model: Path, machines: list[Path]) -> None:
    arguments = [*options(model, parallel__sharding="full"), "--run-dir"]
    refused = two_nodes(machines, [*arguments, "runs/two"])
    assert all(code for code, _ in refused)
    said = "".join(output for _, output in refused)
    assert "runs/two: rank 1 does not see the run's folder of rank 0" in said
    assert 'parallel.sharding = "none"' in said
    for code, output in two_nodes(machines, [*arguments, str(machines[0] / "shared")]):
        assert code == 0, output[-3000:]


def test_a_slurm_job_stops_in_time_and_goes_on(model: Path, tmp_path: Path) -> None:
    """With stand-ins for SLURM's commands; the run equals one that was not interrupted."""
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "srun").write_text(f"#!{sys.executable}\n{SRUN}")
    (programs / "scontrol").write_text('#!/bin/sh\ncase $1 in show) echo 127.0.0.1;; *) echo "$@" >> requeued;; esac\n')
    for program in programs.iterdir():
        program.chmod(0o755)
    job = {"SLURM_JOB_ID": str(_free_ports(1)[0]), "SLURM_JOB_NODELIST": "n[1-2]"}
    job |= {"SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2", "PATH": f"{programs}:{PATHS}"}
    recipe = tmp_path / "recipe.toml"
    recipe.write_bytes(quickstart().read_bytes())  # that of a run without a recipe
    command = [str(EXAMPLES / "slurm.sh"), str(recipe), *options(model, run__steps=12)]
    folder = tmp_path / "runs" / f"recipe-{job['SLURM_JOB_ID']}"

    first = subprocess.Popen(
        command, env=ENVIRONMENT | job, cwd=tmp_path, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    until((folder / "checkpoints" / "step-000002").exists)
    tasks = subprocess.run(["pgrep", "-P", str(first.pid)], capture_output=True, text=True, check=True).stdout.split()
    os.kill(int(tasks[0]), signal.SIGTERM)
    _, said = first.communicate(timeout=60)
    assert first.returncode == 143, said
    assert (tmp_path / "requeued").read_text() == f"requeue {job['SLURM_JOB_ID']}\n"

    job["SLURM_RESTART_COUNT"] = "1"
    again = subprocess.run(command, env=ENVIRONMENT | job, cwd=tmp_path, stderr=subprocess.PIPE, text=True, timeout=300)
    assert again.returncode == 0, again.stderr
    run(model, tmp_path / "straight", 2, run__steps=12)
    assert_equal(folder, tmp_path / "straight")
