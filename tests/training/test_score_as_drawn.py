"""update.old_logprobs = "rollout" saves the forward pass between rollout and update and gives the same run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backends.interface import Proxy, Sequences
from delta_cli.credit import token_coefficients
from delta_cli.errors import UserError
from delta_cli.rollout.batch import RolloutBatch, join
from delta_cli.rollout.collect import sample_batch
from delta_cli.runs.folder import read_lines
from delta_cli.seeds import derive
from delta_cli.training.trainer import Trainer
from tests.harness import exported, make_recipe, train


def scored_tokens(trainer: Trainer) -> list[int]:
    """A list that grows by the number of tokens of every scoring pass."""
    seen: list[int] = []
    score = trainer.learner.score

    def scoring(sequences: Sequences, proxy: Proxy | None = None) -> Any:
        seen.append(len(sequences.tokens))
        return score(sequences, proxy)

    trainer.learner.score = scoring  # type: ignore[method-assign]
    return seen


OPTIONS: dict[str, dict[str, Any]] = {
    "delta": {},
    "group": {"delta__scope": "group"},
    "exact": {"delta__proxy": "hidden_exact"},
    "dynamic": {"rollout__dynamic_sampling": True},
    "dapo": {"method__preset": "dapo"},
    "dapo_ft": {"method__preset": "dapo_ft"},
    "kl": {"update__kl_coefficient": 0.1},
    "lora": {"model__lora__rank": 2},
}
SMOOTH = {"update__learning_rate": 0.02, "update__epsilon": 0.01, "run__steps": 3, "rollout__temperature": 0.8}


RUNS = [
    *((name, "fake") for name in OPTIONS if name != "lora"),  # it has no adapters
    # With dapo_ft a rounding may decide which of two tokens of like entropy is the last one kept.
    *((name, "cpu") for name in OPTIONS if name != "dapo_ft"),
    *((name, "mlx") for name in ("delta", "exact", "lora")),  # no other option reaches MLX
]
SHORT = {("delta", "fake"), ("delta", "cpu"), ("lora", "mlx")}  # those of `make test`


@pytest.mark.parametrize(
    ("name", "backend"), [pytest.param(*run, marks=() if run in SHORT else pytest.mark.long) for run in RUNS]
)
def test_the_run_is_the_same(name: str, backend: str, model: Path, tmp_path: Path) -> None:
    """Coefficients agree to 1e-5 in float32, and so do the weights after six updates."""
    if backend == "mlx":
        pytest.importorskip("mlx.core")
    forwards: dict[str, list[int]] = {}
    for score in ("recompute", "rollout"):
        recipe = make_recipe(model, update__old_logprobs=score, **SMOOTH, **OPTIONS[name])

        def watch(trainer: Trainer, score: str = score) -> None:
            forwards[score] = scored_tokens(trainer)

        train(recipe, tmp_path / score, backend, prepare=watch)
    assert sum(forwards["rollout"]) < 0.2 * sum(forwards["recompute"]), "of a probe only"
    for step in range(1, 4):
        pairs = zip(
            *(read_lines(tmp_path / s / "rollouts" / f"step-{step:06}.jsonl.gz") for s in forwards), strict=True
        )
        for fresh, drawn in pairs:
            assert fresh["tokens"] == drawn["tokens"]
            for column, near in (("coefficients", 1e-5), ("logprobs", 2e-5), ("entropies", 2e-5)):
                np.testing.assert_allclose(drawn[column], fresh[column], atol=near, rtol=0, err_msg=column)
    fresh, drawn = (exported(tmp_path / score) for score in ("recompute", "rollout"))
    for weight, value in fresh.items():
        np.testing.assert_allclose(drawn[weight], value, atol=2e-5, rtol=0, err_msg=weight)
    for record in read_lines(tmp_path / "rollout" / "metrics.jsonl"):
        assert record["scored"] == 0
        assert record["engine_gap_mean"] is None
        assert record["ratio_gap_first"] is None or record["ratio_gap_first"] < 1e-4
    assert not (tmp_path / "rollout" / "notices.jsonl").exists() or not [
        line for line in read_lines(tmp_path / "rollout" / "notices.jsonl") if line["name"] == "ratio_not_one"
    ]


def test_without_memory_for_the_features_a_forward_pass_recomputes_them(model: Path, tmp_path: Path) -> None:
    small = {"update__feature_bytes": 0, "update__feature_host_bytes": 64}
    for score in ("recompute", "rollout"):
        train(make_recipe(model, update__old_logprobs=score, **SMOOTH, **small), tmp_path / score, "cpu")
    fresh, drawn = (exported(tmp_path / score) for score in ("recompute", "rollout"))
    for name, value in fresh.items():
        np.testing.assert_array_equal(drawn[name], value)
    assert all(record["scored"] > 0 for record in read_lines(tmp_path / "rollout" / "metrics.jsonl"))


@pytest.mark.parametrize("groups", [[0, 1, 2, 3, 4, 5], [1, 4], [0, 3, 5], []])
def test_features_follow_their_responses(groups: list[int], model: Path, tmp_path: Path) -> None:
    """After joining draws and choosing groups, the coefficients are those of the chosen batch's own features."""

    def check(trainer: Trainer) -> None:
        engine, updater = trainer.worker.sampler, trainer.updater
        batches: list[RolloutBatch] = []
        for attempt in range(2):
            seed = derive(0, 0, f"rollout {attempt}")
            problems = trainer.problems[3 * attempt : 3 * attempt + 3]
            batches.append(
                sample_batch(trainer.worker, problems, trainer.recipe.rollout, seed, proxy=updater.proxy).result()
            )
        chosen = join(batches).select(np.array(groups, np.int64))
        fresh = engine.score(chosen.sequences, updater.proxy).features  # type: ignore[attr-defined]
        advantages = np.random.default_rng(1).standard_normal(len(chosen.sequences))
        assert chosen.features is not None
        assert np.array_equal(chosen.features.rows, np.arange(len(chosen.sequences)))
        for scope in (None, chosen.groups):
            one, other = (
                token_coefficients(features, advantages, chosen.sequences.starts, groups=scope)
                for features in (chosen.features.features, fresh)
            )
            np.testing.assert_allclose(one.weights, other.weights, atol=1e-6)
            assert not groups or one.weights.std() > 0.01
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(make_recipe(model, update__old_logprobs="rollout"), tmp_path, prepare=check)


@pytest.mark.parametrize(
    ("keys", "drawn"),
    [
        ({}, True),
        ({"model__dtype": "bfloat16"}, False),
        ({"correction__preset": "sequence_mask"}, False),
        ({"engine__kind": "vllm", "engine__launch": True}, False),
        ({"model__dtype": "bfloat16", "update__old_logprobs": "rollout"}, True),
        ({"update__old_logprobs": "recompute"}, False),
    ],
)
def test_by_default_it_recomputes_if_the_engine_may_round_differently(
    keys: dict[str, Any], drawn: bool, model: Path
) -> None:
    assert make_recipe(model, **keys).scores_as_drawn == drawn


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({"engine__kind": "vllm", "engine__launch": True}, "engine.kind"),
        ({"correction__preset": "sequence_mask"}, "correction.preset"),
    ],
)
def test_incompatible_keys_are_refused(keys: dict[str, Any], text: str, model: Path) -> None:
    with pytest.raises(UserError, match=text) as error:
        make_recipe(model, update__old_logprobs="rollout", **keys)
    assert 'update.old_logprobs = "recompute"' in str(error.value)
