"""Gradients and updates are those of torch's autograd and AdamW in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from safetensors.numpy import load_file

from backends.interface import Floats, Ids, RolloutRequest, Sampling, Sequences, token_index
from backends.settings import Optimizer

from .conftest import OPTIMIZER, Make, Tolerance
from .objectives import Clipped, Linear, exported, largest_difference
from .oracle import Oracle
from .tiny_model import EOS

LEARNING_RATE = 0.002


@pytest.mark.parametrize("optimizer", [OPTIMIZER, OPTIMIZER.but(max_grad_norm=0.0)], ids=["clipped", "free"])
def test_two_updates(
    make: Make, either: Path, sequences: Sequences, optimizer: Optimizer, tolerance: Tolerance, tmp_path: Path
) -> None:
    """Loss, gradient norm and weights; the second update also uses the optimizer state of the first."""
    oracle = Oracle(either)
    surrogate = Clipped(sequences, oracle.distributions(sequences).logprobs.detach())
    loss, norm = oracle.update(sequences, surrogate.torch, optimizer, LEARNING_RATE, steps=2)
    backend = make(either, optimizer=optimizer)
    for _ in range(2):
        found_loss = backend.accumulate(sequences, surrogate)
        found_norm = backend.step(LEARNING_RATE)
    assert found_loss == pytest.approx(loss, abs=10 * tolerance.logprob)
    assert found_norm == pytest.approx(norm, rel=tolerance.gradient)
    found = exported(backend, tmp_path / "export")
    assert largest_difference(found, oracle.weights()) < tolerance.weight
    assert largest_difference(found, load_file(either / "model.safetensors")) > 1e-3


@pytest.mark.parametrize(
    "settings",
    [
        {"micro_batch_tokens": 1},
        {"micro_batch_tokens": 24},
        {"head_chunk_tokens": 3},
        {"gradient_checkpointing": True},
    ],
    ids=lambda settings: "-".join(map(str, *settings.items())),
)
def test_budgets_change_nothing(
    make: Make, sequences: Sequences, settings: dict[str, int], tolerance: Tolerance, tmp_path: Path
) -> None:
    whole, split = make(), make(**settings)
    surrogate = Clipped(sequences, whole.score(sequences).logprobs)
    results = []
    for name, backend in (("whole", whole), ("split", split)):
        surrogate.rows_seen.clear()
        loss, norm = backend.accumulate(sequences, surrogate), backend.step(LEARNING_RATE)
        assert sorted(set(surrogate.rows_seen) | {2}) == list(range(len(sequences))), "row 2 has no tokens"
        assert len(set(surrogate.rows_seen)) == len(surrogate.rows_seen)
        results.append((loss, norm, exported(backend, tmp_path / name)))
    (loss1, norm1, weights1), (loss2, norm2, weights2) = results
    assert loss1 == pytest.approx(loss2, abs=10 * tolerance.logprob)
    assert norm1 == pytest.approx(norm2, rel=tolerance.gradient)
    assert largest_difference(weights2, weights1) < tolerance.weight


def test_loss_falls_as_the_gradient_says(make: Make, sequences: Sequences, tmp_path: Path) -> None:
    """Central difference of the loss along ±g. Adam with a huge epsilon moves by −(rate/epsilon)·g, so
    the difference must be −2·(rate/epsilon)·‖g‖², with the norm that step() returns."""
    size, epsilon = 2e-5, 1e6
    backend = make(optimizer=OPTIMIZER.but(epsilon=epsilon, weight_decay=0.0, max_grad_norm=1e9))
    surrogate = Clipped(sequences, backend.score(sequences).logprobs, spread=0.05)  # no clipping
    backend.save(tmp_path)
    losses, norms = [], []
    for scale in (1.0, -1.0):
        backend.load(tmp_path)
        backend.accumulate(sequences, surrogate)
        norms.append(backend.step(size * epsilon, scale))
        losses.append(surrogate(backend.score(sequences).logprobs, np.arange(len(sequences)))[0])
    assert norms[0] == pytest.approx(norms[1], rel=1e-6)
    assert (losses[0] - losses[1]) / (-2 * size * norms[0] ** 2) == pytest.approx(1, abs=5e-3)


def test_ratio_is_one_on_the_first_update(make: Make, sequences: Sequences, tolerance: Tolerance) -> None:
    """The log-probabilities under training equal those of scoring."""
    backend = make(micro_batch_tokens=24)
    old = backend.score(sequences).logprobs
    surrogate = Clipped(sequences, old, spread=0.0)
    worst = 0.0

    def watch(logp: Floats, rows: Ids) -> tuple[float, Floats]:
        nonlocal worst
        worst = max(worst, float(np.abs(logp - old[token_index(sequences.starts, rows)]).max()))
        return surrogate(logp, rows)

    backend.accumulate(sequences, watch)
    assert worst < tolerance.logprob


def test_gradients_add_up(make: Make, sequences: Sequences, tolerance: Tolerance, tmp_path: Path) -> None:
    """Two calls of accumulate with half the responses each equal one call with all of them."""

    whole, halves = make(), make()
    factors = np.random.default_rng(2).standard_normal(len(sequences.tokens))
    whole.accumulate(sequences, Linear(sequences.starts, factors))
    for rows in (np.arange(3), np.arange(3, len(sequences))):
        half = sequences.select(rows)
        halves.accumulate(half, Linear(half.starts, factors[token_index(sequences.starts, rows)]))
    assert whole.step(LEARNING_RATE) == pytest.approx(halves.step(LEARNING_RATE), rel=tolerance.gradient)
    found, expected = exported(halves, tmp_path / "halves"), exported(whole, tmp_path / "whole")
    assert largest_difference(found, expected) < tolerance.weight


def test_scale_multiplies_the_gradient(make: Make, sequences: Sequences, tolerance: Tolerance, tmp_path: Path) -> None:
    optimizer = OPTIMIZER.model_copy(
        update={"epsilon": 1.0, "max_grad_norm": 1e3}
    )  # so that the size of a gradient matters
    scaled, halved = make(optimizer=optimizer), make(optimizer=optimizer)
    old = scaled.score(sequences).logprobs
    scaled.accumulate(sequences, Clipped(sequences, old))
    halved.accumulate(sequences, Clipped(sequences, old, factor=0.5))
    assert scaled.step(LEARNING_RATE, 0.5) == pytest.approx(halved.step(LEARNING_RATE), rel=tolerance.gradient)
    found, expected = exported(scaled, tmp_path / "scaled"), exported(halved, tmp_path / "halved")
    assert largest_difference(found, expected) < tolerance.weight


def test_a_gradient_that_is_not_finite_changes_nothing(make: Make, sequences: Sequences, tmp_path: Path) -> None:
    """Neither the weights nor the optimizer change, and the next update is not affected."""
    hit, spared = make(), make()
    surrogate = Clipped(sequences, hit.score(sequences).logprobs)
    before = exported(hit, tmp_path / "before")
    hit.accumulate(sequences, lambda logp, rows: (float("nan"), np.full_like(logp, np.nan)))
    assert not np.isfinite(hit.step(LEARNING_RATE))
    after = exported(hit, tmp_path / "after")
    for name, weight in before.items():
        np.testing.assert_array_equal(after[name], weight)
    for backend in (hit, spared):
        backend.accumulate(sequences, surrogate)
        backend.step(LEARNING_RATE)
    found, expected = exported(hit, tmp_path / "hit"), exported(spared, tmp_path / "spared")
    for name, weight in expected.items():
        np.testing.assert_array_equal(found[name], weight)


@pytest.mark.parametrize("moments", ["float32", "int8"])
def test_twenty_updates_teach_a_token(
    name: str, make: Make, moments: Literal["float32", "int8"], monkeypatch: pytest.MonkeyPatch
) -> None:
    """REINFORCE on sampled responses with reward 1 for each token 13: the whole loop on the simplest task."""
    if moments == "int8" and name in ("fake", "mlx"):
        pytest.skip(f"the {name} backend has no 8-bit moments; tests/conformance/test_state.py has it say so")
    monkeypatch.setattr("backends.torch.moments.SMALL", 1)  # so that the weights of this small model are quantised
    backend, wanted, prompt = make(optimizer=OPTIMIZER.but(moments=moments)), 13, np.array([5, 6])

    def frequency(seed: int) -> float:
        drawn = backend.rollout(
            RolloutRequest((prompt,), Sampling(max_tokens=4, stop_ids=(EOS,), samples=50, seed=seed))
        )
        return float(np.mean(drawn.tokens == wanted))

    before = frequency(1000)
    for seed in range(20):
        drawn = backend.rollout(
            RolloutRequest((prompt,), Sampling(max_tokens=4, stop_ids=(EOS,), samples=12, seed=seed))
        )
        sequences = Sequences((prompt,) * 12, drawn.tokens, drawn.starts)
        reward = (drawn.tokens == wanted).astype(float)
        backend.accumulate(sequences, Linear(drawn.starts, (reward - reward.mean()) / len(reward)))
        backend.step(0.05)
    assert before < 0.2
    assert frequency(1000) > 0.6
