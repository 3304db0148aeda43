"""Every key of a recipe reaches the code that acts on it, with its own value.

Each key gets a value that is not its default and that no other key has. So a test fails if two keys are swapped, or if
the code replaces one by a constant. Where a value arrives is read from the records and calls of real runs.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tokenizers
from typer.testing import CliRunner

from backends.interface import BackendError
from backends.settings import BackendSettings
from backends.vllm.command import server_command
from delta_cli.assets import model_path
from delta_cli.cli import app
from delta_cli.credit import CORRECTIONS, CoefficientSettings, MiniBatch, Surrogate
from delta_cli.credit.methods import PRESETS
from delta_cli.data import arithmetic
from delta_cli.data.load_report import LoadedData
from delta_cli.data.prompts import render
from delta_cli.data.tokenizer import Tokenizer
from delta_cli.errors import UserError
from delta_cli.evaluation.results import EvaluationSettings
from delta_cli.recipe import Recipe, load_recipe
from delta_cli.recipe.backend_settings import backend_settings
from delta_cli.recipe.data import Arithmetic
from delta_cli.recipe.keys import walk
from delta_cli.recipe.reward import JudgeSection, RewardModelSection
from delta_cli.reporting.trackers import with_tracking
from delta_cli.runs.folder import read_lines
from delta_cli.runs.observer import Observer
from delta_cli.seeds import derive
from delta_cli.training.setup import evaluation_settings, load_tokenizer
from tests.harness import write_model

from .watched import Seen, one, recipe_of, run

# One run has all of these. Keys that exclude one of them have runs of their own below.
TOGETHER: dict[str, Any] = {
    "run.steps": 4,
    "run.seed": 17,
    "run.threads": 58,
    "run.deterministic": True,
    "model.path": "set by the fixture",
    "model.dtype": "bfloat16",
    "model.gradient_checkpointing": True,
    "model.lora.rank": 31,
    "model.lora.scale": 1.5,
    "model.lora.targets": ["q_proj", "down_proj"],
    "model.lora.layers": 19,
    "model.lora.dora": True,
    "data.limit": 47,
    "data.held_out": 0.34,  # 16 of 47
    "data.template": "Q {question} A",
    "data.operation": "multiply",
    "data.digits": 1,
    "data.filler": 6,
    "rollout.prompts": 9,
    "rollout.responses": 5,
    "rollout.max_tokens": 13,
    "rollout.temperature": 0.7,
    "rollout.batch": 41,
    "rollout.stop": ["c-stop", "c-other"],
    "reward.allow_unsandboxed": True,
    "reward.run_seconds": 7.5,
    "reward.format_bonus": 0.25,
    "reward.length_penalty": 6.5,
    "reward.overlong_buffer": 8,
    "reward.overlong_factor": 2.5,
    "reward.flip": 0.45,
    "reward.workers": 10,
    "reward.timeout": 21.5,
    "method.advantage": "leave_one_out",
    "method.credit": "delta",
    "method.gate": "sequence_clip",
    "method.aggregation": "constant",
    "method.eps_low": 0.15,
    "method.eps_high": 0.33,
    "method.dual_clip": 7.0,
    "method.tau_positive": 1.2,
    "method.tau_negative": 1.3,
    "method.bound": 4.5,
    "method.bound_low": 0.05,
    "method.entropy_mean": "all",
    "method.entropy_share": 0.27,
    "method.future_half_life": 23.0,
    "method.future_high": 1.45,
    "method.future_ratio": 12.5,
    "method.covariance": "clip",
    "method.covariance_share": 0.013,
    "method.covariance_low": 0.11,
    "method.covariance_high": 5.5,
    "method.covariance_kl": 1.1,
    "delta.proxy": "hidden_topk",
    "delta.topk": 18,
    "delta.scope": "group",
    "delta.refinements": 16,
    "delta.lambda_min": 0.6,
    "delta.lambda_max": 1.4,
    "delta.temperature": 0.31,
    "delta.score": "hard",
    "delta.contrast": "within",
    "delta.weighting": "top",
    "delta.share": 0.62,
    "delta.normalise": "count",
    "delta.centroid": "median",
    "delta.one_sided": "zero",
    "correction.weight": "geometric",
    "correction.bound": "mask",
    "correction.low": 0.001953125,
    "correction.high": 1.7,
    "correction.reject": "seq_sum_k1",
    "correction.reject_low": 1e-5,
    "correction.reject_high": 1e5,
    "correction.bypass": True,
    "update.learning_rate": 0.002,
    "update.schedule": "linear",
    "update.warmup": 2,
    "update.mini_batches": 3,
    "update.epochs": 12,
    "update.beta1": 0.85,
    "update.beta2": 0.97,
    "update.epsilon": 1e-7,
    "update.weight_decay": 0.03,
    "update.max_grad_norm": 0.9,
    "update.moments": "int8",
    "update.offload": True,
    "update.kl_coefficient": 0.04,
    "update.kl_estimator": "low_var_kl",
    "update.entropy_coefficient": 0.021,
    "update.micro_batch_tokens": 701,
    "update.head_chunk_tokens": 77,
    "update.feature_bytes": 10_001,
    "update.feature_host_bytes": 20_002,
    "parallel.sharding": "optimizer",
    "evaluation.at_start": False,
    "evaluation.problems": 11,
    "evaluation.samples": 15,
    "evaluation.temperature": 0.95,
    "evaluation.top_p": 0.99,
    "evaluation.top_k": 250,
    "evaluation.min_p": 0.001,
    "evaluation.max_tokens": 14,
}

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
    # engine.async_steps draws in tests/vllm/test_training.py
    *(f"engine.{name}" for name in Recipe.model_fields["engine"].default.model_dump()),
}


@pytest.fixture(scope="module")
def values(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The values of TOGETHER for a tiny model."""
    return TOGETHER | {"model.path": str(write_model(tmp_path_factory.mktemp("model")))}


@pytest.fixture(scope="module")
def seen(values: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """The run with all values of TOGETHER."""
    return run(tmp_path_factory.mktemp("run") / "run", values)


def small(values: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    """A short run on the same model with ``section__key`` changes."""
    keys = {
        "model.path": values["model.path"],
        "run.steps": 1,
        "data.limit": 40,
        "data.held_out": 0.2,
        "rollout.prompts": 4,
        "rollout.responses": 4,
        "rollout.max_tokens": 8,
        "evaluation.at_start": False,
        "evaluation.problems": 2,
    }
    return keys | {name.replace("__", "."): value for name, value in changes.items()}


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


# ------------------------------------------------------------------------------- runs of their own


def test_a_custom_reward_on_a_data_file(values: dict[str, Any], tmp_path: Path) -> None:
    """The file, its function, the data's file, and which prompts are too long."""
    data, reward = tmp_path / "data.jsonl", tmp_path / "mine.py"
    rows = [{"question": "x" * length, "answer": "1"} for length in range(1, 31)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    reward.write_text("def own(response, problem):\n    return 0.5\n\ndef reward(response, problem):\n    return 0.0\n")
    own = {
        "data.source": str(data),
        "data.template": "{question}",
        "reward.kind": "custom",
        "reward.code": "share",
        "reward.custom_file": str(reward),
        "reward.custom_function": "own",
        "rollout.max_prompt_tokens": 20,
        "data.held_out": 0.1,
    }
    found = run(tmp_path / "run", small(values) | own)
    spec = one(found.rewards)
    assert (spec.kind, spec.code, spec.custom_file, spec.custom_function) == ("custom", "share", str(reward), "own")
    rows = list(read_lines(found.folder.rollout_file(1)))
    assert {row["reward"] for row in rows} == {0.5}
    assert any("20 problems of 30 rows; left out: 10 with too long a prompt" in text for text in found.notices)


@pytest.mark.parametrize(("dynamic", "draws"), [(True, 6), (False, 1)])
def test_a_batch_without_contrast_is_drawn_as_often_as_allowed(
    dynamic: bool, draws: int, values: dict[str, Any], tmp_path: Path
) -> None:
    found = run(tmp_path / "run", small(values, rollout__dynamic_sampling=dynamic, rollout__dynamic_sampling_limit=6))
    assert len(found.samplings("rollout")) == draws


def test_the_preset_and_truncated_responses(values: dict[str, Any], tmp_path: Path) -> None:
    found = run(
        tmp_path / "run",
        small(
            values,
            method__preset="rloo",
            correction__preset="sequence_mask",
            update__drop_truncated=True,
            reward__length_penalty=1.0,
        ),
    )
    assert found.the(Surrogate, "method") == PRESETS["rloo"]
    assert found.the(MiniBatch, "correction") == CORRECTIONS["sequence_mask"]
    assert all(each.kept is not None for each in found.made[MiniBatch])
    found = run(tmp_path / "other", small(values, reward__length_penalty=1.0))
    assert found.the(Surrogate, "method") == PRESETS["delta"]
    assert all(each.kept is None for each in found.made[MiniBatch])


def test_when_a_run_evaluates_saves_and_records(values: dict[str, Any], tmp_path: Path) -> None:
    keys = {"evaluation.every": 4, "checkpoint.every": 3, "checkpoint.keep": 5, "checkpoint.rollouts_every": 2}
    found = run(tmp_path / "run", small(values, run__steps=7) | keys)
    assert [record["step"] for record in read_lines(found.folder.evaluations)] == [4, 7]
    assert sorted(path.name for path in found.folder.checkpoints.iterdir()) == [f"step-00000{n}" for n in (3, 6, 7)]
    assert sorted(path.name[5:11] for path in found.folder.rollouts.iterdir()) == ["000002", "000004", "000006"]
    (tmp_path / "run").rename(tmp_path / "before")
    found = run(tmp_path / "run", small(values, run__steps=7) | keys | {"checkpoint.keep": 1})
    assert [path.name for path in found.folder.checkpoints.iterdir()] == ["step-000007"]


def test_a_run_that_never_evaluates_needs_nothing_held_out(values: dict[str, Any], tmp_path: Path) -> None:
    keys = {"evaluation.every": "never", "evaluation.at_start": True, "data.held_out": 0.0}
    found = run(tmp_path / "run", small(values, run__steps=2) | keys)
    assert not found.folder.evaluations.exists()
    assert [("eval_accuracy" in record) for record in found.records] == [False, False]
    with pytest.raises(UserError, match='"never" makes none'):
        load_recipe(None, ["evaluation.every=never", "checkpoint.keep_best=eval_accuracy"])


def test_the_system_message_and_thinking_reach_every_prompt() -> None:
    """In training and in evaluations; a template that has no place for them is refused."""
    path = model_path("tiny-base")
    template = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}{% if enable_thinking %}<t>{% endif %}"
    core = tokenizers.Tokenizer.from_file(f"{path}/tokenizer.json")
    configs = {name: {} for name in ("tokenizer_config.json", "config.json", "generation_config.json")}
    tokenizer = Tokenizer(core, configs, template).chatting("be brief", True)
    assert render("chat", "1+1?", tokenizer) == "system:be brief;user:1+1?;<t>"
    assert render("chat", "1+1?", tokenizer.chatting(None, False)) == "user:1+1?;"
    recipe = load_recipe(None, ["data.system=be brief", "data.template=chat"])
    settings = evaluation_settings(recipe)
    assert (settings.system, settings.thinking) == ("be brief", None)
    assert settings.identity() != evaluation_settings(load_recipe(None, ["data.template=chat"])).identity()
    assert load_tokenizer(recipe)._system == "be brief"
    with pytest.raises(UserError, match="has no switch enable_thinking"):
        load_tokenizer(load_recipe(None, ["data.thinking=true", "data.template=chat"]))
    with pytest.raises(UserError, match=r"the prompt template is paper; set data.template to chat or chat_boxed"):
        load_tokenizer(load_recipe(None, ["data.system=x", "data.template=paper"]))


def test_a_response_longer_than_the_model_reads_is_refused_before_the_start(
    values: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=r"rollout.max_tokens = 100000: the model reads \d+ tokens, .* at most \d+"):
        run(tmp_path / "run", small(values) | {"rollout.max_tokens": 100_000})


def test_the_metric_whose_best_checkpoint_is_kept(values: dict[str, Any], tmp_path: Path) -> None:
    """It keeps the best step by that metric, and no best step if no metric is named."""
    keys = small(values, run__steps=5, reward__length_penalty=10.0, checkpoint__every=50, checkpoint__keep=1)
    for metric in ("reward_mean", "accuracy"):
        found = run(tmp_path / metric, keys | {"checkpoint.keep_best": metric})
        state = json.loads((found.folder.checkpoints / "step-000005" / "state.json").read_text())
        best = [record[metric] for record in found.records]
        assert (state["best"], state["best_step"]) == (max(best), 1 + int(np.argmax(best)))


def test_the_suite_is_what_is_evaluated_on(values: dict[str, Any], tmp_path: Path) -> None:
    suite = tmp_path / "own.toml"
    limits = {"first": 2, "second": 5}
    parts = [f'[[benchmarks]]\nname = "{name}"\nsource = "arithmetic"\nlimit = {n}\n' for name, n in limits.items()]
    suite.write_text('name = "own"\n' + "".join(parts))
    found = run(tmp_path / "run", small(values, evaluation__suite=str(suite), evaluation__problems=3))
    assert [count for phase, count, _ in found.rollouts if phase == "evaluate"] == [2, 3], "the least of both limits"
    (record,) = read_lines(found.folder.evaluations)
    assert limits.keys() <= record.keys()


def test_as_many_processes_are_started(values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []
    monkeypatch.setattr("backends.launch.launch", lambda _, parallel, *__: started.append(parallel.processes) or 0)
    recipe = tmp_path / "recipe.toml"
    recipe.write_text("[parallel]\nprocesses = 3\n")
    for more, expected in (([], 3), (["--processes", "5"], 5)):
        result = CliRunner().invoke(app, ["train", str(recipe), "--run-dir", str(tmp_path / "run"), *more])
        assert (result.exit_code, started.pop()) == (0, expected)


def test_the_engines_settings(values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The settings of a vLLM sampler, up to the point at which it would start a server."""
    keys: dict[str, Any] = {
        "kind": "vllm",
        "launch": True,
        "python": "e-python",
        "arguments": ["--e-argument"],
        "memory": 0.37,
        "colocated": True,
        "concurrency": 53,
        "deadline": 91.5,
        "stall": 17.5,
        "tolerance": 0.043,
        "inbox": str(tmp_path / "e-inbox"),
    }
    made: list[tuple[Any, Any, Path]] = []

    def make(engine: Any, launcher: Any, *, inbox: Path, **given: Any) -> Any:
        made.append((engine, launcher, inbox))
        raise BackendError("far enough")

    monkeypatch.setattr("delta_cli.rollout.open_vllm.VllmSampler", make)
    monkeypatch.setattr("delta_cli.rollout.open_vllm.ServerLauncher.check", lambda launcher: None)
    for more in ({}, {"launch": False, "python": None, "arguments": [], "memory": None, "url": ["http://127.0.0.1"]}):
        changes = {f"engine__{name}": value for name, value in (keys | more).items() if value not in (None, [])}
        with pytest.raises(BackendError, match="far enough"):
            run(tmp_path / "run", small(values, **changes))
    network = {"url": ["http://127.0.0.1"], "kind": "vllm", "transfer": "nccl", "python": "e-python"}
    with pytest.raises(BackendError, match="far enough"):
        run(tmp_path / "run", small(values, **{f"engine__{name}": value for name, value in network.items()}))
    (engine, launcher, inbox), (other, nothing, _), (sent, *_) = made
    assert sent.transfer == "nccl"
    assert inbox == tmp_path / "e-inbox" / "model"
    assert launcher.engine is engine, "the section goes whole to whatever uses it"
    assert engine.model_dump(exclude={"url", "async_steps", "transfer"}) == keys | {"arguments": ("--e-argument",)}
    command = server_command("e-python", 1, launcher.served, engine, engine.memory, on_cpu=False)
    named = dict(pairwise(command))
    assert (named["--max-num-seqs"], named["--gpu-memory-utilization"]) == ("53", "0.37")
    assert "--enable-sleep-mode" in command
    assert command[-1] == "--e-argument"
    assert (other.url, nothing) == (("http://127.0.0.1",), None)


def test_the_tracker_and_its_project(values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[dict[str, Any]] = []
    package: Any = ModuleType("trackio")
    package.init = lambda **given: begun.append(given) or SimpleNamespace()
    monkeypatch.setitem(sys.modules, "trackio", package)
    keys = {"tracking.kind": "trackio", "tracking.project": "p-project"}
    with_tracking(Observer(), recipe_of(small(values) | keys), tmp_path).begin("title", 1, 0)
    assert [given["project"] for given in begun] == ["p-project"]
    assert with_tracking(observer := Observer(), recipe_of(small(values)), tmp_path) is observer


def test_adapters_to_start_from_and_four_bits_reach_the_backend() -> None:
    changes = ["model.lora={ rank = 3 }", "model.adapter=somebody/adapter", "model.load_in_4bit=true"]
    settings = backend_settings(load_recipe(None, changes))
    assert settings.model.load_in_4bit
    assert settings.model.adapter == "somebody/adapter"
    for alone in changes[1:]:
        with pytest.raises(UserError, match=r"is for runs that train adapters; add \[model.lora\]"):
            load_recipe(None, [alone])
