"""Recipes: everything in recipes/ loads, every mistake is one line that helps."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delta_cli.credit import PRESETS
from delta_cli.errors import UserError
from delta_cli.recipe import Recipe, key_reference, load_recipe, parse_recipe, to_toml
from delta_cli.recipe.keys import walk
from delta_cli.recipe.loading import differences, with_overrides
from delta_cli.recipe.models import UpdateSection

FOLDER = Path(__file__).parents[2] / "recipes"
RECIPES = sorted(path for path in FOLDER.rglob("*.toml") if "\narms = " not in path.read_text())  # the rest: studies


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: str(path.relative_to(FOLDER)))
def test_every_recipe_in_the_repository_loads_and_writes_itself(path: Path, tmp_path: Path) -> None:
    recipe = load_recipe(path)
    copy = tmp_path / "copy.toml"
    copy.write_text(to_toml(recipe), encoding="utf-8")
    assert load_recipe(copy) == recipe


MISTAKES = {
    "update.learning_rat=1": ["unknown key update.learning_rat", "did you mean update.learning_rate?"],
    "updates.learning_rate=1": ["unknown key updates", "did you mean update?"],
    "method.learning_rate=1": ["did you mean update.learning_rate?"],
    "update.learning_rate=fast": ["update.learning_rate = 'fast'", "number"],
    "update.learning_rate=-1": ["update.learning_rate = -1", "at least 0"],
    "update.learning_rate=nan": ["update.learning_rate = nan", "finite"],
    "run.steps=1.5": ["run.steps = 1.5", "whole number"],
    "run.steps=true": ["run.steps = True", "whole number"],
    "method.preset=ppo": ["'ppo'", "grpo", "delta"],
    "delta.temperature=hot": ["'hot'", "number", "lagged or first"],
    "delta.temperature=-1": ["[delta]", "-1"],
    "delta.lambda_min=1.5": ["lambda_min <= lambda_max", "1.5"],
    "delta.lambda_min=-0.1": ["delta.lambda_min = -0.1"],
    "delta.proxy=logits": ["'logits'", "hidden_exact"],
    "model.lora.rak=4": ["model.lora.rak", "did you mean model.lora.rank?"],
    "model.lora.targets=[]": ["model.lora.targets"],
    "rollout.prompts=30": ["rollout.prompts = 30", "update.mini_batches = 4", "divisor"],
    "reward.kind=custom": ["reward.custom_file"],
    "reward.overlong_buffer=100000": ["reward.overlong_buffer = 100000"],
    "reward.overlong_factor=-1": ["--set reward.overlong_factor=-1: "],
    "method.future_ratio=1": ["method.future_ratio = 1"],
    "steps=1": ["did you mean --set run.steps=1?"],
    "run.steps": ["section.key=value"],
    "run.steps=1\nseed=2": ["gives more than one value"],
}


@pytest.mark.parametrize("override", MISTAKES, ids=str)
def test_a_mistake_is_one_line_with_key_value_and_remedy(override: str) -> None:
    with pytest.raises(UserError) as error:
        load_recipe(None, [override])
    message = str(error.value)
    assert "\n" not in message.replace(override, "")
    for part in MISTAKES[override]:
        assert part in message


@pytest.mark.parametrize(
    ("overrides", "part"),
    [
        (["method.preset=fipo", "update.mini_batches=1"], "future_kl"),
        (["method.preset=rloo", "rollout.responses=1"], "rollout.responses above 1"),
        (["rollout.dynamic_sampling=true", "rollout.responses=1"], "rollout.dynamic_sampling"),
        (["rollout.top_p=0.9"], r"rollout.top_p: .*not the policy's.*evaluation.top_p"),
        (["rollout.top_k=20"], r"rollout.top_k: .*not the policy's.*evaluation.top_k"),
        (["rollout.min_p=0.1"], r"rollout.min_p: .*not the policy's.*evaluation.min_p"),
        (["reward.flip=0.1", "reward.kind=code", "reward.code=share"], "reward.flip"),
    ],
)
def test_choices_that_do_not_go_together_are_refused_with_the_reason(overrides: list[str], part: str) -> None:
    with pytest.raises(UserError, match=part):
        load_recipe(None, overrides)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    broken = tmp_path / "broken.toml"
    cases = {
        b"[run\nsteps = 1": "not valid TOML",
        b"\xff\xfe\x00": "is not a text in UTF-8",
        b"extends = 3": "extends",
        b'extends = "broken.toml"': "extends itself",
        b'extends = "absent.toml"': "no such file",
        b"run = 3": "run = 3",
        b"a = " + b"[" * 5000: "not valid TOML",
    }
    for content, part in cases.items():
        broken.write_bytes(content)
        with pytest.raises(UserError, match=part) as error:
            load_recipe(broken)
        assert "\n" not in str(error.value)
    with pytest.raises(
        UserError, match=r"is a folder, not a recipe; choose one of its recipes, such as .*broken\.toml"
    ):
        load_recipe(tmp_path)
    (tmp_path / "mine.toml").write_text("")
    with pytest.raises(UserError, match=r"did you mean .*mine\.toml"):
        load_recipe(tmp_path / "mien.toml")


def test_extends_and_overrides_change_single_keys(tmp_path: Path) -> None:
    (tmp_path / "base.toml").write_text('[run]\nsteps = 7\nseed = 3\n[model.lora]\nrank = 4\ntargets = ["q_proj"]\n')
    (tmp_path / "mine.toml").write_text('extends = "base.toml"\n[run]\nseed = 4\n')
    recipe = load_recipe(tmp_path / "mine.toml", ["model.lora.rank=8", "method.preset=grpo"])
    assert (recipe.run.steps, recipe.run.seed, recipe.method.preset) == (7, 4, "grpo")
    assert recipe.model.lora is not None
    assert (recipe.model.lora.rank, recipe.model.lora.targets) == (8, ("q_proj",))


def test_a_method_is_its_preset_with_changes() -> None:
    method = load_recipe(None, ["method.preset=dapo", "method.credit=delta", "method.eps_high=0.5"]).method.resolve()
    assert (method.credit, method.eps_high, method.dual_clip) == ("delta", 0.5, PRESETS["dapo"].dual_clip)


def test_a_preset_may_change_other_keys_too() -> None:
    light = load_recipe(None, ["method.preset=delta_light", "method.weight_negative=0.75"]).method
    assert (light.normalise, light.weight_negative) == ("side", 0.75)
    assert load_recipe(None, ["method.preset=delta_light"]).method.weight_negative == 0.5
    plain = load_recipe(None, ["method.preset=delta"]).method
    assert (plain.normalise, plain.weight_negative) == (None, 1.0)
    delta = load_recipe(None, ["method.preset=delta_group", "delta.proxy=hidden_topk"]).delta
    assert (delta.proxy, delta.scope) == ("hidden_topk", "group")
    assert load_recipe(None, ["method.preset=delta_group"]).delta.proxy == "hidden_exact"
    assert load_recipe(None, ["method.preset=delta"]).delta.scope == "batch"


def test_every_key_has_a_meaning() -> None:
    reference = {key.name: key for key in key_reference()}
    assert set(reference) == {name for name, _ in walk(Recipe)}
    assert all(key.description and key.type for key in reference.values())
    assert reference["update.learning_rate"].allowed == "≥ 0 and ≤ 1"
    assert reference["rollout.max_tokens"].unit == "tokens"
    assert reference["delta.temperature"].allowed == "lagged, first"


def test_differences_name_the_keys() -> None:
    recipe = load_recipe(None)
    changed = with_overrides(recipe, ["run.steps=3", "model.lora.rank=2"])
    assert [name for name, _ in differences(recipe, recipe)] == []
    assert {name for name, _ in differences(recipe, changed)} >= {"run.steps", "model.lora.rank"}


def test_schedules() -> None:
    def rates(schedule: str, warmup: int) -> list[float]:
        update = UpdateSection(learning_rate=1.0, schedule=schedule, warmup=warmup)  # type: ignore[arg-type]
        return [update.rate(step, 4) for step in range(4)]

    assert rates("constant", 0) == [1, 1, 1, 1]
    assert rates("constant", 2) == [0.5, 1, 1, 1]
    assert rates("linear", 0) == [1, 0.75, 0.5, 0.25]
    assert rates("cosine", 0) == pytest.approx([1, 0.853553, 0.5, 0.146447], abs=1e-6)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(st.sampled_from([*Recipe.model_fields, "extra"]), json_values, max_size=4))
def test_no_table_makes_a_traceback(table: dict[str, object]) -> None:
    message = "it: "
    try:
        parse_recipe(table, "it")
    except UserError as error:
        message = str(error)
    assert message.startswith("it: ")


@given(st.text())
def test_any_text_survives_the_way_through_toml(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:  # a lone surrogate is no text a file can hold
        return
    recipe = parse_recipe({"data": {"filter": text}}, "it")
    import tomllib

    assert parse_recipe(tomllib.loads(to_toml(recipe)), "copy") == recipe


def test_types_of_keys_are_words() -> None:
    """Types are shown in words, never in Python's notation."""
    words = {
        "whole number",
        "number",
        "text",
        "choice",
        "true or false",
        "list of text",
        "list of numbers",
        "tables by name",
    }
    for key in key_reference():
        assert set(key.type.replace("true or false", "flag").split(" or ")) <= words - {"true or false"} | {"flag"}, key
