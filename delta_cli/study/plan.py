"""What a study compares: a TOML file with a base recipe, arms that change it, and seeds."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field, ValidationError, model_validator

from delta_cli.errors import UserError
from delta_cli.evaluation.results import FrozenModel
from delta_cli.evaluation.suites import Suite, load_suite
from delta_cli.recipe import Recipe, load_recipe
from delta_cli.recipe.loading import read_toml
from delta_cli.recipe.messages import reason

SCALES = resources.files("delta_cli.study") / "scales"


class Arm(FrozenModel):
    """One row of the table: a name, its recipe, and what it changes in it."""

    name: str = Field(pattern=r"^[A-Za-z0-9_.+-]+$")
    recipe: str | None = None  # absent: the study's
    set: tuple[str, ...] = ()
    against: str | None = None  # the arm it is tested against; absent: the study's reference


class Measure(FrozenModel):
    """How every run is measured when it has ended: one of its checkpoints, on a suite, with the suite's settings."""

    suite: str  # a shipped one, or the path of a .toml beside the study
    checkpoint: str = "best"  # or last


class Published(FrozenModel):
    """Numbers to print beside ours."""

    columns: tuple[str, ...]
    rows: dict[str, tuple[float, ...]]  # by arm, percent

    @model_validator(mode="after")
    def _lengths(self) -> Self:
        for name, row in self.rows.items():
            if len(row) != len(self.columns):
                raise ValueError(f"{len(row)} numbers of {name} for {len(self.columns)} columns")
        return self


class Study(FrozenModel):
    """A grid of arms and seeds."""

    name: str = Field(pattern=r"^[A-Za-z0-9_.+-]+$")
    question: str = ""
    recipe: str
    backend: str = "cpu"
    seeds: int = Field(8, ge=1)
    jobs: int = Field(2, ge=1)  # runs at a time
    threads: int = Field(1, ge=1)  # of each run
    reference: str = "delta"  # the arm every other is tested against, where it names none itself
    target: float = Field(0.8, gt=0, le=1)  # accuracy for "steps to target"
    set: tuple[str, ...] = ()  # changes in every arm
    overrides: dict[str, Any] = Field(
        default_factory=dict
    )  # a part of a recipe that is laid over every arm's, below the changes
    scales: dict[str, tuple[str, ...]] = Field(default_factory=dict)  # further changes in every arm, at a scale
    measure: Measure | None = None  # absent: what training evaluated last
    paper: Published | None = None
    runs_of: str | None = None  # another study's name, whose runs are measured
    scale: str = ""  # laid over the study when it was loaded
    arms: Annotated[tuple[Arm, ...], Field(min_length=2)]

    def recipe_of(self, arm: Arm, seed: int, folder: Path) -> Recipe:
        """The recipe of one run; ``folder`` is the study file's own."""
        changes = (*self.set, *arm.set, f"run.seed={seed}")
        return load_recipe(folder / (arm.recipe or self.recipe), changes, self.overrides)

    def suite(self, folder: Path) -> Suite:
        """What runs are measured on; ``folder`` is the study file's own."""
        assert self.measure is not None
        return load_suite(self.suite_name(folder))

    def suite_name(self, folder: Path) -> str:
        """Its name, or its path where it is a file of one's own."""
        assert self.measure is not None
        name = self.measure.suite
        return str(folder / name) if name.endswith(".toml") else name


def load_study(path: Path, scale: str | None = None, also: Sequence[str] = (), **changes: object) -> Study:
    """The study of a TOML file with keys changed, every run's recipe checked; raises UserError with one line.

    ``scale`` is the name of a file in scales/ whose keys are laid over the study's; ``also`` are further
    changes in every arm's recipe.
    """
    try:
        table = _read(path)
        table = _scaled(table, scale) | changes
        study = Study.model_validate(table | {"set": [*table.get("set", ()), *also]})
    except ValidationError as error:
        raise UserError(_explain(error, path, changes)) from None
    _check_names(study, path)
    for arm in study.arms:
        try:
            recipe = study.recipe_of(arm, 0, path.parent)
        except UserError as error:
            raise UserError(f"{path}: arm {arm.name}: {error}") from None
        if study.measure is not None and study.measure.checkpoint == "best" and recipe.checkpoint.keep_best is None:
            raise UserError(f"{path}: arm {arm.name}: measures the best checkpoint; set checkpoint.keep_best")
    if study.measure is not None:
        study.suite(path.parent)
    return study


def _read(path: Path) -> dict[str, Any]:
    """A study's table; raises UserError where the file is a recipe."""
    table = read_toml(path, "study")
    if "arms" not in table and ("extends" in table or set(table) & set(Recipe.model_fields)):
        raise UserError(f"{path}: is a recipe, one run, not a study; train it with: delta train {path}")
    return table


def _explain(error: ValidationError, path: Path, options: Mapping[str, object]) -> str:
    """The first mistake: the option as it was typed, or the file with its key."""
    first = error.errors(include_url=False)[0]
    key = ".".join(map(str, first["loc"]))
    if key in options:
        return f"--{key} {options[key]}: {reason(first)}"
    if first["type"] == "extra_forbidden":
        names = list((Arm if first["loc"][0] == "arms" else Study).model_fields)
        close = difflib.get_close_matches(str(first["loc"][-1]), names, n=1, cutoff=0.5)
        return f"{path}: unknown key {key}; " + (
            f"did you mean {close[0]}?" if close else f"allowed: {', '.join(names)}"
        )
    return f"{path}: {key}: {reason(first)}"


def _scaled(table: dict[str, Any], scale: str | None) -> dict[str, Any]:
    """A study's table with the keys of a scale over its own, and its further changes at that scale."""
    if scale is None:
        return table
    names = sorted(file.name.removesuffix(".toml") for file in SCALES.iterdir() if file.name.endswith(".toml"))
    if scale not in names:
        raise UserError(f"--scale {scale}: choose one of {', '.join(names)}")
    own = tomllib.loads((SCALES / f"{scale}.toml").read_text(encoding="utf-8"))
    if "measure" not in table:
        own.pop("measure")
    for key, value in own.items():
        table[key] = table.get(key, {}) | value if isinstance(value, dict) else value
    table["set"] = [*table.get("set", ()), *table.get("scales", {}).get(scale, ())]
    table["scale"] = scale
    table["name"] = f"{table.get('name')}-{scale}"
    if "runs_of" in table:
        table["runs_of"] = f"{table['runs_of']}-{scale}"
    return table


def _check_names(study: Study, path: Path) -> None:
    names = [arm.name for arm in study.arms]
    if len(set(names)) < len(names):
        raise UserError(f"{path}: two arms have the same name; rename one")
    for key, name in [("reference", study.reference), *(("against", arm.against) for arm in study.arms)]:
        if name is not None and name not in names:
            raise UserError(f"{path}: {key} = '{name}' is none of the arms {', '.join(names)}")
    for name in study.paper.rows if study.paper else ():
        if name not in names:
            raise UserError(f"{path}: paper.rows: '{name}' is none of the arms {', '.join(names)}")
