"""Suites: which benchmarks, and how responses are sampled. A suite is a TOML file; some are shipped."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, Self

from pydantic import Field, ValidationError, model_validator

from delta_cli.data import prompts
from delta_cli.data.loading import load_benchmark
from delta_cli.data.sources import SUFFIXES
from delta_cli.errors import UserError
from delta_cli.evaluation.evaluate import Benchmark
from delta_cli.evaluation.results import EvaluationSettings, FrozenModel
from delta_cli.recipe.data import ProblemSource
from delta_cli.recipe.messages import did_you_mean, explain_keys


class BenchmarkSpec(ProblemSource):
    """One benchmark: its name, and where its problems are."""

    name: str = Field(min_length=1, description="column of the table")
    source: str = Field(
        min_length=1, description='name on the hub, a data file or folder, "arithmetic" or "word_problems"'
    )
    seed: int = Field(default=0, ge=0, description="seed of the random choice of limit problems")


class Suite(FrozenModel):
    """Benchmarks that are evaluated together, and the settings for them."""

    name: str = Field(min_length=1)
    description: str = ""
    settings: EvaluationSettings = EvaluationSettings()
    benchmarks: tuple[BenchmarkSpec, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        names = [benchmark.name for benchmark in self.benchmarks]
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            raise ValueError(f"two benchmarks are called '{repeated[0]}'; give each a name of its own")
        return self

    def with_settings(self, **changes: Any) -> Suite:
        """The suite with other settings; None leaves one unchanged. Raises UserError for a value out of range."""
        given = {key: value for key, value in changes.items() if value is not None}
        table = {**self.model_dump(), "settings": {**self.settings.model_dump(), **given}}
        return _parse(table, f"suite '{self.name}'", given)


def names() -> list[str]:
    """The names of the shipped suites."""
    return sorted(file.name.removesuffix(".toml") for file in _folder().iterdir() if file.name.endswith(".toml"))


def load_suite(name: str) -> Suite:
    """A shipped suite by name, or the suite in a TOML file, whose paths are relative to the file.

    Raises UserError for a name that does not exist and for a key or value that is not allowed.
    """
    if name in names():
        return _parse(_toml((_folder() / f"{name}.toml").read_text(encoding="utf-8"), name), name)
    path = Path(name).expanduser()
    if name.endswith(SUFFIXES):
        raise UserError(f"--suite {name}: is a data file, not a suite; evaluate on it with --data {name}")
    if path.suffix != ".toml":
        hint = did_you_mean(name, names())
        raise UserError(f"suite '{name}' does not exist{hint} (shipped: {', '.join(names())}; or the path of a .toml)")
    try:
        table = _toml(path.read_text(encoding="utf-8-sig"), name)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; give the path of a suite, or the name of a shipped one") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read as a text file ({error}); give the path of a suite") from error
    suite = _parse(table, name)
    return suite.model_copy(update={"benchmarks": tuple(_beside(spec, path.parent) for spec in suite.benchmarks)})


def file_suite(path: str, settings: EvaluationSettings) -> Suite:
    """The suite of one data file with the fields question and answer."""
    name = Path(path).name.partition(".")[0]
    return Suite(name=name, settings=settings, benchmarks=(BenchmarkSpec(name=name, source=path),))


def load_benchmarks(specs: Sequence[BenchmarkSpec], limit: int | None = None) -> list[Benchmark]:
    """The problems of the benchmarks, at most ``limit`` of each; raises UserError if they cannot be read."""
    return [_load(spec, limit) for spec in specs]


def _load(spec: BenchmarkSpec, limit: int | None) -> Benchmark:
    count = min((each for each in (spec.limit, limit) if each is not None), default=None)
    try:
        return Benchmark(spec.name, load_benchmark(spec, count, spec.seed))
    except UserError as error:
        raise type(error)(f"benchmark '{spec.name}': {error}") from error


def _beside(spec: BenchmarkSpec, folder: Path) -> BenchmarkSpec:
    """The benchmark, with the path of its source if this is a file or folder beside the suite."""
    path = folder / spec.source
    return spec.model_copy(update={"source": str(path)}) if path.exists() else spec


def _folder() -> Traversable:
    return resources.files("delta_cli.evaluation") / "suites"


def _toml(text: str, where: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise UserError(f"{where}: not valid TOML: {error}") from error


def _parse(table: Mapping[str, Any], where: str, options: Mapping[str, Any] | None = None) -> Suite:
    """The suite in a table. An error in one of the ``options`` names the option as it was typed."""
    try:
        suite = Suite.model_validate(table)
        prompts.check(suite.settings.template)
    except ValidationError as error:
        raise UserError(explain_keys(error, where, Suite, options or {})) from error
    except UserError as error:
        typed = "--template" if "template" in (options or {}) else f"{where}: settings.template"
        raise UserError(f"{typed}: {error}") from error
    return suite
