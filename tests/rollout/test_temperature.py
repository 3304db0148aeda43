"""A run at a temperature other than 1 compares log-probabilities at that temperature."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from backends import registry
from backends.interface import Sequences
from backends.settings import BackendSettings
from delta_cli.runs.folder import RunFolder, read_lines
from tests.harness import make_recipe, train

TEMPERATURE = 0.7


@pytest.mark.parametrize("backend", ["fake", "cpu", "mlx"])
def test_ratio_is_one_at_the_first_update_and_the_engine_agrees(backend: str, model: Path, tmp_path: Path) -> None:
    """The log-probabilities are those of a float64 forward pass at 0.7, and far from those at 1."""
    if backend != "fake":
        pytest.importorskip({"cpu": "torch", "mlx": "mlx_lm"}[backend], reason=f"the backend is {backend}")
    changes = {"run__steps": 1, "evaluation__at_start": False, "update__learning_rate": 1e-3, "update__epochs": 2}
    changes |= {"update__old_logprobs": "recompute"}
    recipe = make_recipe(model, rollout__temperature=TEMPERATURE, evaluation__temperature=1.0, **changes)
    watcher = train(recipe, tmp_path / "run", backend)
    (record,) = watcher.records
    assert record["updates"] > 0
    assert record["ratio_gap_first"] < 1e-5
    assert record["engine_gap_max"] < 1e-5
    assert record["ratio_gap"] > 1e-5, "the second epoch has another policy"

    rows = list(read_lines(RunFolder(tmp_path / "run").rollout_file(1)))
    lengths = [len(row["tokens"]) for row in rows]
    recorded = np.concatenate([row["logprobs"] for row in rows])
    exact = registry.create("fake", BackendSettings.of(str(model)))
    prompts = tuple(np.array(row["prompt_ids"]) for row in rows)
    tokens, starts = np.concatenate([row["tokens"] for row in rows]), np.concatenate([[0], np.cumsum(lengths)])
    gaps = {
        temperature: np.abs(recorded - exact.score(Sequences(prompts, tokens, starts, temperature)).logprobs).max()
        for temperature in (TEMPERATURE, 1.0)
    }
    assert gaps[TEMPERATURE] < 1e-5
    assert gaps[1.0] > 0.05
