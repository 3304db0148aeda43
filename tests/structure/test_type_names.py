"""Each type name is defined once, so that a reader of `Features` never asks which one is meant."""

from __future__ import annotations

import ast
import re
from collections import defaultdict

from .imports import modules

TYPE_NAME = re.compile(r"_?[A-Z][A-Za-z0-9]*[a-z][A-Za-z0-9]*")  # CamelCase: constants have no small letter


def type_names(tree: ast.Module) -> set[str]:
    """Classes and type aliases that a module defines at its top level, private ones included."""
    found = {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
    for node in tree.body:
        if isinstance(node, ast.Assign):
            found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
    return {name for name in found if TYPE_NAME.fullmatch(name)}


def definitions() -> dict[str, list[str]]:
    """The modules that define each type name."""
    found = defaultdict(list)
    for module, file in modules().items():
        for name in type_names(ast.parse(file.read_text(encoding="utf-8"))):
            found[name].append(module)
    return found


def test_no_type_name_is_defined_twice() -> None:
    found = definitions()
    assert len(found) > 200
    twice = {name: places for name, places in found.items() if len(places) > 1}
    assert twice == {}
