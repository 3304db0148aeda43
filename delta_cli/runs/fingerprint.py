"""Digests of everything that decides a run's result, so that ranks and resumed runs can be compared.

Every rank reads its own files. If one has other rows, weights or code than the rest, the run would finish with a
result that no single process gives; so the ranks compare digests before the first step.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import backends
import delta_cli
from backends.interface import Collective
from delta_cli.assets import config_file, model_path
from delta_cli.credit.weight_functions import FUNCTION_IN_FILE
from delta_cli.data.problem import Problem
from delta_cli.errors import UserError
from delta_cli.recipe import Recipe

PACKAGES = ("torch", "transformers", "mlx", "mlx-lm", "numpy", "tokenizers", "sympy", "math-verify")
HEADER = 100 * 2**20  # bytes of a safetensors header, at most
SAMPLE = 256  # bytes read of each stored tensor: some of every weight, without reading gigabytes
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")

Fingerprint = dict[str, str]  # digest or version, by what it is of


def fingerprint(recipe: Recipe, problems: Sequence[Problem], held_out: Sequence[Problem]) -> Fingerprint:
    """The digests of this process's inputs: data, model, tokenizer, reward and credit files, and the program itself."""
    config = config_file(recipe.model.path)
    folder = config.parent if config else Path(model_path(recipe.model.path))
    found = {
        "data": problems_digest(problems),
        "held-out data": problems_digest(held_out),
        "model": _digest(_model_parts(folder)),
        "tokenizer": _digest(_contents(folder / name for name in TOKENIZER_FILES)),
    }
    files = [reward.custom_file for reward in recipe.rewards if reward.custom_file]
    found |= {f"reward file {file}": _digest(_contents([Path(file)])) for file in files}
    if (rates := recipe.data.pass_rate_file) is not None:
        found[f"pass rate file {rates}"] = _digest(_contents([Path(rates).expanduser()]))
    if in_file := FUNCTION_IN_FILE.fullmatch(recipe.method.credit or ""):
        found[f"credit file {in_file['file']}"] = _digest(_contents([Path(in_file["file"])]))
    named = [name for name in (recipe.environment.file, *recipe.environment.tools) if name]
    own = sorted({name.rpartition(":")[0] for name in named if ":" in name})
    found |= {f"environment file {file}": _digest(_contents([Path(file).expanduser()])) for file in own}
    return found | _program()


@cache
def _program() -> Fingerprint:
    """The digest of the source files and the versions of packages, read once: a process keeps the code it imported."""
    versions = {f"version of {package}": installed_version(package) or "not installed" for package in PACKAGES}
    return {"program": _digest(_program_parts())} | versions


def installed_version(package: str) -> str | None:
    """The version of a package; None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def problems_digest(problems: Sequence[Problem]) -> str:
    """A digest of problems in order; checkpoints hold it."""
    found = hashlib.sha256()
    for problem in problems:
        facts = (problem.id, problem.question, problem.answer)
        more = (problem.columns, problem.turns) if problem.columns or problem.turns else ()
        found.update(repr(facts + more).encode("utf-8", "surrogatepass"))
    return found.hexdigest()


def check_ranks(ranks: Collective, own: Mapping[str, str]) -> None:
    """Raise UserError on every rank if a rank's fingerprint differs from rank 0's."""
    if ranks.size == 1:
        return
    first, *others = ranks.gather(own)
    for rank, other in enumerate(others, 1):
        differing = [name for name in {**first, **other} if first.get(name) != other.get(name)]
        if differing:
            more = f" and {len(differing) - 3} more" if len(differing) > 3 else ""
            raise UserError(
                f"rank {rank} differs from rank 0 in its {', '.join(differing[:3])}{more}; every rank must read the "
                "same files and run the same versions"
            )


def changes(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """What differs between the fingerprint of a checkpoint and the present one; unknown entries are ignored."""
    return [name for name, value in now.items() if before.get(name, value) != value]


def _model_parts(folder: Path) -> Iterator[bytes]:
    """The config, and of each weight file the header (names, types, shapes) and the first bytes of every tensor."""
    yield from _contents([folder / "config.json"])
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as stream:
            length = min(int.from_bytes(stream.read(8), "little"), file.stat().st_size)
            header = stream.read(length)
            yield header
            for offset in _offsets(header):
                stream.seek(8 + length + offset)
                yield stream.read(SAMPLE)


def _offsets(header: bytes) -> list[int]:
    """Where the tensors of a safetensors file begin; none if it is not one, which the backend says when it loads it."""
    try:
        entries = [entry for name, entry in json.loads(header).items() if name != "__metadata__"]
        offsets = sorted(entry["data_offsets"][0] for entry in entries)
        return offsets if all(isinstance(each, int) and 0 <= each < 2**62 for each in offsets) else []
    except (ValueError, TypeError, AttributeError, LookupError, RecursionError):
        return []


def _program_parts() -> Iterator[bytes]:
    """The source files of the packages."""
    for package in (delta_cli, backends):
        folder = Path(str(package.__file__)).parent
        for file in sorted(folder.rglob("*.py")):
            yield str(file.relative_to(folder)).encode()
            yield file.read_bytes()


def _contents(files: Iterable[Path]) -> Iterator[bytes]:
    """The contents of the files that exist, each after its name."""
    for file in files:
        if file.is_file():
            yield file.name.encode()
            yield file.read_bytes()


def _digest(parts: Iterator[bytes]) -> str:
    found = hashlib.sha256()
    for part in parts:
        found.update(len(part).to_bytes(8, "little"))
        found.update(part)
    return found.hexdigest()
