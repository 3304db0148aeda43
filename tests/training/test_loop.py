"""The training loop on the fake backend: it learns, is deterministic, and records what it does."""

from __future__ import annotations

from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from delta_cli.credit import PRESETS
from delta_cli.reporting.console import PlainObserver
from delta_cli.rollout.worker import RolloutWorker
from delta_cli.runs.folder import read_lines
from delta_cli.runs.metrics import AHEAD_METRICS, METRICS, OPTION_METRICS, RANK_METRICS, REWARD_METRICS
from tests.harness import Watcher, assert_same, contents, drawn, exported, lines, make_recipe, train


def test_it_learns(model: Path, tmp_path: Path) -> None:
    """At first responses reach the length limit; after twelve steps they have one or two tokens."""
    recipe = make_recipe(model, run__steps=12, update__mini_batches=1)
    heard = train(recipe, tmp_path)
    assert heard.records[0]["response_length_mean"] > 12
    assert heard.records[-1]["response_length_mean"] < 2
    assert heard.records[-1]["reward_mean"] > -0.02
    again = lines(tmp_path / "metrics.jsonl")
    assert [record["step"] for record in again] == list(range(1, 13))


def test_the_first_line_names_the_backend_and_its_threads(model: Path, tmp_path: Path) -> None:
    heard: list[tuple[Any, ...]] = []

    class Listener(Watcher):
        def begin(self, *given: Any) -> None:
            heard.append(given)

    before = torch.get_num_threads()
    train(make_recipe(model, run__steps=1, run__threads=2), tmp_path / "run", "cpu", observer=Listener())
    torch.set_num_threads(before)
    assert heard == [(str(tmp_path / "run"), 1, 0, "cpu, 2 threads")]
    PlainObserver(file := StringIO()).begin(*heard[0])
    assert file.getvalue() == f"{tmp_path / 'run'}: 1 step on cpu, 2 threads\n"


def test_a_seed_determines_the_run(model: Path, tmp_path: Path) -> None:
    first, second, other = tmp_path / "first", tmp_path / "second", tmp_path / "other"
    train(make_recipe(model, run__steps=2), first)
    train(make_recipe(model, run__steps=2), second)
    train(make_recipe(model, run__steps=2, run__seed=1), other)
    assert_same(first, second)
    assert contents(first)["step-000001.jsonl.gz"] != contents(other)["step-000001.jsonl.gz"]


def test_every_metric_is_documented_and_every_documented_one_is_written(model: Path, tmp_path: Path) -> None:
    train(make_recipe(model, run__steps=2, update__kl_coefficient=0.1), tmp_path)
    records = list(read_lines(tmp_path / "metrics.jsonl"))
    elsewhere = set(RANK_METRICS) | set(AHEAD_METRICS) | set(OPTION_METRICS) | set(REWARD_METRICS)
    assert set().union(*records) == set(METRICS) - elsewhere
    assert set(METRICS) - set(records[0]) == {"eval_accuracy"} | elsewhere


def test_each_problem_comes_once_an_epoch(model: Path, tmp_path: Path) -> None:
    """36 problems, 9 steps of 4."""
    train(make_recipe(model, run__steps=18, rollout__max_tokens=2, evaluation__every=0), tmp_path)
    steps = drawn(tmp_path)
    for epoch in (steps[:9], steps[9:]):
        ids = [problem for step in epoch for problem in step]
        assert len(ids) == len(set(ids)) == 36
    assert steps[:9] != steps[9:]


# ------------------------------------------------------------------------- batches without contrast


def test_equal_rewards_change_no_weight_and_say_why(model: Path, tmp_path: Path) -> None:
    """A random model solves nothing, so every reward is 0. Not even weight decay moves the weights."""
    from safetensors.numpy import load_file

    heard = train(make_recipe(model, run__steps=2, reward__length_penalty=0.0), tmp_path)
    start = load_file(model / "model.safetensors")
    for name, weight in exported(tmp_path).items():
        np.testing.assert_array_equal(weight, start[name], err_msg=name)
    assert [record["updates"] for record in heard.records] == [0, 0]
    assert [record["updates_skipped"] for record in heard.records] == [2, 2]
    (notice,) = [notice for notice in heard.notices if notice.name == "groups_equal"]
    assert "left the weights unchanged" in notice.text
    assert notice.text in [record["text"] for record in read_lines(tmp_path / "notices.jsonl")]


# --------------------------------------------------------------------------------------- the method


@pytest.mark.parametrize("preset", PRESETS)
def test_each_preset_runs_a_step(preset: str, model: Path, tmp_path: Path) -> None:
    changes = {"method__preset": preset, "rollout__responses": 32, "evaluation__at_start": False}
    heard = train(make_recipe(model, run__steps=1, **changes), tmp_path)
    record = heard.records[0]
    assert record["updates"] == 2
    assert record["grad_norm"] > 0
    assert record["probe_logprob_change"] > 0
    assert record["ratio_gap_first"] < 1e-6
    assert heard.named <= {"entropy_collapse"}


def step_weights(model: Path, folder: Path, **changes: Any) -> dict[str, np.ndarray]:
    train(make_recipe(model, run__steps=1, evaluation__at_start=False, **changes), folder)
    return exported(folder)


def differ(first: dict[str, np.ndarray], second: dict[str, np.ndarray]) -> bool:
    return any(not np.array_equal(first[name], second[name]) for name in first)


def test_equal_coefficients_are_dapo_bit_for_bit(model: Path, tmp_path: Path) -> None:
    flat = step_weights(model, tmp_path / "flat", delta__lambda_min=1.0, delta__lambda_max=1.0)
    dapo = step_weights(model, tmp_path / "dapo", method__preset="dapo")
    delta = step_weights(model, tmp_path / "delta")
    assert not differ(flat, dapo)
    assert differ(delta, dapo)


def test_coefficients_reach_the_update_and_the_record(model: Path, tmp_path: Path) -> None:
    """Their mean over the batch is 1, they differ, and they are recorded with their tokens."""
    train(make_recipe(model, run__steps=1), tmp_path)
    (record,) = read_lines(tmp_path / "metrics.jsonl")
    responses = list(read_lines(tmp_path / "rollouts" / "step-000001.jsonl.gz"))
    weights = np.concatenate([response["coefficients"] for response in responses])
    assert len(weights) == record["tokens"]
    assert weights.mean() == pytest.approx(1.0, abs=1e-6)  # the record has six decimals
    assert record["coefficient_mean"] == pytest.approx(1.0, abs=1e-12)
    assert record["coefficient_std"] == pytest.approx(weights.std(), abs=1e-5)
    assert record["coefficient_std"] > 0.01
    advantages = [response["advantage"] for response in responses]
    positive = np.concatenate([r["coefficients"] for r, a in zip(responses, advantages, strict=True) if a > 0])
    assert record["coefficient_positive"] == pytest.approx(positive.mean(), abs=1e-5)


def test_scope_group_contrasts_inside_each_prompt(model: Path, tmp_path: Path) -> None:
    """The two scopes are the same if the batch has one prompt, and differ if it has several."""
    one = {"rollout__prompts": 1, "update__mini_batches": 1, "rollout__responses": 16}
    assert not differ(
        step_weights(model, tmp_path / "a", **one), step_weights(model, tmp_path / "b", delta__scope="group", **one)
    )
    assert differ(step_weights(model, tmp_path / "c"), step_weights(model, tmp_path / "d", delta__scope="group"))


def test_the_kl_term_pulls_back_to_the_reference(model: Path, tmp_path: Path) -> None:
    """The KL divergence starts at zero, becomes positive, and is smaller under a larger coefficient."""
    common = {"run__steps": 4, "update__mini_batches": 1, "evaluation__at_start": False}
    free = train(make_recipe(model, update__kl_coefficient=1e-9, **common), tmp_path / "free").records
    held = train(make_recipe(model, update__kl_coefficient=10.0, **common), tmp_path / "held").records
    assert abs(free[0]["kl_reference"]) < 1e-9
    assert free[-1]["kl_reference"] > 0.1
    assert held[-1]["kl_reference"] < 0.5 * free[-1]["kl_reference"]


def test_a_kl_term_moves_the_weights_of_a_batch_without_contrast(model: Path, tmp_path: Path) -> None:
    """So the groups_equal tripwire must not say that the weights stayed the same."""
    recipe = make_recipe(model, run__steps=1, reward__length_penalty=0.0, update__kl_coefficient=1.0)
    heard = train(recipe, tmp_path)
    assert heard.records[0]["updates"] == 2
    assert "groups_equal" not in heard.named


def test_the_correction_weighs_by_the_engine_mismatch(model: Path, tmp_path: Path) -> None:
    """The engine and the trainer agree here, so a cap above 1 changes nothing; one below 1 scales the loss."""
    clip_off = {"update__max_grad_norm": 1e9}
    plain = train(make_recipe(model, run__steps=1, **clip_off), tmp_path / "a").records[0]
    capped = train(
        make_recipe(model, run__steps=1, correction__preset="decoupled_token_is", **clip_off), tmp_path / "b"
    ).records[0]
    halved = train(
        make_recipe(model, run__steps=1, correction__preset="decoupled_token_is", correction__high=0.5, **clip_off),
        tmp_path / "c",
    ).records[0]
    assert capped["grad_norm"] == pytest.approx(plain["grad_norm"], rel=1e-5)
    assert halved["grad_norm"] < 0.9 * plain["grad_norm"]


def test_truncated_responses_leave_loss_and_denominator(model: Path, tmp_path: Path) -> None:
    """If every response is truncated there is nothing to learn from; otherwise the others decide."""
    everything = make_recipe(model, run__steps=1, rollout__max_tokens=1, update__drop_truncated=True, reward__flip=0.5)
    record = train(everything, tmp_path / "a").records[0]
    assert record["truncated"] > 0.9
    some = make_recipe(model, run__steps=1, update__drop_truncated=True)
    dropped = train(some, tmp_path / "b").records[0]
    kept = train(make_recipe(model, run__steps=1), tmp_path / "c").records[0]
    assert 0 < dropped["truncated"] < 1
    assert dropped["grad_norm"] != kept["grad_norm"]


def test_flipped_rewards(model: Path, tmp_path: Path) -> None:
    """About the requested share is flipped, and ``correct`` stays the verifier's verdict."""
    recipe = make_recipe(model, run__steps=1, reward__length_penalty=0.0, reward__flip=0.25, rollout__responses=64)
    train(recipe, tmp_path)
    responses = list(read_lines(tmp_path / "rollouts" / "step-000001.jsonl.gz"))
    flipped = [response["reward"] != response["correct"] for response in responses]
    assert 0.17 < np.mean(flipped) < 0.33  # 256 responses: three standard deviations are 0.08
    assert not any(response["correct"] for response in responses)


def test_epochs_and_mini_batches_are_updates(model: Path, tmp_path: Path) -> None:
    changes = {"update__epochs": 3, "update__mini_batches": 4, "update__learning_rate": 0.01}
    recipe = make_recipe(model, run__steps=1, rollout__responses=48, **changes)
    record = train(recipe, tmp_path).records[0]
    assert record["updates"] == 12
    assert record["ratio_gap_first"] < 1e-6 < record["ratio_gap"]


def test_a_warm_up_and_a_schedule_reach_the_optimizer(model: Path, tmp_path: Path) -> None:
    recipe = make_recipe(model, run__steps=4, update__warmup=2, update__schedule="linear", rollout__max_tokens=4)
    rates = [record["learning_rate"] for record in train(recipe, tmp_path).records]
    assert rates == pytest.approx([0.05, 0.1, 0.1, 0.05])


# ------------------------------------------------------------------------------- dynamic sampling

RARE = {"rollout__dynamic_sampling": True, "rollout__max_tokens": 8, "evaluation__at_start": False}


def test_dynamic_sampling_draws_until_the_batch_is_full(model: Path, tmp_path: Path) -> None:
    """Of eight responses with at most eight tokens few end early, so most groups have zero variance."""
    recipe = make_recipe(model, run__steps=1, rollout__dynamic_sampling_limit=100, **RARE)
    record = train(recipe, tmp_path).records[0]
    assert record["prompts_drawn"] > 4
    assert record["batch_filled"] == 1
    assert record["zero_variance_groups"] == 0
    assert len(drawn(tmp_path)[0]) == 4


def test_dynamic_sampling_gives_up_at_its_limit(model: Path, tmp_path: Path) -> None:
    recipe = make_recipe(model, run__steps=2, rollout__dynamic_sampling_limit=3, **RARE)
    heard = train(recipe, tmp_path)
    assert [record["prompts_drawn"] for record in heard.records] == [12, 12]
    assert heard.records[0]["batch_filled"] < 1
    assert "batch_not_filled" in heard.named


def test_dynamic_sampling_continues_after_the_last_problem_drawn(model: Path, tmp_path: Path) -> None:
    """No problem is drawn twice in an epoch: 36 problems, three draws a step, three steps an epoch."""
    seen: list[str] = []

    def listen(trainer: Any) -> None:
        worker, sample = trainer.worker, RolloutWorker.sample

        def listening(problems: Any, sampling: Any, *rest: Any, **named: Any) -> Any:
            if sampling.samples == recipe.rollout.responses:  # evaluations draw fewer problems
                seen.extend(problem.id for problem in problems)
            return sample(worker, problems, sampling, *rest, **named)

        object.__setattr__(worker, "sample", listening)

    recipe = make_recipe(model, run__steps=3, rollout__dynamic_sampling_limit=3, reward__length_penalty=0.0, **RARE)
    train(recipe, tmp_path, prepare=listen)
    assert len(seen) == len(set(seen)) == 36
