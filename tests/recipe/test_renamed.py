"""Old names of keys, values and metrics work for one more release, and one line says the new name."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest

from delta_cli.api.resume import recipe_of_run
from delta_cli.credit import Correction
from delta_cli.errors import RenamedWarning, UserError
from delta_cli.recipe import Recipe, load_recipe, to_toml
from delta_cli.recipe.keys import walk
from delta_cli.recipe.renamed import KEYS, METRICS, MOVED, VALUES
from delta_cli.runs.folder import read_lines
from delta_cli.runs.metrics import METRICS as KNOWN_METRICS

# Every old name, with a value that is not the default.
OLD = {
    "update.score": ("fresh", "update.old_logprobs", "recompute"),
    "update.importance_cap": (1.5, "correction.high", 1.5),
    "engine.ahead": (1, "engine.async_steps", 1),
    "reward.format": (0.5, "reward.format_bonus", 0.5),
    "reward.length": (0.25, "reward.length_penalty", 0.25),
    "rollout.dynamic": (True, "rollout.dynamic_sampling", True),
    "rollout.dynamic_limit": (7, "rollout.dynamic_sampling_limit", 7),
}
NEEDED = {"engine.ahead": ["engine.kind=vllm", "engine.launch=true"]}  # so that the value is allowed


def value(recipe: Recipe, name: str) -> object:
    section, key = name.split(".")
    return getattr(getattr(recipe, section), key)


def text(old: str) -> str:
    """A recipe that uses the old name."""
    lines = [f"{old} = {json.dumps(OLD[old][0])}"]
    for each in NEEDED.get(old, ()):
        name, _, given = each.partition("=")
        lines.append(f"{name} = {given if given == 'true' else json.dumps(given)}")
    return "\n".join(lines) + "\n"


def test_the_table_has_every_old_name() -> None:
    renamed = {f"{section}.{old}": f"{section}.{new}" for section, names in KEYS.items() for old, new in names.items()}
    moved = {f"{section}.{old}": f"{target}.{new}" for (section, old), (target, new, _) in MOVED.items()}
    assert {old: new for old, (_, new, _) in OLD.items()} == renamed | moved
    known = {name for name, _ in walk(Recipe)}
    assert {new for _, new, _ in OLD.values()} <= known
    assert not set(OLD) & known
    assert {f"{section}.{key}" for section, key in VALUES} <= known
    assert set(METRICS.values()) <= set(KNOWN_METRICS)
    assert not set(METRICS) & set(KNOWN_METRICS)


@pytest.mark.parametrize("old", OLD)
@pytest.mark.parametrize("place", ["a file", "an extended file", "an override", "a run", "a change of a run"])
def test_an_old_key_works_and_says_its_new_name(old: str, place: str, tmp_path: Path) -> None:
    given, new, expected = OLD[old]
    override = f"{old}={given if isinstance(given, str) else json.dumps(given)}"
    (tmp_path / "recipe.toml").write_text("" if place in ("an override", "a change of a run") else text(old))
    (tmp_path / "mine.toml").write_text('extends = "recipe.toml"\n')
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        if place == "an extended file":
            recipe = load_recipe(tmp_path / "mine.toml")
        elif place == "an override":
            recipe = load_recipe(tmp_path / "recipe.toml", [*NEEDED.get(old, ()), override])
        elif place == "a run":
            recipe = recipe_of_run(tmp_path, None, ())
        elif place == "a change of a run":
            (tmp_path / "recipe.toml").write_text(to_toml(load_recipe(None, NEEDED.get(old, ()))))
            with pytest.raises(UserError, match=f"{new}: .* → "):  # none of them may change in the middle of a run
                recipe_of_run(tmp_path, None, [override])
            recipe = load_recipe(tmp_path / "recipe.toml", [override])
        else:
            recipe = load_recipe(tmp_path / "recipe.toml")
    assert value(recipe, new) == expected
    lines = [str(each.message) for each in said if issubclass(each.category, RenamedWarning)]
    assert any(f"{old} is now {new}" in line for line in lines), lines
    assert not any("\n" in line for line in lines)


def test_an_old_and_a_new_name_together_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "recipe.toml"
    file.write_text("[rollout]\ndynamic = true\ndynamic_sampling = false\n")
    with pytest.raises(UserError, match=r"unknown key rollout\.dynamic; did you mean rollout\.dynamic_sampling\?"):
        load_recipe(file)


def test_a_reward_may_have_the_old_name_of_a_key(tmp_path: Path) -> None:
    """``reward.format.weight`` is the reward called format; ``reward.math.format`` is an old key of another one."""
    file = tmp_path / "recipe.toml"
    file.write_text('[[reward]]\nkind = "math"\n[[reward]]\nkind = "format"\n')
    assert [each.weight for each in load_recipe(file, ["reward.format.weight=2"]).rewards] == [1, 2]
    with pytest.warns(RenamedWarning, match=r"reward.format is now reward.format_bonus"):
        assert load_recipe(file, ["reward.math.format=0.5"]).rewards[0].format_bonus == 0.5


def test_old_metrics_of_a_run_are_read_by_their_new_names(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text(json.dumps({"step": 1} | dict.fromkeys(METRICS, 0.5)) + "\n")
    (record,) = read_lines(file)
    assert record == {"step": 1} | dict.fromkeys(METRICS.values(), 0.5)


def test_the_old_cap_means_the_correction_that_it_was() -> None:
    with pytest.warns(RenamedWarning, match=r"update.importance_cap is now correction.high"):
        recipe = load_recipe(None, ["update.importance_cap=1.5"])
    assert recipe.correction.resolve() == Correction("token", "truncate", high=1.5)
    assert recipe.update == load_recipe(None).update
