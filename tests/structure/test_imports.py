"""Imports run one way: from the commands down to the credit core and the backends' interface."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from graphlib import CycleError, TopologicalSorter

import pytest

from .imports import Import, folder, imports, modules

# Everything that these folders may import from outside themselves.
MAY_IMPORT = {
    "delta_cli.credit": {"backends.arrays"},
    "delta_cli.recipe": {"backends.settings", "delta_cli.assets", "delta_cli.credit", "delta_cli.errors"},
}
MAY_NOT_REACH = [
    ("delta_cli.evaluation", "delta_cli.training"),
    ("delta_cli.reporting", "delta_cli.training"),
    ("delta_cli.rewards", "delta_cli.rollout"),
    ("delta_cli.rollout", "delta_cli.training"),
    ("delta_cli.training", "delta_cli.cli"),
]


def graph(key: Callable[[str], str], of: Callable[[Import], bool] = lambda _: True) -> dict[str, set[str]]:
    """What each module or folder imports."""
    found: dict[str, set[str]] = defaultdict(set)
    for each in filter(of, imports()):
        if key(each.importer) != key(each.imported):
            found[key(each.importer)].add(key(each.imported))
    return found


def reachable(start: str, edges: dict[str, set[str]]) -> set[str]:
    """Everything that is imported along with ``start``, directly or not."""
    found, waiting = set(), [start]
    while waiting:
        new = edges.get(waiting.pop(), set()) - found
        found |= new
        waiting += new
    return found


@pytest.mark.parametrize("name", MAY_IMPORT)
def test_the_lower_layers_import_nothing_above_them(name: str) -> None:
    assert graph(folder)[name] <= MAY_IMPORT[name]


@pytest.mark.parametrize(("name", "above"), MAY_NOT_REACH)
def test_no_folder_reaches_one_above_it(name: str, above: str) -> None:
    """Neither directly nor through another folder, nor inside a function."""
    edges = graph(folder)
    assert edges[name], "a folder that imports nothing was renamed"
    assert above in edges
    assert above not in reachable(name, edges)


def test_backends_never_import_delta_cli() -> None:
    assert [each for each in imports() if each.importer.startswith("backends") and "delta_cli" in each.imported] == []


def test_no_import_circle_across_folders() -> None:
    """Imports inside functions count, because they are how circles are usually hidden; those for types do not."""
    try:
        TopologicalSorter(graph(folder, lambda each: each.when != "types")).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


def test_a_local_run_does_not_import_the_client_of_vllm() -> None:
    at_import = graph(str, lambda each: each.when == "at once")
    for name in modules():
        at_import[name].add(name.rpartition(".")[0])  # a package is imported before what is in it
    imported = reachable("delta_cli.training.setup", at_import)
    assert "backends.registry" in imported
    assert {name for name in imported if name.startswith("backends.vllm")} == set()


def test_every_module_is_read() -> None:
    """The rules above hold for nothing if nothing is found."""
    assert len(modules()) > 150
    assert Import("delta_cli.training.trainer", "backends.interface") in imports()
    assert {each.when for each in imports()} == {"at once", "deferred", "types"}
