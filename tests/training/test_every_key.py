"""Every key of a recipe reaches the code that acts on it, with its own value.

Each key gets a value that is not its default and that no other key has. So a test fails if two keys are swapped, or if
the code replaces one by a constant. Where a value arrives is read from the records and calls of real runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from backends.settings import BackendSettings
from delta_cli.credit import CoefficientSettings, MiniBatch, Surrogate
from delta_cli.data import arithmetic
from delta_cli.data.load_report import LoadedData
from delta_cli.evaluation.results import EvaluationSettings
from delta_cli.recipe import Recipe
from delta_cli.recipe.data import Arithmetic
from delta_cli.recipe.keys import walk
from delta_cli.recipe.reward import JudgeSection, RewardModelSection
from delta_cli.runs.folder import read_lines
from delta_cli.seeds import derive

from .every_key import TOGETHER
from .watched import Seen, one, recipe_of, run

OF_ROWS = (
    "config",
    "split",
    "question",
    "answer",
    "layout",
    "answer_pattern",
    "filter",
    "columns",
)  # generated data has no rows
ALONE = {
    "data.source",
    "data.sources",  # tests/data/test_several_sources.py
    *(f"data.{name}" for name in OF_ROWS),
    *(f"data.pass_rate_{name}" for name in ("file", "min", "max")),  # tests/data/test_pass_rates.py
    "data.curriculum",  # these two in tests/rollout/test_curriculum.py
    "data.curriculum_exploration",
    "rollout.max_prompt_tokens",
    "rollout.dynamic_sampling",
    "rollout.dynamic_sampling_limit",
    "rollout.long_prompts",
    "reward.verifier",
    "update.old_logprobs",  # tests/training/test_score_as_drawn.py
    *(f"update.entropy_{name}" for name in ("target", "step", "max")),  # tests/training/test_entropy_bonus.py
    "delta.shards",
    "reward.kind",
    "reward.weight",  # these three in tests/rollout/test_rewards.py
    "reward.name",
    "reward.pattern",
    "reward.code",
    "reward.custom_file",
    "reward.custom_function",
    "reward.group",  # these three, with the keys of [reward.judge], in tests/rollout/test_judged_runs.py
    "reward.max_failed",
    *(f"reward.judge.{name}" for name in JudgeSection.model_fields),
    *(f"reward.model.{name}" for name in RewardModelSection.model_fields),  # tests/rewards/test_reward_model.py
    "method.preset",
    "method.blame",  # acts in tests/training/test_blame.py
    "correction.preset",
    "method.normalise",  # these four in tests/training/test_weight_functions.py
    "method.weight_negative",
    "method.hint",
    "method.hidden_residuals",
    "update.drop_truncated",
    "data.system",
    "data.thinking",
    "evaluation.every",
    "evaluation.suite",
    "checkpoint.every",
    "checkpoint.keep",
    "checkpoint.keep_best",
    "checkpoint.async_save",  # acts in tests/training/test_async_save.py
    "checkpoint.rollouts_every",
    "tracking.kind",
    "tracking.project",
    "parallel.processes",
    "parallel.prompt_queue",  # in tests/rollout/test_prompt_queue.py
    "parallel.timeout",  # both in tests/backends/test_watchdog.py
    "parallel.rollout_timeout",
    "model.adapter",  # both in tests/backends, and below
    "model.load_in_4bit",
    # the section [environment] is passed whole, and its keys act in tests/training/test_episodes.py
    *(f"environment.{name}" for name in Recipe.model_fields["environment"].default.model_dump()),
    # engine.async_steps draws in tests/vllm/test_training.py, engine.in_flight in tests/vllm/test_in_flight.py
    *(f"engine.{name}" for name in Recipe.model_fields["engine"].default.model_dump()),
}


@pytest.fixture(scope="module")
def seen(values: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """The run with all values of TOGETHER."""
    return run(tmp_path_factory.mktemp("run") / "run", values)


# ----------------------------------------------------------------------------------- all together


def test_every_key_has_a_value_of_its_own() -> None:
    """No value is the default, and no number comes twice. A new key needs a line in this file."""
    defaults = {name: field.default for name, field in walk(Recipe)}
    assert TOGETHER.keys() | ALONE == defaults.keys()
    assert not TOGETHER.keys() & ALONE
    for name, value in TOGETHER.items():
        assert value != defaults[name], name
    numbers = [value for value in TOGETHER.values() if isinstance(value, int | float) and not isinstance(value, bool)]
    assert len(numbers) == len(set(numbers))


Found = Callable[[Seen], Any]


def of(kind: type, name: str) -> Found:
    """Read the field of that name from all records of a kind."""
    return lambda seen: seen.the(kind, name)


def evaluated(name: str) -> Found:
    """Read a sampling setting of all evaluations."""
    return lambda seen: one([getattr(sampling, name) for sampling in seen.samplings("evaluate")])


def keys_of(section: str, *others: str) -> list[str]:
    """The section's keys among those of TOGETHER but for the others, in one order in every process."""
    names = [name.removeprefix(f"{section}.") for name in TOGETHER if name.startswith(f"{section}.")]
    return [name for name in names if name not in others]


ARRIVES: dict[str, Found] = {
    "run.steps": lambda seen: len(seen.records),
    "run.threads": of(BackendSettings, "threads"),
    "run.deterministic": of(BackendSettings, "deterministic"),
    "data.template": of(EvaluationSettings, "template"),
    "data.limit": lambda seen: one([each.report.read for each in seen.made[LoadedData]]),
    "data.held_out": lambda seen: round(one([len(each.held_out) for each in seen.made[LoadedData]]) / 47, 2),
    "rollout.prompts": lambda seen: one([count for phase, count, _ in seen.rollouts if phase == "rollout"]),
    "rollout.responses": lambda seen: one([sampling.samples for sampling in seen.samplings("rollout")]),
    "rollout.max_tokens": lambda seen: one(
        [sampling.max_tokens for sampling in seen.samplings("rollout")] + [seen.the(MiniBatch, "max_length")]
    ),
    "rollout.temperature": lambda seen: one(
        [each.temperature for each in seen.samplings("rollout")] + [each.temperature for each, _ in seen.scored]
    ),
    "rollout.stop": lambda seen: list(
        one([each.stop.strings for _, _, each in seen.rollouts if each.stop] + [seen.the(EvaluationSettings, "stop")])
    ),
    "rollout.batch": of(BackendSettings, "rollout_batch"),
    "delta.proxy": lambda seen: one([proxy.kind for _, proxy in seen.scored if proxy]),
    "delta.topk": lambda seen: one([proxy.k for _, proxy in seen.scored if proxy]),
    "delta.scope": lambda seen: "group" if seen.grouped == 4 else "batch",
    "update.learning_rate": lambda seen: max(seen.rates),
    "update.mini_batches": lambda seen: 9 * 5 // len(seen.made[MiniBatch][0].advantages),
    "update.epochs": lambda seen: len(seen.rates) // (4 * 3),
    "update.kl_coefficient": of(MiniBatch, "kl_coefficient"),
    "update.kl_estimator": of(MiniBatch, "kl_estimator"),
    "update.entropy_coefficient": of(MiniBatch, "entropy_coefficient"),
    **{f"correction.{name}": of(MiniBatch, f"correction.{name}") for name in keys_of("correction")},
    "evaluation.at_start": lambda seen: next(read_lines(seen.folder.evaluations))["step"] == 0,
    "evaluation.problems": lambda seen: one([count for phase, count, _ in seen.rollouts if phase == "evaluate"]),
    **{f"method.{name}": of(Surrogate, f"method.{name}") for name in keys_of("method")},
    **{f"delta.{name}": of(CoefficientSettings, name) for name in keys_of("delta", "proxy", "topk", "scope")},
    **{
        f"evaluation.{name}": evaluated(name)
        for name in ("samples", "temperature", "top_p", "top_k", "min_p", "max_tokens")
    },
}
# Where a section arrives whole, so that no key of it can get lost.
WHOLE: dict[str, list[Found]] = {
    "model": [of(BackendSettings, "model")],
    "update": [of(BackendSettings, "optimizer"), of(BackendSettings, "memory")],
    "parallel": [of(BackendSettings, "parallel")],
    "reward": [lambda seen: one(seen.rewards)],
}
BY_EFFECT = {"run.seed", "data.operation", "data.digits", "data.filler"}  # tested by what they do


@pytest.mark.parametrize("section", WHOLE)
def test_the_section_arrives_whole(section: str, seen: Seen, values: dict[str, Any]) -> None:
    for found in WHOLE[section]:
        assert found(seen) == getattr(recipe_of(values), section)


@pytest.mark.parametrize("name", ARRIVES)
def test_the_key_arrives_with_its_value(name: str, seen: Seen, values: dict[str, Any]) -> None:
    assert ARRIVES[name](seen) == values[name]


def test_every_key_has_a_test() -> None:
    whole = {name for name in TOGETHER if name.partition(".")[0] in WHOLE}
    assert TOGETHER.keys() == ARRIVES.keys() | whole | BY_EFFECT


def test_the_seed_reaches_everything_random(seen: Seen) -> None:
    assert seen.the(BackendSettings, "seed") == 17
    assert seen.the(EvaluationSettings, "seed") == 17
    (data,) = seen.made[LoadedData]
    task = Arithmetic(operation="multiply", digits=1)
    assert data.problems == tuple(arithmetic.problems(task, 31, 17)), "operation and digits arrive too"
    seeds = [sampling.seed for sampling in seen.samplings("rollout")]
    assert seeds == [derive(17, step, "rollout 0") for step in range(4)]


def test_the_learning_rate_warms_up_and_decays(seen: Seen) -> None:
    each = np.array(seen.rates).reshape(4, 36)
    np.testing.assert_allclose(each, 0.002 * np.array([[0.5], [1], [1], [0.5]]) * np.ones(36))


def test_the_share_of_rewards_is_flipped(seen: Seen) -> None:
    """No response of this model is right, so a flipped reward is its shaping plus 1."""
    share, rewards, shaping = 0.45, [], []
    for row in read_lines(seen.folder.rollout_file(1)):
        length = len(row["tokens"])
        assert not row["correct"]
        rewards.append(row["reward"])
        shaping.append(-6.5 * length / 1000 + min(-(length - (13 - 8)) / 8, 0) * 2.5)
    flipped = np.random.default_rng(derive(17, 0, "rollout 0")).random(45) < share
    assert 0 < flipped.sum() < 45
    np.testing.assert_allclose(np.array(rewards) - shaping, flipped, atol=1e-9)


def test_the_reference_is_kept_for_the_kl_term(seen: Seen) -> None:
    assert seen.the(BackendSettings, "keep_reference")
    assert all(each.reference_logp is not None for each in seen.made[MiniBatch])
