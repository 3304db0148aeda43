"""[[reward]] in recipes: both forms, overrides of one of several, and what does not go together."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from delta_cli.errors import UserError
from delta_cli.recipe import load_recipe, parse_recipe, to_toml
from delta_cli.recipe.loading import differences, with_overrides

SEVERAL = """
[[reward]]
kind = "math"

[[reward]]
kind = "format"
weight = 0.2

[[reward]]
kind = "custom"
name = "style"
custom_file = "style.py"
"""


@pytest.fixture
def several(tmp_path: Path) -> Path:
    path = tmp_path / "several.toml"
    path.write_text(SEVERAL)
    return path


def test_both_forms_are_rewards_in_a_row(several: Path) -> None:
    recipe = load_recipe(several)
    assert [(each.title, each.weight) for each in recipe.rewards] == [("math", 1), ("format", 0.2), ("style", 1)]
    assert [each.kind for each in load_recipe(None, ["reward.kind=code"]).rewards] == ["code"]
    alone = parse_recipe({"reward": [{"kind": "code"}]}, "it")
    assert alone.rewards == load_recipe(None, ["reward.kind=code"]).rewards
    assert differences(alone, load_recipe(None, ["reward.kind=code"])) == []


def test_it_writes_itself(several: Path) -> None:
    recipe = load_recipe(several)
    assert parse_recipe(tomllib.loads(to_toml(recipe)), "copy") == recipe


@pytest.mark.parametrize(
    ("kinds", "verifying"),
    [
        (("math",), ("math",)),
        (("format", "number", "custom"), ("number",)),
        (("custom", "length"), ("custom",)),
        (("code", "choice", "format"), ("code", "choice")),
    ],
)
def test_verifiers_say_what_is_right_and_functions_where_there_is_none(
    kinds: tuple[str, ...], verifying: tuple[str, ...]
) -> None:
    file = {"custom": {"custom_file": "mine.py"}}
    recipe = parse_recipe({"reward": [{"kind": kind, **file.get(kind, {})} for kind in kinds]}, "it")
    assert tuple(each.kind for each in recipe.verifiers) == verifying


def test_an_override_names_the_reward_that_it_changes(several: Path) -> None:
    recipe = load_recipe(several, ["reward.style.weight=0.5", "reward.math.workers=1", "reward.style.timeout=3"])
    assert [each.weight for each in recipe.rewards] == [1, 0.2, 0.5]
    assert [each.workers for each in recipe.rewards] == [1, 2, 2]
    again = with_overrides(recipe, ["reward.style.weight=0.25"])
    assert differences(recipe, again) == [("reward.weight", "reward.weight: [1.0, 0.2, 0.5] → [1.0, 0.2, 0.25]")]
    assert [name for name, _ in differences(recipe, load_recipe(None))] != []


MISTAKES = {
    "reward.weight=0.5": ["3 rewards, math, format, style", "--set reward.math.weight=0.5"],
    "reward.custom.weight=0.5": ["--set reward.math.weight=0.5"],
    "reward.format.wieght=1": ["[[reward]] 2", "unknown key reward.wieght", "did you mean reward.weight?"],
    "reward.format.weight=fast": ["[[reward]] 2", "reward.weight = 'fast'", "it must be a number"],
    "reward.style.name=math": ["two rewards are called math", "reward.name"],
    "reward.style.name=failures": ["[[reward]] 3", "'failures'"],
    "reward.style.name=A b": ["'A b'", "small letters"],
    "reward.math.pattern=x": ["[[reward]] 1", "reward.pattern", "format"],
    "reward.format.pattern=(": ["[[reward]] 2", "no regular expression"],
    "reward.math.flip=0.1": ["reward.flip", "a single reward"],
    "reward.math.overlong_buffer=100000": ["reward.overlong_buffer = 100000"],
}


def test_overrides_are_read_in_their_order(several: Path) -> None:
    recipe = load_recipe(several, ["reward.style.name=form", "reward.form.weight=2"])
    assert [each.title for each in recipe.rewards] == ["math", "format", "form"]
    with pytest.raises(UserError, match=r"--set reward.form.weight=x: \[\[reward\]\] 3: reward.weight = 'x'"):
        load_recipe(several, ["reward.style.name=form", "reward.form.weight=x"])
    (several.parent / "empty.toml").write_text("reward = []\n")
    assert load_recipe(several.parent / "empty.toml", ["reward.kind=code"]).rewards[0].kind == "code"


@pytest.mark.parametrize("override", MISTAKES, ids=str)
def test_a_mistake_says_in_which(override: str, several: Path) -> None:
    with pytest.raises(UserError) as error:
        load_recipe(several, [override])
    assert str(error.value).startswith(f"--set {override}")
    assert "\n" not in str(error.value)
    for part in MISTAKES[override]:
        assert part in str(error.value)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ('[[reward]]\nkind = "format"\n[[reward]]\nkind = "length"\n', "no reward says which responses are right"),
        ('[reward]\nkind = "length"\n', "no reward says which responses are right"),
        ("reward = []\n", "no reward says which responses are right"),
        ("reward = [3]\n", "reward = 3 is not allowed: it must be a section"),
        ('[[reward]]\nkind = "mth"\n', r"\[\[reward\]\] 1: reward.kind = 'mth' is not allowed: .*did you mean math\?$"),
        ('[[reward]]\nkind = "custom"\n', r"\[\[reward\]\] 1: .*needs reward.custom_file"),
        ("[reward]\nflip = 0.1\nweight = 2.0\n", "reward.flip"),
    ],
)
def test_what_does_not_go_together_is_refused(text: str, part: str, tmp_path: Path) -> None:
    (tmp_path / "it.toml").write_text(text)
    with pytest.raises(UserError, match=part) as error:
        load_recipe(tmp_path / "it.toml")
    assert "\n" not in str(error.value)


def test_a_list_replaces_what_is_extended_and_one_does_not_change_several(several: Path) -> None:
    (several.parent / "one.toml").write_text("[reward]\nkind = 'code'\n")
    (several.parent / "list.toml").write_text(f"extends = 'one.toml'\n{SEVERAL}")
    assert load_recipe(several.parent / "list.toml").rewards == load_recipe(several).rewards
    (several.parent / "child.toml").write_text("extends = 'several.toml'\n[reward]\nworkers = 1\n")
    with pytest.raises(UserError, match=r"child.toml: \[reward\] changes a single reward, but several.toml has 3"):
        load_recipe(several.parent / "child.toml")
    with pytest.raises(UserError, match=r"overrides: \[reward\] changes a single reward"):
        load_recipe(several, over={"reward": {"workers": 1}})
