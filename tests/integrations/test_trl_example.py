"""The example script runs as it says: in this process, as a command, and on two processes."""

from __future__ import annotations

import os
import runpy
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from delta_cli.runs.records import RecordedRun

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "trl_delta.py"
SMALL = ["--max_steps", "2", "--steps_per_generation", "1", "--learning_rate", "1e-4"]
SMALL += ["--max_completion_length", "24", "--num_generations", "8"]


def run(folder: Path, *command: str) -> str:
    """What a command prints in a folder."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def check(folder: Path, printed: str, responses: int) -> None:
    """A model and a record of the run."""
    assert "look at it: delta inspect runs/trl/delta --step 1" in printed
    assert (folder / "runs" / "trl" / "model.safetensors").exists()
    recorded = list(RecordedRun(folder / "runs" / "trl" / "delta").responses(1))
    assert len(recorded) == responses
    assert len({round(weight, 3) for response in recorded for weight in response.coefficients}) > 10


def test_in_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *SMALL, "--per_device_train_batch_size", "32"])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    check(tmp_path, capsys.readouterr().out, 32)


@pytest.mark.long
def test_as_a_command(tmp_path: Path) -> None:
    printed = run(tmp_path, sys.executable, str(SCRIPT), *SMALL, "--per_device_train_batch_size", "32")
    check(tmp_path, printed, 32)


@pytest.mark.long
def test_two_processes(tmp_path: Path) -> None:
    """Started by torchrun, which accelerate takes up; its own launcher starts one process on a processor."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", port]
    printed = run(tmp_path, *launcher, str(SCRIPT), *SMALL, "--per_device_train_batch_size", "16")
    check(tmp_path, printed, 32)


def test_the_marked_lines_are_all_that_differs() -> None:
    """Undoing what the comments say gives a script of TRL's own."""
    lines = SCRIPT.read_text().splitlines()
    marked = [line for line in lines if "# was: " in line]
    assert len(marked) == 3
    assert not [
        line for line in lines if "DelTA" in line.partition("#")[0] and line not in marked and '"""' not in line
    ]
