"""MLX's out-of-memory errors, injected into every method: it retries in smaller pieces, with the same result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("mlx.core", reason="MLX is not installed")

import mlx.core as mx
from mlx_lm.models.qwen3 import Qwen3Model

from backends import mlx as package
from backends.interface import BackendError, RolloutRequest, Sampling, Sequences
from backends.mlx.backend import MlxEngine
from backends.settings import BackendSettings
from delta_cli.assets.random_model import write_qwen3
from tests.conformance.objectives import Linear

VOCAB = 40
FAILED = "[METAL] Command buffer execution failed: "
KIND = "kIOGPUCommandBufferCallbackError"
FAILURES = [
    RuntimeError("[malloc_or_wait] Unable to allocate 42 bytes."),
    RuntimeError("[malloc] Unable to allocate 42 bytes."),
    RuntimeError("[metal::malloc] Unable to allocate 42 bytes."),
    RuntimeError(
        "[metal::malloc] Attempting to allocate 42 bytes which is greater than the maximum allowed buffer size"
    ),
    RuntimeError("[metal::malloc] Resource limit (499000) exceeded."),
    RuntimeError(f"{FAILED}Insufficient Memory (00000008:{KIND}OutOfMemory)"),
    RuntimeError(f"{FAILED}(00000008:{KIND}OutOfMemory)"),
    RuntimeError(
        f"{FAILED}Discarded (victim of GPU error/recovery) (00000005:{KIND}InnocentVictim) Insufficient Memory"
    ),
    RuntimeError(f"{FAILED}Impacting Interactivity (0000000e:{KIND}ImpactingInteractivity)"),
    RuntimeError(f"{FAILED}Caused GPU Timeout Error (00000002:{KIND}Timeout)"),
    MemoryError("std::bad_alloc"),
    MemoryError(),
]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> MlxEngine:
    folder = tmp_path_factory.mktemp("model")
    write_qwen3(folder, vocab_size=VOCAB, hidden=32, layers=1, head_dim=8, intermediate=32, scale=0.2)
    engine = package.create(BackendSettings.of(str(folder)), "mlx")
    assert isinstance(engine, MlxEngine)
    return engine


def batch() -> Sequences:
    rng = np.random.default_rng(0)
    prompts = tuple(rng.integers(1, VOCAB, 3) for _ in range(4))
    return Sequences(prompts, rng.integers(1, VOCAB, 28), np.arange(5) * 7)


def rollout(engine: MlxEngine) -> list[np.ndarray]:
    engine._rollout_batch = 8
    told: list[int] = []
    request = RolloutRequest(batch().prompts, Sampling(max_tokens=6, stop_ids=(0, 5, 9), samples=3, seed=2))
    drawn = engine.rollout(request, lambda row, tokens: told.append(row))
    assert sorted(told) == list(range(12)), "every response is handed over once"
    return [drawn.tokens, drawn.starts, drawn.truncated, drawn.logprobs]


def score(engine: MlxEngine) -> list[np.ndarray]:
    engine.recovery.tokens = 1000
    found = engine.score(batch())
    return [found.logprobs, found.entropies]


def update(engine: MlxEngine) -> list[np.ndarray]:
    engine.recovery.tokens = 1000
    engine.optimizer.gradient = {}
    engine.accumulate(batch(), Linear(batch().starts, np.linspace(-1, 1, 28)))
    return [np.array(part) for part in engine.optimizer.gradient.values()]


def failing_above(limit: int, error: BaseException, calls: list[int]) -> Callable[..., mx.array]:
    """The model, which has no room for more tokens than ``limit``; and for less at its fourth call."""
    forward = Qwen3Model.__call__

    def call(self: Any, ids: mx.array, *arguments: Any, **options: Any) -> mx.array:
        calls.append(ids.size)
        if ids.size > (limit if len(calls) != 4 else 1):
            raise error
        return forward(self, ids, *arguments, **options)

    return call


@pytest.mark.parametrize(
    ("verb", "limit"), [(rollout, 16), (score, 20), (update, 20)], ids=["rollout", "score", "update"]
)
@pytest.mark.parametrize("error", FAILURES, ids=lambda error: str(error)[-30:] or "empty")
def test_goes_on_with_less_at_a_time(
    engine: MlxEngine, verb: Callable[[MlxEngine], list[np.ndarray]], limit: int, error: Exception,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    expected, calls = verb(engine), []
    with monkeypatch.context() as patched:
        patched.setattr(Qwen3Model, "__call__", failing_above(limit, error, calls))
        found = verb(engine)
    assert max(calls) > limit or verb is rollout
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-5)


@pytest.mark.parametrize("verb", [rollout, score, update])
def test_what_is_not_lack_of_memory_is_raised_as_it_is(
    engine: MlxEngine, verb: Callable[[MlxEngine], list[np.ndarray]], monkeypatch: pytest.MonkeyPatch
) -> None:
    error = RuntimeError("[matmul] Last dimension of first input with shape (1,2) must match")
    monkeypatch.setattr(Qwen3Model, "__call__", failing_above(0, error, []))
    with pytest.raises(RuntimeError, match=r"\[matmul\]"):
        verb(engine)


def test_a_single_response_that_does_not_fit(engine: MlxEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Qwen3Model, "__call__", failing_above(0, FAILURES[5], []))
    with pytest.raises(BackendError, match=r"out of memory on a single response, .*; lower max_tokens"):
        rollout(engine)
    with pytest.raises(BackendError, match="out of memory on a single sequence of 10 tokens"):
        score(engine)
