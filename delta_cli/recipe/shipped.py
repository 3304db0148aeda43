"""The recipes and studies that ship with the package, found by their names: ``qwen3_8b``, ``ablations/k0``."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path

from delta_cli import assets

FOLDER = Path(assets.__file__).parent / "recipes"


@dataclass(frozen=True)
class ShippedRecipe:
    """A recipe or a study that ships with the package."""

    name: str
    about: str  # the first sentence of the file's comment; empty if it has none
    is_study: bool


def find_shipped(path: Path) -> Path:
    """The shipped file if ``path`` is its name and nothing of that name is here; otherwise ``path`` itself."""
    file = FOLDER / f"{path}.toml"
    is_name = not path.suffix or path.suffix[1:2].isdigit()  # qwen3_1.7b_mac has a dot in its name
    return file if is_name and not path.is_absolute() and not path.exists() and file.is_file() else path


def shipped_names() -> list[str]:
    """The names of all shipped recipes and studies."""
    return sorted(file.relative_to(FOLDER).as_posix().removesuffix(".toml") for file in _files())


def shipped_recipes() -> list[ShippedRecipe]:
    """All shipped recipes and studies; the baselines and ablations that only change a key of another come last."""
    found = []
    for file in _files():
        text = file.read_text(encoding="utf-8")
        table = tomllib.loads(text)
        name = file.relative_to(FOLDER).as_posix().removesuffix(".toml")
        about = _first_sentence(text) or (f"{table['extends']}, changed in one key" if "extends" in table else "")
        found.append(ShippedRecipe(name, about.replace(".toml,", ","), "arms" in table))
    return sorted(found, key=lambda each: (each.is_study, "/" in each.name, each.name))


def _files() -> list[Path]:
    return [*FOLDER.glob("*.toml"), *FOLDER.glob("*/*.toml")]  # not **, which does not follow a link


def _first_sentence(text: str) -> str:
    lines = []
    for line in text.splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.lstrip("# "))
    return " ".join(lines).partition(". ")[0].partition(": delta study")[0].rstrip(".")
