"""Runs with several [[reward]] tables: their sum is learned from, each is recorded, verifiers decide what is right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from delta_cli.errors import UserError
from delta_cli.recipe import Recipe, parse_recipe
from delta_cli.recipe.loading import with_overrides
from delta_cli.runs.folder import RunFolder, read_lines
from delta_cli.runs.records import RecordedRun
from delta_cli.training.setup import load_benchmarks, load_data, make_grader
from tests.harness import assert_same, make_recipe, train
from tests.training.watched import run

CUSTOM = """
from pathlib import Path
def reward(response, problem):
    with Path({seen!r}).open("a") as file:
        file.write(problem.id + "\\n")
    return len(response) % 4 / 4
"""


def several(model: Path, rewards: list[dict[str, Any]], **changes: Any) -> Recipe:
    """The recipe SHORT with these rewards."""
    table = make_recipe(model, **changes).model_dump(exclude_none=True) | {"reward": rewards}
    return parse_recipe(table, "it")


@pytest.fixture
def rewards(tmp_path: Path) -> list[dict[str, Any]]:
    """A verifier of weight 0, a reward for short responses, and a function that logs the problems it grades."""
    (tmp_path / "mine.py").write_text(CUSTOM.format(seen=str(tmp_path / "seen")))
    return [
        {"kind": "math", "weight": 0.0},
        {"kind": "length", "weight": 2.0},
        {"kind": "custom", "name": "quarters", "weight": -0.5, "custom_file": str(tmp_path / "mine.py"), "workers": 1},
    ]


def test_the_sum_is_learned_from_and_each_is_recorded(
    model: Path, rewards: list[dict[str, Any]], tmp_path: Path
) -> None:
    heard = train(several(model, rewards, run__steps=3), tmp_path / "run")
    folder = RunFolder(tmp_path / "run")
    for step, record in enumerate(heard.records, 1):
        rows = list(read_lines(folder.rollout_file(step)))
        for row in rows:
            worth = {"math": 0.0, "length": 1 - len(row["tokens"]) / 16, "quarters": len(row["response"]) % 4 / 4}
            assert row["rewards"] == pytest.approx(worth, abs=1e-12)
            assert row["reward"] == pytest.approx(2 * worth["length"] - 0.5 * worth["quarters"], abs=1e-12)
            assert not row["correct"]
        for name in ("math", "length", "quarters"):
            assert record[f"reward_{name}"] == pytest.approx(np.mean([row["rewards"][name] for row in rows]))
        assert record["reward_mean"] == pytest.approx(2 * record["reward_length"] - 0.5 * record["reward_quarters"])
        assert record["accuracy"] == 0
        advantages = np.array([row["advantage"] for row in rows]).reshape(4, 8)
        total = np.array([row["reward"] for row in rows]).reshape(4, 8)
        wanted = (total - total.mean(1, keepdims=True)) / (total.std(1, ddof=1, keepdims=True) + 1e-6)
        np.testing.assert_allclose(advantages, wanted, atol=1e-9)
    assert RecordedRun(tmp_path / "run").recipe["reward"][2]["name"] == "quarters"


def test_the_policy_learns_beside_a_verifier_of_weight_0(
    model: Path, rewards: list[dict[str, Any]], tmp_path: Path
) -> None:
    """With weight 2 on short responses a random model learns to end them early."""
    heard = train(several(model, rewards[:2], run__steps=9, evaluation__every=0), tmp_path / "run")
    assert heard.records[-1]["reward_length"] > heard.records[0]["reward_length"] + 0.3


def test_evaluations_ask_the_verifiers_alone(model: Path, rewards: list[dict[str, Any]], tmp_path: Path) -> None:
    recipe = several(model, rewards, run__steps=2, evaluation__every=1)
    train(recipe, tmp_path / "run")
    data = load_data(recipe, None)
    held_out = {problem.id for problem in load_benchmarks(recipe, data)[0].problems}
    asked = set((tmp_path / "seen").read_text().split())
    assert len(list(read_lines(RunFolder(tmp_path / "run").evaluations))) == 3
    assert asked <= {problem.id for problem in data.problems}
    assert not asked & held_out


def test_a_run_is_resumed_bit_for_bit_and_with_the_same_weights(
    model: Path, rewards: list[dict[str, Any]], tmp_path: Path
) -> None:
    recipe = several(model, rewards, run__steps=4)
    train(recipe, tmp_path / "whole")
    train(with_overrides(recipe, ["run.steps=2"]), tmp_path / "parts")
    train(recipe, tmp_path / "parts", resume=True)
    assert_same(tmp_path / "whole", tmp_path / "parts")


def test_a_function_that_cannot_grade_is_named_before_the_run(model: Path, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("def reward(response, problem): return problem.no_such_field")
    rewards = [{"kind": "math"}, {"kind": "custom", "custom_file": str(tmp_path / "broken.py")}]
    with pytest.raises(UserError, match=r"broken.py:reward cannot grade problem .*no_such_field"):
        train(several(model, rewards), tmp_path / "run")


def test_answers_are_checked_for_every_verifier(model: Path, tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text('{"question": "q", "answer": "no number"}\n' * 9)
    changes = {"data__source": str(tmp_path / "data.jsonl"), "data__template": "{question}"}
    load_data(several(model, [{"kind": "math"}, {"kind": "length"}], **changes), None)
    with pytest.raises(UserError, match="ends with no number"):
        load_data(several(model, [{"kind": "math"}, {"kind": "number"}], **changes), None)


def test_a_suite_needs_its_verifier_to_be_the_only_one(model: Path) -> None:
    changes = {"evaluation__suite": "arithmetic"}
    own = {"kind": "custom", "custom_file": "mine.py"}
    recipe = several(model, [{"kind": "math"}, own, {"kind": "length"}], **changes)
    assert load_benchmarks(recipe, load_data(recipe, None))
    for rewards, part in (([{"kind": "math"}, {"kind": "number"}], "is number"), ([own], "mine.py")):
        recipe = several(model, rewards, **changes)
        with pytest.raises(UserError, match=part):
            load_benchmarks(recipe, load_data(recipe, None))


def test_the_keys_of_each_reward_arrive(model: Path, tmp_path: Path) -> None:
    """test_every_key checks a single reward; these keys exist only for several."""
    rewards = [
        {"kind": "length"},
        {"kind": "number", "weight": 1.5, "workers": 3, "timeout": 4.5},
        {"kind": "format", "weight": 0.25, "name": "tidy", "pattern": ".+c-pattern", "workers": 5, "timeout": 6.5},
        {"kind": "format", "weight": 0.75},
    ]
    recipe = several(model, rewards, run__steps=1, rollout__max_tokens=13)
    terms = make_grader(recipe).terms
    assert [(term.name, term.weight, term.verifies) for term in terms] == [
        ("length", 1.0, False),
        ("number", 1.5, True),
        ("tidy", 0.25, False),
        ("format", 0.75, False),
    ]
    assert [term.grader.reward for term in terms] == list(recipe.rewards)
    assert {(term.grader.max_tokens, term.grader.form) for term in terms} == {(13, "number")}


def test_weight_of_a_single_reward(model: Path, tmp_path: Path) -> None:
    """In a list of one the weight counts, and no reward is recorded by name."""
    keys = {
        "model.path": str(model), "run.steps": 1, "data.limit": 40, "rollout.prompts": 4, "rollout.responses": 4,
        "rollout.max_tokens": 8, "evaluation.every": "never", "reward.length_penalty": 10.0, "reward.weight": 3.5,
    }  # fmt: skip
    seen = run(tmp_path / "run", keys)
    rows = list(read_lines(seen.folder.rollout_file(1)))
    assert [row["reward"] for row in rows] == pytest.approx([-0.035 * len(row["tokens"]) for row in rows])
    assert not any("rewards" in row for row in rows)
    assert {name for name in seen.records[0] if name.startswith("reward_")} == {"reward_mean", "reward_failures"}
