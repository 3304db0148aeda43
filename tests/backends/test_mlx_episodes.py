"""Episodes on the MLX engine: what is computed once stays, and memory that runs out loses no turn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("mlx.core", reason="MLX is not installed")

from backends.interface import Completions, Proxy, RolloutRequest, Sequences
from backends.mlx.backend import MlxEngine
from backends.mlx.rollout import MlxRollout
from delta_cli.assets.random_model import write_qwen3
from tests.backends.completions import assert_same
from tests.backends.mlx_engine import create
from tests.conformance.test_episodes import PROMPTS, SAMPLING, Script


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mlx") / "model"
    write_qwen3(folder, vocab_size=31, hidden=16, layers=2, head_dim=4, intermediate=24, scale=0.3)
    (folder / "tokenizer.json").write_text("{}")
    return folder


def drawn(engine: MlxEngine, script: Script) -> Completions:
    return engine.rollout(RolloutRequest(PROMPTS, SAMPLING, entropies=True, proxy=Proxy(), turns=script))


def test_nothing_of_earlier_turns_is_computed_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ids that are read at once: each prompt, and each answer, without their last."""
    read, waves = MlxRollout._read, list[int]()

    def counted(rollout: MlxRollout, wave: list[list[int]], caches: list[Any]) -> list[Any]:
        waves.extend(len(ids) for ids in wave)
        return read(rollout, wave, caches)

    engine = create(folder)  # which draws a little itself, to check the generator
    monkeypatch.setattr(MlxRollout, "_read", counted)
    found = drawn(engine, Script())
    assert found.regions is not None
    written = int((~found.regions.own).sum())
    assert written > 10
    assert sum(waves) == written + sum(map(len, PROMPTS))


@pytest.mark.parametrize("fails", [3, 8, 14])
def test_memory_that_runs_out(folder: Path, fails: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environments are not asked again: what was written stays, and so do its features."""
    engine, again = create(folder), create(folder)
    expected = drawn(engine, Script(delay=1))
    advance, calls = MlxRollout._advance, list[int]()

    def limited(rollout: MlxRollout) -> list[int]:
        calls.append(1)
        if len(calls) == fails:
            raise RuntimeError("[malloc_or_wait] Unable to allocate 42 bytes.")
        return advance(rollout)

    monkeypatch.setattr(MlxRollout, "_advance", limited)
    found = drawn(again, Script(delay=1))
    assert len(calls) > fails
    assert_same(found, expected)


@pytest.mark.parametrize(
    "room", [pytest.param(2, id="few at a time", marks=pytest.mark.long), pytest.param(64, id="all at once")]
)
def test_hybrids_keep_their_states_between_turns(room: int, tmp_path: Path) -> None:
    """Recurrent states and convolution tails go on after each answer: scoring computes the same from the start."""
    pytest.importorskip("torch", reason="transformers writes the model")
    from tests.backends.test_mlx_hybrid import hybrid

    hybrid(tmp_path)
    engine = create(tmp_path, rollout_batch=room)
    found = drawn(engine, Script(delay=1))
    assert found.regions is not None
    assert (~found.regions.own).sum() > 10
    prompts = tuple(prompt for prompt in PROMPTS for _ in range(SAMPLING.samples))
    sequences = Sequences(prompts, found.tokens, found.starts, SAMPLING.temperature, found.regions)
    np.testing.assert_allclose(found.logprobs, engine.score(sequences).logprobs, rtol=0, atol=2e-5)
