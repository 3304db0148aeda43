"""The files for containers and rented machines name commands, options, extras and paths that exist."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer.main

from delta_cli.cli import app
from delta_cli.recipe.shipped import shipped_names

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parents[2]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
DOCKERFILE = (ROOT / "Dockerfile").read_text()
SKYPILOT = yaml.safe_load((ROOT / "examples/cloud/skypilot.yaml").read_text())
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


def parse(line: str) -> None:
    """Parse a ``delta`` command line with the program's own parser."""
    command: Any = typer.main.get_command(app)
    words = shlex.split(line)
    command.commands[words[0]].make_context("delta", words[1:])


def test_the_image_copies_what_there_is_and_installs_extras_that_exist() -> None:
    for line in re.findall(r"^COPY (.*) \S+$", DOCKERFILE, re.MULTILINE):
        for name in line.split():
            assert (ROOT / name).exists(), name
    found = re.findall(r"'\.\[([\w,]+)\]'", DOCKERFILE + SKYPILOT["setup"])
    assert len(found) == 2
    assert {name for each in found for name in each.split(",")} <= set(EXTRAS)
    [example] = re.findall(r"^#.* delta (train .*)$", DOCKERFILE, re.MULTILINE)
    parse(example)


def test_the_commands_on_a_rented_machine_can_be_parsed() -> None:
    script = SKYPILOT["run"]
    for name, value in (SKYPILOT["envs"] | {"SKYPILOT_NUM_GPUS_PER_NODE": 8}).items():
        script = script.replace(f'"${name}"', str(value))
    lines = [line.removesuffix(" || true") for line in script.splitlines()]
    for line in lines:
        parse(line.removeprefix(".venv/bin/delta "))
    assert SKYPILOT["envs"]["RECIPE"] in shipped_names()
    for part in ("setup", "run"):
        subprocess.run(["bash", "-n"], input=SKYPILOT[part], text=True, check=True)


def test_the_devcontainer_is_json_and_makes_a_target_that_exists() -> None:
    made = json.loads((ROOT / ".devcontainer/devcontainer.json").read_text())
    target = made["postCreateCommand"].rpartition("make ")[2]
    assert f"\n{target}:" in (ROOT / "Makefile").read_text()


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.stem)
def test_workflows_are_read_and_run_what_exists(file: Path) -> None:
    made = yaml.safe_load(file.read_text())
    makefile = (ROOT / "Makefile").read_text()
    for job in made["jobs"].values():
        for step in job["steps"]:
            assert ("run" in step) != ("uses" in step)
            for target in re.findall(r"^make (\w+)", step.get("run", ""), re.MULTILINE):
                assert f"\n{target}:" in makefile
