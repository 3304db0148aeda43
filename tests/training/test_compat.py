"""The public script's treatment of prompts and rewards, against its rules written out again."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from delta_cli.data.problem import Problem
from delta_cli.recipe import load_recipe
from delta_cli.recipe.loading import differences
from delta_cli.recipe.reward import Reward
from delta_cli.rewards.grader import Grader
from tests.harness import make_recipe, train

RECIPES = Path(__file__).parents[2] / "recipes"


def recorded(folder: Path) -> list[dict]:
    with gzip.open(folder / "rollouts" / "step-000001.jsonl.gz", "rt") as file:
        return [json.loads(line) for line in file]


def write_problems(folder: Path) -> Path:
    lines = [{"question": f"{'x' * (3 * n)}1+{n}=?", "answer": str(1 + n)} for n in range(12)]
    file = folder / "problems.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


@pytest.mark.parametrize("how", ["drop", "cut"])
def test_long_prompts_are_left_out_or_cut_on_the_left(how: str, model: Path, tmp_path: Path) -> None:
    changes = {"data__source": str(write_problems(tmp_path)), "data__template": "plain", "data__limit": None}
    recipe = make_recipe(
        model,
        run__steps=1,
        rollout__prompts=8,
        rollout__max_prompt_tokens=20,
        rollout__long_prompts=how,
        evaluation__problems=1,
        **changes,
    )
    train(recipe, tmp_path / "run")
    prompts = {record["problem"]: record["prompt_ids"] for record in recorded(tmp_path / "run")}
    assert max(map(len, prompts.values())) <= 20
    # The byte tokenizer makes one id of each character, so a whole prompt has 3n + 5 or 3n + 6 ids.
    longest = max(int(name) for name in prompts)
    if how == "drop":
        assert longest <= 6
    else:
        assert longest > 6
        whole = f"1+{longest - 1}=?".encode()
        assert len(prompts[str(longest)]) == 20
        texts = [record["prompt"] for record in recorded(tmp_path / "run") if record["problem"] == str(longest)]
        assert texts[0] == "x" * (20 - len(whole)) + whole.decode()


@pytest.mark.parametrize(
    ("length", "penalty"), [(1, 0.0), (16384, 0.0), (16385, -1 / 4096), (18432, -0.5), (20480, -1.0)]
)
def test_overlong_shaping_is_the_scripts(length: int, penalty: float) -> None:
    """min(−(length − expected) / buffer · factor, 0) with a limit of 20,480, a buffer of 4,096 and a factor of 1."""
    expected = 20480 - 4096
    assert penalty == min(-(length - expected) / 4096 * 1.0, 0)
    with Grader(Reward(overlong_buffer=4096), max_tokens=20480) as grader:
        right = grader.submit(r"\boxed{5}", Problem("1", "?", "5"), length, length == 20480).result()
        wrong = grader.submit(r"\boxed{6}", Problem("1", "?", "5"), length, length == 20480).result()
    assert (right.reward, wrong.reward) == (1 + penalty, penalty)
    assert right.correct


def test_one_recipe_sets_every_option_of_the_public_script() -> None:
    changed = dict(differences(load_recipe(RECIPES / "qwen3_8b.toml"), load_recipe(RECIPES / "paper_8b_public.toml")))
    assert set(changed) == {
        "rollout.long_prompts",
        "reward.verifier",
        "reward.overlong_buffer",
        "method.aggregation",
        "delta.shards",
        "delta.one_sided",
    }


def test_a_run_with_every_option_differs_and_trains(model: Path, tmp_path: Path) -> None:
    options = {
        "delta__shards": 2,
        "delta__one_sided": "zero",
        "method__aggregation": "micro_batch_mean",
        "update__micro_batch_tokens": 64,
        "rollout__long_prompts": "cut",
        "reward__verifier": "public",
        "reward__overlong_buffer": 8,
        "run__steps": 2,
    }
    found = train(make_recipe(model, **options), tmp_path / "public")
    usual = train(make_recipe(model, run__steps=2, reward__overlong_buffer=8), tmp_path / "usual")
    assert found.records[0]["reward_mean"] == usual.records[0]["reward_mean"]  # the same responses
    assert found.records[0]["coefficient_p95"] != usual.records[0]["coefficient_p95"]
    assert found.records[0]["grad_norm"] != usual.records[0]["grad_norm"]
