"""The entropy bonus in a run: it slows the loss of entropy, follows its target, and survives a resume."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from delta_cli.recipe.models import UpdateSection
from delta_cli.training.entropy_bonus import EntropyBonus
from tests.harness import contents, make_recipe, train


def test_a_bonus_keeps_the_entropy_up(model: Path, tmp_path: Path) -> None:
    common = {"run__steps": 6, "evaluation__every": "never"}
    plain = train(make_recipe(model, **common), tmp_path / "plain").records
    bonus = train(make_recipe(model, **common, update__entropy_coefficient=2.0), tmp_path / "bonus").records
    assert bonus[-1]["entropy_mean"] > plain[-1]["entropy_mean"] + 0.05
    assert "entropy_coefficient" not in plain[0]
    assert bonus[0]["entropy_coefficient"] == 2.0


def test_a_bonus_works_where_no_reward_differs(model: Path, tmp_path: Path) -> None:
    """Responses without an advantage are scored and pushed too."""
    recipe = make_recipe(model, run__steps=1, reward__length_penalty=0.0, update__entropy_coefficient=0.1)
    (record,) = train(recipe, tmp_path / "run").records
    assert record["zero_variance_groups"] == 1
    assert record["updates"] > 0


def test_the_target_turns_the_bonus_on_and_off() -> None:
    settings = UpdateSection(entropy_target=1.0, entropy_step=0.1, entropy_max=0.15, entropy_coefficient=0.0)
    bonus = EntropyBonus(settings)
    seen = []
    for entropy in (0.5, 0.5, 2.0, 1.0):
        bonus.adapt(np.full(3, entropy, np.float32))
        seen.append((round(bonus.coefficient, 9), round(bonus.applied, 9)))
    assert seen == [(0.1, 0.1), (0.15, 0.15), (0.05, 0.0), (0.15, 0.15)]
    assert bonus.record() == {"entropy_coefficient": bonus.coefficient}
    assert EntropyBonus(UpdateSection()).record() == {}


def test_a_resumed_run_continues_with_its_coefficient(model: Path, tmp_path: Path) -> None:
    changes = {"update__entropy_target": 100.0, "update__entropy_step": 0.3, "update__entropy_max": 0.7}
    train(make_recipe(model, run__steps=4, **changes), tmp_path / "whole")
    train(make_recipe(model, run__steps=2, **changes), tmp_path / "parts")
    watcher = train(make_recipe(model, run__steps=4, **changes), tmp_path / "parts", resume=True)
    assert [record["entropy_coefficient"] for record in watcher.records] == [0.7, 0.7]
    whole, parts = contents(tmp_path / "whole"), contents(tmp_path / "parts")
    for name, value in whole.items():
        if name.endswith("metrics.jsonl") or "safetensors" in name:
            np.testing.assert_equal(parts[name], value, name)


def test_the_settings_have_these_defaults() -> None:
    """TRL's, so that a setting means the same."""
    settings = UpdateSection()
    assert (settings.entropy_step, settings.entropy_max, settings.entropy_target) == (0.005, 1.0, None)
