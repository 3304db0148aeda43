"""Every family does on each backend what docs/models.md says."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("mlx.core", reason="MLX is not installed")

from tests.device import DEVICE
from tests.families.checks import try_family
from tests.families.families import FAMILIES, Family
from tests.families.table import PAGE, cell, rows

SHORT = ("Qwen/Qwen3-8B", "Qwen/Qwen3-30B-A3B")  # a dense family and one with experts; the long tier tries all
ALL = [
    pytest.param(family, id=family.key, marks=() if family.key in SHORT else pytest.mark.long) for family in FAMILIES
]


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("backend", [DEVICE, "mlx"])
@pytest.mark.parametrize("family", ALL)
def test_the_family_does_what_the_table_says(family: Family, backend: str, tmp_path: Path) -> None:
    """If an outcome changed for a good reason, ``make models`` rewrites the table."""
    said = rows()[family.name]
    assert cell(try_family(family, backend, tmp_path)) == said["mlx" if backend == "mlx" else "cpu, cuda"]


def test_the_table_has_every_family() -> None:
    assert list(rows()) == [family.name for family in FAMILIES]
    assert PAGE.read_text(encoding="utf-8").count("| ✓ |") >= 20
