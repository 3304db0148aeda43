"""The names in docs/coming_from.md exist in the versions of the other trainers that the page names.

TRL is installed for the tests. verl and mlx-lm-lora are read as text from their wheels, without installing them:

    pip download --no-deps --dest build/wheels verl==0.9.1 mlx-lm-lora==5.10.2

Without the wheels their tests are skipped. ``DELTA_WHEELS`` names another folder than build/wheels.
"""

from __future__ import annotations

import ast
import os
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest

from delta_cli.recipe.other_trainers import TRAINERS, VERSIONS, Alias

WHEELS = Path(os.environ.get("DELTA_WHEELS", Path(__file__).parents[2] / "build" / "wheels"))


def check(trainer: str, aliases: tuple[Alias, ...], known: set[str]) -> None:
    """Every name is known there, except those marked as gone, which must not be."""
    missing = [alias.theirs for alias in aliases if not alias.gone and alias.theirs not in known]
    back = [alias.theirs for alias in aliases if alias.gone and alias.theirs in known]
    assert (missing, back) == ([], []), f"{trainer} {VERSIONS[trainer]}"


def wheel(trainer: str) -> ZipFile:
    """The wheel of the version that the page names; skips the test if it is not there."""
    found = sorted(WHEELS.glob(f"{trainer.replace('-', '_')}-{VERSIONS[trainer]}-*.whl"))
    if not found:
        pytest.skip(f"no wheel of {trainer} {VERSIONS[trainer]} in {WHEELS}")
    return ZipFile(found[0])


@pytest.mark.skipif(find_spec("trl") is None, reason="TRL is not installed")
def test_names_of_trl() -> None:
    assert version("trl") == VERSIONS["TRL"]
    files = {
        "trl": ("trainer/base_config", "trainer/grpo_config", "trainer/model_config", "scripts/utils", "scripts/grpo"),
        "transformers": ("training_args",),
    }
    known = {name for package, names in files.items() for file in names for name in fields_in(package, f"{file}.py")}
    check("TRL", TRAINERS["TRL"], known)


def fields_in(package: str, file: str) -> set[str]:
    """The fields of the classes in a module of an installed package, which is read, not imported."""
    spec = find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    classes = [
        node
        for node in ast.parse(Path(spec.origin).parent.joinpath(file).read_text()).body
        if isinstance(node, ast.ClassDef)
    ]
    return {ast.unparse(line.target) for each in classes for line in each.body if isinstance(line, ast.AnnAssign)}


def test_names_of_verl() -> None:
    yaml = pytest.importorskip("yaml")
    with wheel("verl") as opened:
        table = yaml.safe_load(opened.read("verl/trainer/config/_generated_ppo_trainer.yaml"))
        manager = opened.read("verl/experimental/reward_loop/reward_manager/dapo.py").decode()
    known = dotted(table)
    # Keyword arguments of the reward manager are not in the table: it reads them by these names.
    assert 'config.reward.get("reward_kwargs", {}).get("overlong_buffer_cfg"' in manager
    for name in ("len", "penalty_factor"):
        assert f"overlong_buffer_cfg.{name}" in manager
        known.add(f"reward.reward_kwargs.overlong_buffer_cfg.{name}")
    check("verl", TRAINERS["verl"], known)


def dotted(table: dict[str, Any], prefix: str = "") -> set[str]:
    found = set()
    for name, value in table.items():
        found.add(f"{prefix}{name}")
        if isinstance(value, dict):
            found |= dotted(value, f"{prefix}{name}.")
    return found


def test_names_of_mlx_lm_lora() -> None:
    with wheel("mlx-lm-lora") as opened:
        source = ast.parse(opened.read("mlx_lm_lora/train.py"))
    tables = [
        node.value
        for node in source.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "CONFIG_DEFAULTS"
    ]
    assert len(tables) == 1
    check("mlx-lm-lora", TRAINERS["mlx-lm-lora"], set(ast.literal_eval(tables[0])))
