"""The wheel that would be published, built from this repository and run without the rest of it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SMALL = ["run.steps=1", "rollout.prompts=4", "rollout.responses=4", "evaluation.problems=8", "data.limit=99"]
NEEDED = (
    "delta_cli/assets/recipes/quickstart.toml",
    "delta_cli/assets/recipes/ablations/k0.toml",
    "delta_cli/assets/starter.toml.jinja",
    "delta_cli/assets/tiny-base/model.safetensors",
    "delta_cli/evaluation/suites/math7.toml",
    "delta_cli/reporting/templates/report.html.jinja",
    "delta_cli/study/scales/tiny.toml",
    "delta_cli/py.typed",
    "backends/fake/backend.py",
)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built offline by the installed setuptools from a clean copy."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("delta_cli", "backends"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    pip("wheel", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(folder), str(source))
    (built,) = folder.glob("*.whl")
    return built


def pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_wheel_holds_what_the_package_reads_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert set(NEEDED) <= set(names)
    committed = {
        str(file.relative_to(ROOT))
        for package in ("delta_cli", "backends")
        for file in (ROOT / package).rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    assert committed <= set(names)  # no data file is missing
    assert {name.partition("/")[0] for name in names if ".dist-info/" not in name} == {"delta_cli", "backends"}


@pytest.mark.long
def test_the_wheel_runs_in_an_environment_of_its_own(wheel: Path, tmp_path: Path) -> None:
    """The libraries are those of the tests; the package comes from the wheel, not from the repository."""
    empty = tmp_path / "empty"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(empty)], check=True)
    python = empty / "bin" / "python"
    pip("--python", str(python), "install", "--no-deps", "--no-index", str(wheel))
    (packages,) = empty.glob("lib/python*/site-packages")
    (packages / "libraries.pth").write_text(f"{sysconfig.get_path('purelib')}\n{sysconfig.get_path('platlib')}\n")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "DELTA"))}

    def delta(*arguments: str) -> str:
        command = [str(empty / "bin" / "delta"), *arguments]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    where = subprocess.run(
        [str(python), "-c", "import delta_cli, backends; print(delta_cli.__file__, backends.__file__)"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    assert all(Path(file).is_relative_to(empty) for file in where)
    assert 'path = "Qwen/Qwen3-8B-Base"' in delta("recipe", "show", "qwen3_8b")
    delta("train", "--backend", "fake", "--quiet", *(part for setting in SMALL for part in ("--set", setting)))
    assert "runs/quickstart-1" in delta("runs")
    assert "report.html" in delta("report", "runs/quickstart-1")
    (tmp_path / "sums.jsonl").write_text('{"question": "1+1=?", "answer": "2"}\n')
    assert "delta train sums.toml" in delta("init", "--model", "tiny-base")
