"""docs/paper.md names every recipe and study."""

from __future__ import annotations

import re

import pytest

from .documents import ROOT

TEXT = (ROOT / "docs" / "paper.md").read_text(encoding="utf-8")
EVERYWHERE = "".join((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/paper.md"))
FILES = sorted(path.relative_to(ROOT / "recipes").as_posix() for path in (ROOT / "recipes").rglob("*.toml"))


@pytest.mark.parametrize("name", FILES)
def test_every_file_in_recipes_is_named(name: str) -> None:
    assert re.search(rf"(?<![\w-]){re.escape(name)}", EVERYWHERE), name


@pytest.mark.parametrize("name", sorted({*re.findall(r"[\w./]+\.toml", TEXT)}))
def test_every_file_that_is_named_exists(name: str) -> None:
    assert (ROOT / "recipes" / name.removeprefix("recipes/")).is_file()
