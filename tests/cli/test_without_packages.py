"""What a person reads if a framework is not installed or broken: a process that cannot import its packages."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ABSENT = """
from importlib.machinery import PathFinder
found = PathFinder.find_spec
gone = {packages}
PathFinder.find_spec = staticmethod(lambda name, *more: None if name.split(".")[0] in gone else found(name, *more))
"""
BROKEN = """
import sys
class Broken:
    @staticmethod
    def find_spec(name, *_):
        if name == "mlx.core":
            raise ImportError("libmlx.so: cannot open shared object file")
sys.meta_path.insert(0, Broken)
"""
NO_MLX, NO_TORCH = ABSENT.format(packages=("mlx", "mlx_lm")), ABSENT.format(packages=("torch", "transformers"))
MLX = ("train", "--backend", "mlx")
WITHOUT_MLX = (
    "delta: backend 'mlx' needs mlx and mlx-lm, which are not installed; {}run: pip install 'delta-rlvr[mlx]'\n"
)
WITHOUT_TORCH = "delta: backend 'cpu' needs torch and transformers, which are not installed; run: pip install "
CANNOT_BE_IMPORTED = "delta: mlx is installed but cannot be imported (libmlx.so: cannot open shared object file); run: "


def typed(folder: Path, start: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Type a command in a folder, in a process that begins with the lines of ``start``."""
    (folder / "sitecustomize.py").write_text(start)
    path = os.pathsep.join([str(folder), str(ROOT)])
    command = [sys.executable, "-m", "delta_cli", *arguments]
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


@pytest.mark.skipif(sys.platform == "darwin", reason="on a Mac MLX is the default backend")
@pytest.mark.parametrize(
    ("start", "arguments", "message"),
    [
        pytest.param(NO_MLX, MLX, WITHOUT_MLX.format("choose --backend cpu, or "), id="no MLX"),
        pytest.param(BROKEN, MLX, CANNOT_BE_IMPORTED, id="broken MLX", marks=pytest.mark.long),
        pytest.param(NO_TORCH, ("train", "--backend", "cpu"), WITHOUT_TORCH, id="no torch", marks=pytest.mark.long),
    ],
)
def test_a_missing_framework_is_one_line(start: str, arguments: tuple[str, ...], message: str, tmp_path: Path) -> None:
    said = typed(tmp_path, start, *arguments)
    assert (said.returncode, said.stdout) == (2, "")
    assert said.stderr.startswith(message)
    assert said.stderr.count("\n") == 1


@pytest.mark.long
@pytest.mark.skipif(sys.platform == "darwin", reason="on a Mac MLX is the default backend")
@pytest.mark.parametrize("start", [NO_MLX, BROKEN], ids=["no MLX", "broken MLX"])
def test_help_needs_no_framework_and_the_doctor_names_it_once(start: str, tmp_path: Path) -> None:
    said = typed(tmp_path, start, "--help")
    assert (said.returncode, said.stderr) == (0, "")
    assert "doctor" in said.stdout
    said = typed(tmp_path, start, "doctor", "--backend", "mlx")
    assert said.returncode == 1
    assert said.stdout.count("pip install 'delta-rlvr[mlx]'") == 1
    assert "fix first: backend" in said.stdout
    assert "Traceback" not in said.stdout + said.stderr
