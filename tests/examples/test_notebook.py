"""The notebook in examples/ runs from its first cell to its last."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).parents[2] / "examples" / "quickstart.ipynb"
SMALL = {'steps": 60': 'steps": 2', 'steps": 5}': 'steps": 1}', 'every": 20': 'every": 1'}


def run_cell(source: str, names: dict[str, Any]) -> Any:
    """Run a cell; the value of its last expression is what the notebook shows."""
    tree = ast.parse(source)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "cell", "exec"), names)
    return eval(compile(ast.Expression(last.value), "cell", "eval"), names) if isinstance(last, ast.Expr) else None


@pytest.mark.parametrize("backend", ["fake", pytest.param("cpu", marks=pytest.mark.long)])
def test_every_cell_runs(backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With few steps and small batches, and with a value of each kind that the notebook shows."""
    if backend == "cpu":
        pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("backends.registry.default", lambda: backend)
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    names: dict[str, Any] = {}
    shown = []
    for cell in (cell for cell in cells if cell["cell_type"] == "code"):
        source = "".join(cell["source"])
        for long, short in SMALL.items():
            source = source.replace(long, short)
        few = 'rollout={"prompts": 4, "responses": 4}, data={"limit": 60}, '
        shown.append(run_cell(source.replace('"quickstart", ', f'"quickstart", {few}'), names))
    assert repr(names["run"]).startswith("<Run runs/quickstart-1: done, step 2 of 2")
    pages = [value._repr_html_() for value in shown if hasattr(value, "_repr_html_")]
    assert [page[:7] for page in pages] == ["<table>", "<iframe"]
    assert (tmp_path / "report.html").is_file()
    assert len(names["shorter"].metrics) == 1


def test_it_is_saved_without_output() -> None:
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    assert all(not cell.get("outputs") and cell.get("execution_count") is None for cell in notebook["cells"])
