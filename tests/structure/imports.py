"""The imports between the modules of this repository, as ``ast`` finds them in the source."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).parents[2]
PACKAGES = ("delta_cli", "backends")


When = Literal["at once", "deferred", "types"]


@dataclass(frozen=True)
class Import:
    """One module imports another: at once, ``"deferred"`` inside a function, or only to check ``"types"``."""

    importer: str
    imported: str
    when: When = "at once"


def module_name(file: Path) -> str:
    """``delta_cli/credit/__init__.py`` is ``delta_cli.credit``."""
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def modules() -> dict[str, Path]:
    """Every module of the two packages and its file."""
    files = (file for package in PACKAGES for file in sorted((ROOT / package).rglob("*.py")))
    return {module_name(file): file for file in files}


@cache
def imports() -> tuple[Import, ...]:
    """Every import of one module of the two packages by another."""
    return tuple(
        Import(name, target, when)
        for name, file in modules().items()
        for target, when in _imported(name, ast.parse(file.read_text(encoding="utf-8")))
        if target != name
    )


def _imported(importer: str, tree: ast.Module) -> set[tuple[str, When]]:
    found: set[tuple[str, When]] = set()

    def visit(node: ast.AST, when: When) -> None:
        if isinstance(node, ast.Import):
            found.update((_existing(alias.name), when) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(importer, node)
            found.update((_existing(f"{base}.{alias.name}"), when) for alias in node.names)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            when = "deferred"
        elif _is_for_type_checkers(node):
            when = "types"
        for child in ast.iter_child_nodes(node):
            visit(child, when)

    visit(tree, "at once")
    return {(name, when) for name, when in found if name}


def _is_for_type_checkers(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def _absolute(importer: str, node: ast.ImportFrom) -> str:
    """The module after ``from``, with leading dots resolved."""
    if not node.level:
        return node.module or ""
    is_package = modules()[importer].name == "__init__.py"
    parts = importer.split(".")
    parents = parts[: len(parts) - node.level + is_package]
    return ".".join([*parents, *filter(None, [node.module])])


def _existing(name: str) -> str:
    """The module that a dotted name lies in: itself, or the one that defines its last part; "" outside the packages."""
    while name and name not in modules():
        name = name.rpartition(".")[0]
    return name


def folder(module: str) -> str:
    """The folder below a package that holds a module: ``delta_cli.credit`` of ``delta_cli.credit.gates``.

    Modules directly in a package are on their own: ``delta_cli.errors``, ``backends.interface``.
    """
    return ".".join(module.split(".")[:2])
