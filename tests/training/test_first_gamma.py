"""delta.temperature = "first" keeps the first step's gammas for the whole run, also after a resume."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from tests.harness import assert_same, make_recipe, train

FIRST = {"delta__temperature": "first", "checkpoint__every": 1, "delta__refinements": 0}


def gammas(folder: Path) -> list[tuple[float, float]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [(record["gamma_positive"], record["gamma_negative"]) for record in map(json.loads, lines)]


def test_the_first_steps_gammas_stay(model: Path, tmp_path: Path) -> None:
    train(make_recipe(model, **FIRST), tmp_path / "first")
    train(make_recipe(model, delta__refinements=0), tmp_path / "lagged")
    found, usual = gammas(tmp_path / "first"), gammas(tmp_path / "lagged")
    assert found[0] == usual[0]
    assert set(found) == {found[0]}
    assert len(set(usual)) == len(usual)
    assert np.isfinite(found[0]).all()


def test_a_resumed_run_keeps_them(model: Path, tmp_path: Path) -> None:
    train(make_recipe(model, **FIRST), tmp_path / "whole")
    train(make_recipe(model, run__steps=4, **FIRST), tmp_path / "parts")
    train(make_recipe(model, **FIRST), tmp_path / "parts", resume=True)
    assert_same(tmp_path / "whole", tmp_path / "parts")
