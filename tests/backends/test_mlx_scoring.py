"""Scoring a chunk of tokens at a time, the next one under way while one is read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("mlx.core", reason="MLX is not installed")

import mlx.core as mx

from backends.interface import Proxy, token_index
from backends.mlx.features import MlxFeatures
from backends.mlx.head import entropy, pick, proxies
from delta_cli.assets.random_model import write_qwen3
from tests.backends.mlx_engine import VOCAB, batch, create


class Reading:
    """Numpy, telling when the log-probabilities of a chunk are read, which its entropies follow."""

    def __init__(self, events: list[str]) -> None:
        self.events, self.calls = events, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)

    def array(self, values: Any, *arguments: Any, **options: Any) -> np.ndarray:
        if isinstance(values, mx.array) and values.dtype == mx.float32:
            self.calls += 1
            self.events.extend("r" * (self.calls % 2))
        return np.array(values, *arguments, **options)


@pytest.mark.parametrize("proxy", [None, Proxy("output_row"), Proxy("hidden_exact")], ids=str)
def test_a_chunk_is_under_way_while_another_is_read(
    tmp_path: Path, proxy: Proxy | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One ahead within a micro-batch and none across two, nothing else waited for, and the bits of one at a time."""
    write_qwen3(tmp_path, vocab_size=VOCAB, hidden=32, head_dim=8, intermediate=64, scale=0.2)
    backend, sequences, events = create(tmp_path, head_chunk_tokens=3, micro_batch_tokens=30), batch(), []
    head, starts = backend.policy.head(), sequences.starts
    parts = [len(token_index(starts, each.rows)) for each in backend._micro_batches(sequences)]
    assert len(parts) > 1
    logps, entropies, rows = np.zeros(40, np.float32), np.zeros(40, np.float32), np.zeros((40, 32), np.float32)
    for at, hidden, targets in backend._chunks(sequences):
        log_softmax = head.log_softmax(hidden, sequences.temperature)
        logps[at], entropies[at] = np.array(pick(log_softmax, targets)), np.array(entropy(log_softmax))
        rows[at] = np.array(proxies(head, hidden, targets, log_softmax, proxy)) if proxy else 0

    def told(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *arguments: (events.append(name), function(*arguments))[1]

    monkeypatch.setattr(mx, "eval", told("t", mx.eval))
    monkeypatch.setattr(mx, "async_eval", told("c", mx.async_eval))
    monkeypatch.setattr("backends.mlx.backend.np", Reading(events))
    found = backend.score(sequences, proxy)
    expected = ["t" + "c" + "cr" * (-(-tokens // 3) - 1) + "r" for tokens in parts]
    assert "".join(events) == "".join(expected)
    np.testing.assert_array_equal(found.logprobs, logps)
    np.testing.assert_array_equal(found.entropies, entropies)
    if proxy:
        assert isinstance(found.features, MlxFeatures)
        for at, kept in found.features.store.chunks:
            np.testing.assert_array_equal(np.array(kept), rows[at])


def test_logits_of_two_chunks_exist_in_scoring_however_many_there_are(tmp_path: Path) -> None:
    """Peaks beside the trunk's, over a vocabulary that makes the logits what is large: 32 tokens' are 1.5 MB."""
    write_qwen3(tmp_path, vocab_size=12000, hidden=16, layers=1, head_dim=4, intermediate=16)
    backend, peaks = create(tmp_path, head_chunk_tokens=32, micro_batch_tokens=10**6), []
    for responses in (2, 8):
        mx.clear_cache()
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        backend.score(batch(responses=responses, length=100))
        peaks.append(mx.get_peak_memory() - before)
    logits = 32 * 12000 * 4
    assert peaks[0] < 2 * 3 * logits * 1.1, "three arrays of logits for each of two chunks, as the doctor counts"
    assert peaks[1] < 2 * 3 * logits * 1.1


@pytest.mark.parametrize("failing", [2, 3, 6])
def test_a_failure_while_another_chunk_is_under_way(
    tmp_path: Path, failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the first micro-batch or the second: begun anew with half the tokens, none is lost or kept twice."""
    write_qwen3(tmp_path, vocab_size=VOCAB, hidden=32, head_dim=8, intermediate=64, scale=0.2)
    backend, sequences, sizes = create(tmp_path, head_chunk_tokens=7, micro_batch_tokens=30), batch(), []
    expected = backend.score(sequences, Proxy("hidden_exact"))
    dispatch = mx.async_eval

    def failing_once(part: Any) -> None:
        sizes.append(len(part[0]))
        if len(sizes) == failing:
            raise RuntimeError("[metal::malloc] Resource limit (499000) exceeded.")
        dispatch(part)

    monkeypatch.setattr(mx, "async_eval", failing_once)
    found = backend.score(sequences, Proxy("hidden_exact"))
    assert sum(sizes) > len(sequences.tokens)
    assert backend.recovery.tokens < 30
    np.testing.assert_allclose(found.logprobs, expected.logprobs, rtol=0, atol=1e-5)
    np.testing.assert_allclose(found.entropies, expected.entropies, rtol=0, atol=1e-5)
    assert found.features is not None
    assert expected.features is not None
    kept = [position for at, _ in found.features.store.chunks for position in at]
    assert sorted(kept) == list(range(len(sequences.tokens)))
    np.testing.assert_allclose(found.features.squared_norms(), expected.features.squared_norms(), rtol=1e-4)
