"""Responses that teach nothing cost nothing, and leaving them out changes nothing.

The oracle is the same algorithm, made to process every response.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from backends.interface import Engine, Objective, Proxy, Sequences, starts_of
from backends.registry import create
from delta_cli.credit import PRESETS, Surrogate
from delta_cli.data.problem import Problem
from delta_cli.recipe import load_recipe
from delta_cli.recipe.backend_settings import backend_settings
from delta_cli.rewards.grader import Verdict
from delta_cli.rollout.batch import RolloutBatch
from delta_cli.training.update import Updater

OPTIONS: dict[str, dict[str, Any]] = {
    "group": {"delta.scope": "group"},
    "median": {"delta.centroid": "median"},
    "within": {"delta.contrast": "within"},
    "shards": {"delta.shards": 2},
    "top": {"delta.weighting": "top"},
    "random": {"delta.score": "random"},
    "exact": {"delta.proxy": "hidden_exact"},
    "kl": {"update.kl_coefficient": 0.1},
    "drop": {"update.drop_truncated": True},
    "weight": {"correction.preset": "decoupled_token_is"},
    "reject": {"correction.reject": "token_k1", "correction.reject_low": 1e-9, "correction.reject_high": 200.0},
    "entropy": {"update.entropy_coefficient": 0.1},
    "epochs": {"update.epochs": 2},
    "micro_batch_mean": {"method.aggregation": "micro_batch_mean"},
    "no-features": {"update.feature_bytes": 100, "update.feature_host_bytes": 200},
}
CASES: dict[str, dict[str, Any]] = {name: {"method.preset": name} for name in PRESETS} | OPTIONS
ALL = {"kl", "entropy", "micro_batch_mean"}  # these need every response
SCORED = ALL | {"dapo_ft", "clip_cov", "kl_cov", "reject"}


PROMPTS = (9, 1, 5, 2)
LENGTHS = (14, 9, 0, 11, 6, 2, 1, 3, 3, 5, 1, 2, 2, 1, 4, 1)
REWARDS = (1, 0, 0, 1, 1, 1, 1, 1, 0, 0.5, 1, 0.5, 0, 0, 1, 0)
IDLE = {4, 5, 6, 7, 9, 11}  # rows with advantage 0: a zero-variance group, and two with their group's mean reward


def unmixed() -> RolloutBatch:
    """Sixteen responses of random tokens to four prompts; two are truncated."""
    rng = np.random.default_rng(2)
    prompts = [rng.integers(1, 258, size=length) for length in PROMPTS]
    tokens = rng.integers(0, 258, size=sum(LENGTHS))
    return RolloutBatch(
        problems=tuple(Problem(str(group), "", "") for group in range(len(PROMPTS))),
        sequences=Sequences(tuple(p for p in prompts for _ in range(4)), tokens, starts_of(LENGTHS), 0.7),
        texts=("",) * len(LENGTHS),
        verdicts=tuple(Verdict(float(reward), reward == 1, None) for reward in REWARDS),
        truncated=np.arange(len(LENGTHS)) % 7 == 3,
        engine_logprobs=rng.normal(-3, 0.3, size=len(tokens)).astype(np.float32),
    )


class Seen:
    """How many tokens were scored and updated on."""

    def __init__(self, engine: Engine, patch: pytest.MonkeyPatch) -> None:
        self.scored: list[int] = []
        self.updated: list[int] = []
        score, accumulate = engine.score, engine.accumulate

        def scoring(sequences: Sequences, proxy: Proxy | None = None) -> Any:
            self.scored.append(len(sequences.tokens))
            return score(sequences, proxy)

        def accumulating(sequences: Sequences, objective: Objective) -> float:
            self.updated.append(len(sequences.tokens))
            return accumulate(sequences, objective)

        patch.setattr(engine, "score", scoring)
        patch.setattr(engine, "accumulate", accumulating)


def updates(
    keys: dict[str, Any], model: Path, backend: str, out: Path, *, dense: bool, batch: RolloutBatch | None = None
) -> dict[str, Any]:
    """Two steps on a batch; ``dense`` processes every response."""
    base = {
        "model.path": str(model),
        "rollout.prompts": 4,
        "rollout.responses": 4,
        "rollout.temperature": 0.7,
        "rollout.max_tokens": 16,
        "update.mini_batches": 2,
        "update.learning_rate": 0.02,
        "update.epsilon": 0.01,  # smooth Adam: a tiny epsilon turns a rounding error into a whole step
        "update.micro_batch_tokens": 24,
    }
    recipe = load_recipe(None, [f"{name}={json.dumps(value)}" for name, value in (base | keys).items()])
    batch = batch or unmixed()
    found: dict[str, Any] = {"records": []}
    with pytest.MonkeyPatch.context() as patch:
        if dense:
            patch.setattr(Updater, "_reads_all_responses", True)
            patch.setattr(Surrogate, "learned_from", property(lambda self: np.ones(len(self.batch.advantages), bool)))
        engine = create(backend, backend_settings(recipe))
        seen, updater = Seen(engine, patch), Updater(recipe, engine)
        for step in range(2):
            scored = updater.score(batch)
            coefficients = updater.credit(scored, step)
            found["weights"] = coefficients.weights
            found["records"].append(updater.update(scored, coefficients, step).record())
        engine.export(out)
        engine.close()
    return found | {"scored": seen.scored, "updated": seen.updated, "model": load_file(out / "model.safetensors")}


def compare(one: dict[str, Any], other: dict[str, Any], near: float) -> None:
    np.testing.assert_allclose(one["weights"], other["weights"], atol=near, rtol=0)
    for mine, theirs in zip(one["records"], other["records"], strict=True):
        for key in ("loss", "grad_norm", "updates", "kl_reference"):
            assert mine[key] == pytest.approx(theirs[key], rel=near, abs=near), key
    for name, weight in one["model"].items():
        np.testing.assert_allclose(weight, other["model"][name], atol=near, rtol=0, err_msg=name)


@pytest.mark.parametrize("name", CASES)
def test_nothing_changes(name: str, model: Path, tmp_path: Path) -> None:
    """Coefficients, losses, norms and the weights after four updates agree in float64."""
    dense, sparse = (updates(CASES[name], model, "fake", tmp_path / str(d), dense=d) for d in (True, False))
    compare(sparse, dense, 1e-7)  # exports are float32; the computation agrees to 1e-12
    batch = unmixed()
    idle = int(batch.sequences.lengths[sorted(IDLE)].sum())
    whole = len(batch.sequences.tokens)
    assert dense["scored"][0] == whole
    assert sparse["scored"][0] == whole - (0 if name in SCORED else idle)
    if name not in ALL | {"drop", "dapo_ft", "top", "clip_cov", "reject"}:  # these leave out more
        epochs = 2 if name == "epochs" else 1
        assert sum(sparse["updated"]) == 2 * epochs * (whole - idle)


@pytest.mark.parametrize("backend", ["cpu", "mlx"])
@pytest.mark.parametrize(
    "name",
    [
        "delta",
        pytest.param("fipo", marks=pytest.mark.long),
        "exact",
        pytest.param("no-features", marks=pytest.mark.long),
    ],
)
def test_nothing_changes_in_float32(name: str, backend: str, model: Path, tmp_path: Path) -> None:
    if backend == "mlx":
        pytest.importorskip("mlx.core")
    dense, sparse = (updates(CASES[name], model, backend, tmp_path / str(d), dense=d) for d in (True, False))
    compare(sparse, dense, 2e-6)
    assert sparse["scored"][0] < dense["scored"][0]


def test_the_same_micro_batches_give_the_same_bits(model: Path, tmp_path: Path) -> None:
    """If every response has a micro-batch of its own, leaving some out changes no other micro-batch."""
    keys = {"update.micro_batch_tokens": 1}
    dense, sparse = (updates(keys, model, "cpu", tmp_path / str(d), dense=d) for d in (True, False))
    assert dense["records"][0]["loss"] == sparse["records"][0]["loss"]
    assert dense["records"][0]["grad_norm"] == sparse["records"][0]["grad_norm"]
    np.testing.assert_allclose(sparse["weights"], dense["weights"], atol=1e-12, rtol=0)
    for name, weight in dense["model"].items():
        assert weight.tobytes() == sparse["model"][name].tobytes(), name


def test_a_batch_that_teaches_nothing_needs_no_forward_pass(model: Path, tmp_path: Path) -> None:
    batch = unmixed()
    same = tuple(replace(verdict, reward=1.0) for verdict in batch.verdicts)
    found = updates({}, model, "fake", tmp_path, dense=False, batch=replace(batch, verdicts=same))
    assert (sum(found["scored"]), found["updated"]) == (0, [])
    assert [record["updates_skipped"] for record in found["records"]] == [2, 2]


def test_tokens_that_were_not_scored_keep_the_engines_numbers(model: Path) -> None:
    recipe = load_recipe(None, [f'model.path="{model}"'])
    engine = create("fake", backend_settings(recipe))
    known = engine.score(unmixed().sequences)
    marked: Callable[[float], Any] = lambda value: np.full(len(known.logprobs), value, np.float32)  # noqa: E731
    for entropies, expected in ((marked(0.25), 0.25), (None, 3.0)):
        batch = replace(unmixed(), engine_logprobs=marked(-3.0), engine_entropies=entropies)
        found = Updater(recipe, engine).score(batch)
        idle = ~found.scored
        rows = np.repeat(np.arange(16), batch.sequences.lengths)
        assert set(rows[idle].tolist()) == {row for row in IDLE if batch.sequences.lengths[row]}
        assert (found.old_logprobs[idle] == -3).all()
        assert (found.entropies[idle] == expected).all()
        np.testing.assert_allclose(found.old_logprobs[~idle], known.logprobs[~idle], atol=1e-6)
        np.testing.assert_allclose(found.entropies[~idle], known.entropies[~idle], atol=1e-6)
    engine.close()


@pytest.mark.parametrize("name", ["delta", "fipo", "gspo", "micro_batch_mean"])
def test_chunks_of_the_head_change_nothing(name: str, model: Path, tmp_path: Path) -> None:
    """Chunks hold one long response or several short ones, unless the loss needs all responses at once."""
    keys = CASES[name] | {"update.micro_batch_tokens": 40}
    small, large = (
        updates(keys | {"update.head_chunk_tokens": chunk}, model, "cpu", tmp_path / str(chunk), dense=False)
        for chunk in (6, 512)
    )
    compare(small, large, 2e-6)
