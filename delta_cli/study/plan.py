"""What a study compares: a TOML file with a recipe, arms or a grid of values that change it, and a number of seeds."""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from importlib import resources
from itertools import product
from pathlib import Path
from typing import Any, Self

from pydantic import Field, ValidationError, model_validator

from delta_cli.errors import UserError, delta_command
from delta_cli.evaluation.results import FrozenModel
from delta_cli.evaluation.suites import Suite, load_suite
from delta_cli.recipe import Recipe, load_recipe
from delta_cli.recipe.document import toml_value
from delta_cli.recipe.loading import read_toml
from delta_cli.recipe.messages import explain_keys
from delta_cli.recipe.shipped import find_shipped

SCALES = resources.files("delta_cli.study") / "scales"
RECIPE_SEEDS = 3  # of a study that is made from a recipe
NAME, FORBIDDEN = r"^[A-Za-z0-9_.+=-]+$", r"[^A-Za-z0-9_.+=-]"  # names of arms become names of folders

GridValue = str | int | float | bool


class Arm(FrozenModel):
    """One row of the study's table: a recipe and what changes in it."""

    name: str = Field(pattern=NAME, description="name in the table and of the run's folder")
    recipe: str | None = Field(default=None, description="path of a recipe; without it, the study's")
    set: tuple[str, ...] = Field(default=(), description='changes in the recipe, as "section.key=value"')
    against: str | None = Field(default=None, description="arm it is tested against; without it, the reference")


class Measure(FrozenModel):
    """How every finished run is measured: one of its checkpoints on a suite, with the suite's settings."""

    suite: str = Field(description="name of a shipped suite, or path of a .toml file")
    checkpoint: str = Field(default="best", description="checkpoint to measure: best or last")


class Published(FrozenModel):
    """Published numbers to print beside ours, in percent."""

    columns: tuple[str, ...] = Field(description="benchmarks")
    rows: dict[str, tuple[float, ...]] = Field(description="numbers of each arm, by its name")

    @model_validator(mode="after")
    def _lengths(self) -> Self:
        for name, row in self.rows.items():
            if len(row) != len(self.columns):
                raise ValueError(f"{len(row)} numbers of {name} for {len(self.columns)} columns")
        return self


class StudyFile(FrozenModel):
    """The keys of a study."""

    name: str = Field(pattern=NAME, description="name of the study and of its folder in studies/")
    question: str = Field(default="", description="what the study asks; heading of its table")
    recipe: str = Field(description="path of the recipe that every arm starts from, relative to the study's file")
    backend: str = Field(default="cpu", description="backend of every run: auto, cpu, cuda, mlx or fake")
    seeds: int = Field(default=8, ge=1, description="runs of each arm, with the seeds 0, 1, …")
    jobs: int = Field(default=2, ge=1, description="runs at a time")
    threads: int = Field(default=1, ge=1, description="threads of each run")
    reference: str | None = Field(
        default=None, description="arm the others are tested against; without it, delta or else the first arm"
    )
    target: float = Field(default=0.8, gt=0, le=1, description='accuracy for the column "steps to target"')
    set: tuple[str, ...] = Field(default=(), description='changes in every arm, as "section.key=value"')
    overrides: dict[str, Any] = Field(default={}, description="recipe tables for every arm, below its changes")
    scales: dict[str, tuple[str, ...]] = Field(default={}, description="more changes in every arm, by --scale")
    measure: Measure | None = Field(
        default=None, description="how finished runs are measured; without it, by their last evaluation in training"
    )
    paper: Published | None = Field(default=None, description="published numbers to print beside ours")
    runs_of: str | None = Field(default=None, description="name of another study whose runs are measured")
    grid: dict[str, tuple[GridValue, ...]] = Field(
        default={}, description='recipe keys with the values to combine, as "update.learning_rate" = [1e-4, 5e-4]'
    )
    arms: tuple[Arm, ...] = Field(default=(), description="what is compared, each with every point of the grid")


class Study(StudyFile):
    """A study that was loaded: its grid is expanded into arms."""

    folder: Path  # of the file; paths in it are relative to this folder
    scale: str = ""  # that was laid over the study
    reference: str
    remarks: tuple[str, ...] = ()  # what a reader of the table must know

    @property
    def heading(self) -> str:
        """The heading of the table."""
        return self.question or ": ".join(filter(None, (self.name, ", ".join(self.grid))))

    def against(self, arm: Arm) -> str | None:
        """The arm that an arm is tested against; None for the reference itself."""
        other = arm.against or self.reference
        return None if other == arm.name else other

    def recipe_of(self, arm: Arm, seed: int) -> Recipe:
        """The recipe of one run."""
        changes = (*self.set, *arm.set, f"run.seed={seed}")
        return load_recipe(self.folder / (arm.recipe or self.recipe), changes, self.overrides)

    def suite(self) -> Suite:
        """The suite that runs are measured on."""
        return load_suite(self.suite_name())

    def suite_name(self) -> str:
        """The name of this suite, or its path if it is a file."""
        assert self.measure is not None
        name = self.measure.suite
        return str(self.folder / name) if name.endswith(".toml") else name

    def test_note(self, test: str) -> str:
        """The sentence about ``test`` below a table, with the arms that are not tested against the reference."""
        pairs = [f"{arm.name} against {arm.against}" for arm in self.arms if arm.against and self.against(arm)]
        others = f"; but {', '.join(pairs)}" if pairs else ""
        note = f"p: {test} that {self.reference} is higher{others}" if len(self.arms) > 1 else ""
        return "; ".join(filter(None, (note, *self.remarks)))


def study_schema() -> str:
    """The JSON schema of a study's file, for editors to complete and check studies."""
    schema = StudyFile.model_json_schema() | {"$schema": "https://json-schema.org/draft/2020-12/schema"}
    return json.dumps(schema | {"title": "delta study"}, indent=2, ensure_ascii=False) + "\n"


def load_study(
    path: Path,
    scale: str | None = None,
    also: Sequence[str] = (),
    grid: Mapping[str, Sequence[str]] | None = None,
    **changes: object,
) -> Study:
    """The study in a TOML file, with keys changed; the recipe of every run is checked.

    A recipe becomes a study if ``grid`` or a number of seeds is given. ``scale`` names a file in scales/ whose keys
    replace the study's, ``also`` are further changes in every arm, ``grid`` further keys to combine. Raises UserError,
    one line.
    """
    path = find_shipped(path)
    table = _scaled(_read(path, bool(grid) or "seeds" in changes), scale)
    table |= changes | {"set": [*table.get("set", ()), *also], "grid": table.get("grid", {}) | dict(grid or {})}
    try:
        file = StudyFile.model_validate(table)
    except ValidationError as error:
        raise UserError(explain_keys(error, str(path), StudyFile, changes)) from None
    arms = _combined(file, path)
    reference = _reference(file, arms, path)
    found = dict(file) | {"arms": arms, "reference": reference, "folder": path.parent, "scale": scale or ""}
    study = Study.model_construct(**found)
    _check_names(study, path)
    recipes = {arm.name: _checked_recipe(study, arm, path) for arm in arms}
    if study.measure is not None:
        study.suite()
    return study.model_copy(update=_described(study, recipes))


def _read(path: Path, recipe: bool) -> dict[str, Any]:
    """A study's table. A recipe becomes the table of a study if ``recipe`` allows it; otherwise UserError."""
    table = read_toml(path, "study")
    if "arms" in table or "grid" in table or not ("extends" in table or set(table) & set(Recipe.model_fields)):
        return table
    if not recipe:
        raise UserError(
            f"{path}: is a recipe, one run, not a study; train it with: {delta_command('train', path)}; "
            "or compare values: "
            + delta_command("study", path, "--grid", "update.learning_rate=1e-4,5e-4", "--seeds", RECIPE_SEEDS)
        )
    return {"name": re.sub(FORBIDDEN, "-", path.stem), "recipe": path.name, "backend": "auto", "seeds": RECIPE_SEEDS}


def _combined(file: StudyFile, path: Path) -> tuple[Arm, ...]:
    """The arms, each with every point of the grid; without arms, the points of the grid."""
    arms: Sequence[Arm | None] = file.arms or (None,)
    if not file.grid:
        return file.arms or (Arm(name=file.name),)
    last = [key.rpartition(".")[2] for key in file.grid]
    labels = last if len(set(last)) == len(last) else list(file.grid)
    found = []
    for arm, point in product(arms, product(*file.grid.values())):
        values = [value if isinstance(value, str) else toml_value(value) for value in point]
        parts = [f"{label}={value}" for label, value in zip(labels, values, strict=True)]
        name = "-".join(([arm.name] if arm else []) + parts)
        changes = tuple(f"{key}={value}" for key, value in zip(file.grid, values, strict=True))
        base = arm or Arm(name="grid")
        found.append(
            base.model_copy(update={"name": re.sub(r"[^A-Za-z0-9_.+=-]", "-", name), "set": base.set + changes})
        )
    if not found:
        raise UserError(f"{path}: grid: a key has no values; give at least one")
    return tuple(found)


def _reference(file: StudyFile, arms: Sequence[Arm], path: Path) -> str:
    names = [arm.name for arm in arms]
    if file.reference is None:
        return "delta" if "delta" in names else names[0]
    if file.reference not in names:
        close = difflib.get_close_matches(file.reference, names, n=1, cutoff=0) or names
        raise UserError(
            f"{path}: reference = '{file.reference}' is none of the arms {', '.join(names)}; "
            f'write reference = "{close[0]}", or leave it out'
        )
    return file.reference


def _check_names(study: Study, path: Path) -> None:
    names = [arm.name for arm in study.arms]
    if len(set(names)) < len(names):
        raise UserError(f"{path}: two arms have the same name; rename one")
    for arm in study.arms:
        if arm.against is not None and arm.against not in names:
            raise UserError(f"{path}: against = '{arm.against}' is none of the arms {', '.join(names)}")
    for name in study.paper.rows if study.paper else ():
        if name not in names:
            raise UserError(f"{path}: paper.rows: '{name}' is none of the arms {', '.join(names)}")


def _checked_recipe(study: Study, arm: Arm, path: Path) -> Recipe:
    try:
        recipe = study.recipe_of(arm, 0)
    except UserError as error:
        raise UserError(f"{path}: arm {arm.name}: {error}") from None
    if study.measure is not None and study.measure.checkpoint == "best" and recipe.checkpoint.keep_best is None:
        raise UserError(f"{path}: arm {arm.name}: measures the best checkpoint; set checkpoint.keep_best")
    return recipe


def _described(study: Study, recipes: Mapping[str, Recipe]) -> dict[str, Any]:
    """Heading and remarks that say what is really run."""
    remarks = []
    for place, arm in enumerate(study.arms):
        earlier = [other.name for other in study.arms[:place] if recipes[other.name] == recipes[arm.name]]
        if earlier:
            remarks.append(f"{arm.name} is the same run as {earlier[0]}")
    if not study.scale:
        return {"remarks": tuple(remarks)}
    ran = {f"{each.model.path} on {each.data.title}, {each.run.steps} steps" for each in recipes.values()}
    measured = f", measured on the suite {study.suite().name}" if study.measure is not None else ""
    question = f"{study.name}: {'; '.join(sorted(ran))}{measured}. A test of the protocol, not of the methods."
    return {"remarks": tuple(remarks), "question": question}


def _scaled(table: dict[str, Any], scale: str | None) -> dict[str, Any]:
    """A study's table with the keys of a scale laid over it, and with its own further changes at that scale."""
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
    table["name"] = f"{table.get('name')}-{scale}"
    if "runs_of" in table:
        table["runs_of"] = f"{table['runs_of']}-{scale}"
    return table
