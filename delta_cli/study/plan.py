"""What a study compares: a TOML file with a base recipe, arms that change it, and seeds."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from delta_cli.errors import UserError
from delta_cli.recipe import Recipe, load_recipe


class Arm(BaseModel):
    """One row of the table: a name, and what it changes in the base recipe."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(pattern=r"^[A-Za-z0-9_.+-]+$")
    set: tuple[str, ...] = ()
    against: str | None = None  # the arm it is tested against; absent: the study's reference


class Study(BaseModel):
    """A grid of arms and seeds."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(pattern=r"^[A-Za-z0-9_.+-]+$")
    question: str = ""
    recipe: str
    backend: str = "cpu"
    seeds: int = Field(8, ge=2)
    jobs: int = Field(2, ge=1)  # runs at a time
    threads: int = Field(1, ge=1)  # of each run
    reference: str = "delta"  # the arm every other is tested against, where it names none itself
    target: float = Field(0.8, gt=0, le=1)  # accuracy for "steps to target"
    set: tuple[str, ...] = ()  # changes in every arm
    arms: Annotated[tuple[Arm, ...], Field(min_length=2)]

    def recipe_of(self, arm: Arm, seed: int, folder: Path) -> Recipe:
        """The recipe of one run; ``folder`` is the study file's own."""
        return load_recipe(folder / self.recipe, (*self.set, *arm.set, f"run.seed={seed}"))


def load_study(path: Path, **changes: object) -> Study:
    """The study of a TOML file with keys changed, every run's recipe checked; raises UserError with one line."""
    try:
        study = Study.model_validate(tomllib.loads(path.read_text(encoding="utf-8")) | changes)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UserError(f"{path}: not valid TOML: {error}") from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise UserError(f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg'].lower()}") from None
    names = [arm.name for arm in study.arms]
    if len(set(names)) < len(names):
        raise UserError(f"{path}: two arms have the same name; rename one")
    for key, name in [("reference", study.reference), *(("against", arm.against) for arm in study.arms)]:
        if name is not None and name not in names:
            raise UserError(f"{path}: {key} = '{name}' is none of the arms {', '.join(names)}")
    for arm in study.arms:
        try:
            study.recipe_of(arm, 0, path.parent)
        except UserError as error:
            raise UserError(f"{path}: arm {arm.name}: {error}") from None
    return study
