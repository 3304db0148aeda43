"""Adapters start as the base model, act in every operation, and are saved and exported.

The fake backend refuses them: it trains all weights only.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from backends.interface import BackendError, Engine, RolloutRequest, Sampling, Sequences
from backends.settings import Lora

from .conftest import Make, Tolerance
from .objectives import Clipped, exported
from .oracle import Oracle
from .tiny_model import EOS

TARGETS = ("q_proj", "v_proj", "down_proj")


@pytest.fixture(params=[False, True], ids=["LoRA", "DoRA"])
def lora(request: pytest.FixtureRequest) -> Lora:
    """LoRA and DoRA."""
    return Lora(rank=3, scale=2.0, targets=TARGETS, layers=1, dora=request.param)


@pytest.fixture
def adapted(name: str, lora: Lora, make: Make) -> Make:
    """Make a backend with adapters."""
    if name == "fake":
        with pytest.raises(BackendError, match="LoRA"):
            make(lora=lora)
        pytest.skip("the fake backend trains whole models and refused, as it should")
    return lambda **settings: make(lora=lora, **settings)


def update(backend: Engine, sequences: Sequences) -> None:
    for _ in range(2):  # the first moves only B, which starts at zero; the second moves A as well
        backend.accumulate(sequences, Clipped(sequences, np.full(len(sequences.tokens), -3.0)))
        assert backend.step(0.02) > 0


def test_fresh_adapters_are_the_base_model(
    adapted: Make, lora: Lora, oracle: Oracle, sequences: Sequences, tolerance: Tolerance
) -> None:
    backend = adapted()
    last_layer = 3 * (16 + 32) + 3 * (16 + 16) + 3 * (24 + 16)  # rank · (inputs + outputs) of q, v and down
    assert backend.trainable == last_layer + lora.dora * (32 + 16 + 16)
    expected = oracle.distributions(sequences).logprobs.detach()
    np.testing.assert_allclose(backend.score(sequences).logprobs, expected, atol=tolerance.logprob, rtol=0)


def test_trained_adapters_reach_rollouts_and_exports(
    adapted: Make, folder: Path, sequences: Sequences, tolerance: Tolerance, tmp_path: Path
) -> None:
    """The engine samples from the trained policy, the reference is the base, and the export is merged."""
    backend = adapted(keep_reference=True)
    before = backend.score(sequences).logprobs
    update(backend, sequences)
    after = backend.score(sequences).logprobs
    assert np.abs(after - before).max() > 0.1
    np.testing.assert_allclose(backend.reference(sequences), before, atol=tolerance.logprob, rtol=0)
    moved = backend.hidden_residuals(sequences)
    assert moved.min() > 0.01
    np.testing.assert_array_equal(backend.score(sequences).logprobs, after)

    prompt = np.array([5, 6, 7])
    drawn = backend.rollout(RolloutRequest((prompt,), Sampling(max_tokens=6, stop_ids=(EOS,), samples=4)))
    scored = backend.score(Sequences((prompt,) * 4, drawn.tokens, drawn.starts)).logprobs
    np.testing.assert_allclose(drawn.logprobs, scored, atol=2 * tolerance.logprob, rtol=0)

    weights = exported(backend, tmp_path / "export")
    assert not [name for name in weights if "lora" in name]
    merged = Oracle(tmp_path / "export").distributions(sequences).logprobs.detach()
    np.testing.assert_allclose(after, merged, atol=2 * tolerance.logprob, rtol=0)


def test_saved_adapters_resume_bit_for_bit(adapted: Make, sequences: Sequences, tmp_path: Path) -> None:
    straight, fresh = adapted(), adapted(seed=1)
    update(straight, sequences)
    straight.save(tmp_path)
    fresh.load(tmp_path)
    for backend in (straight, fresh):
        update(backend, sequences)
    np.testing.assert_array_equal(fresh.score(sequences).logprobs, straight.score(sequences).logprobs)
