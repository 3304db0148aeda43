"""Attention of the MLX backend: values and gradients against a loop in float64, and no array mask in an update."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("mlx.core", reason="needs MLX")
import mlx.core as mx

from backends import registry
from backends.interface import Sequences, starts_of
from backends.mlx import attention
from backends.mlx.attention import CausalAttention, PromptMask, in_blocks
from backends.settings import BackendSettings
from delta_cli.assets.random_model import write_qwen3
from delta_cli.runs.folder import RunFolder, read_lines
from tests.backends.mlx_engine import VOCAB, create
from tests.conformance.objectives import Linear
from tests.harness import make_recipe, train, write_model

SCALE = 0.3


def oracle(q: np.ndarray, k: np.ndarray, v: np.ndarray, visible: np.ndarray) -> np.ndarray:
    """Attention, query by query, over the keys that ``visible`` [B, Tq, Tk] names."""
    found = np.zeros((*q.shape[:3], v.shape[3]))
    share = q.shape[1] // k.shape[1]
    for row, head, query in np.ndindex(*q.shape[:3]):
        seen = visible[row, query]
        scores = k[row, head // share, seen] @ q[row, head, query] * SCALE
        weights = np.exp(scores - scores.max())
        found[row, head, query] = weights @ v[row, head // share, seen] / weights.sum()
    return found


def arrays(queries: int, keys: int, rows: int = 2) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(0)
    shapes = (rows, 4, queries, 3), (rows, 2, keys, 3), (rows, 2, keys, 3), (rows, 4, queries, 3)
    return tuple(rng.normal(size=shape) for shape in shapes)


def check(attend: Any, q: np.ndarray, k: np.ndarray, v: np.ndarray, slopes: np.ndarray, visible: np.ndarray) -> None:
    """Values, and gradients by finite differences of the oracle along random directions."""
    inputs = [mx.array(each.astype(np.float32)) for each in (q, k, v)]
    values, gradients = mx.vjp(attend, inputs, [mx.array(slopes.astype(np.float32))])
    np.testing.assert_allclose(np.array(values[0]), oracle(q, k, v, visible), rtol=0, atol=2e-6)
    rng, step = np.random.default_rng(1), 1e-5
    for place in range(3):
        direction = rng.normal(size=(q, k, v)[place].shape)
        sides = []
        for sign in (1, -1):
            moved = [q, k, v]
            moved[place] = moved[place] + sign * step * direction
            sides.append((oracle(*moved, visible) * slopes).sum())
        found = (np.array(gradients[place], np.float64) * direction).sum()
        assert found == pytest.approx((sides[0] - sides[1]) / (2 * step), rel=1e-4, abs=1e-4)


@pytest.mark.parametrize(("queries", "keys"), [(3, 3), (11, 11), (9, 14)])
def test_blocks_are_causal_attention(queries: int, keys: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one block and of several, the last shorter; the last query is aligned with the last key."""
    monkeypatch.setattr(attention, "BLOCK", 4)
    visible = np.arange(keys - queries, keys)[:, None] >= np.arange(keys)
    given = arrays(queries, keys)
    check(lambda q, k, v: in_blocks(q, k, v, SCALE), *given, np.broadcast_to(visible, (2, queries, keys)))


def test_responses_see_their_own_prompt_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of 2, 5, 5 and 1 tokens in a width of 5; padding is never attended to."""
    monkeypatch.setattr(attention, "BLOCK", 4)
    lengths, width, count = (2, 5, 5, 1), 5, 6
    visible = np.array(
        [
            [[*(p < length for p in range(width)), *(own <= query for own in range(count))] for query in range(count)]
            for length in lengths
        ]
    )
    mask, attend = PromptMask(lengths, width), CausalAttention(fused=False)
    given = arrays(count, width + count, rows=4)
    check(lambda q, k, v: attend(q, k, v, scale=SCALE, mask=mask), *given, visible)


def test_sinks_are_not_left_out() -> None:
    """A model with attention sinks cannot be given a mask that ignores them."""
    q, k, v, _ = (mx.array(each) for each in arrays(3, 3))
    with pytest.raises(TypeError, match="sinks"):
        CausalAttention(fused=False)(q, k, v, scale=SCALE, mask=PromptMask((1, 1), 1), sinks=mx.zeros(4))


@pytest.mark.parametrize("checkpointing", [False, True])
def test_no_array_mask_in_scoring_and_update(
    checkpointing: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plain causal model, with prompts and responses of mixed lengths."""
    write_qwen3(tmp_path, vocab_size=VOCAB, hidden=32, layers=2, heads=4, head_dim=8, intermediate=64)
    engine = create(tmp_path, gradient_checkpointing=checkpointing)
    assert engine.shares_prompts
    rng = np.random.default_rng(0)
    prompts = [rng.integers(1, VOCAB, size) for size in (3, 7)]
    sizes = [5, 9, 2, 6, 4, 12]
    given = Sequences(
        tuple(prompts[row // 3] for row in range(6)), rng.integers(1, VOCAB, sum(sizes)), starts_of(sizes)
    )
    masks: list[Any] = []
    attend = CausalAttention.__call__

    def watched(self: CausalAttention, *arrays: mx.array, mask: Any = None, **options: Any) -> mx.array:
        masks.append(mask)
        return attend(self, *arrays, mask=mask, **options)

    monkeypatch.setattr(CausalAttention, "__call__", watched)
    engine.score(given)
    engine.accumulate(given, Linear(given.starts, np.ones(sum(sizes))))
    assert {type(mask) for mask in masks} == {str, PromptMask}


def test_the_scores_of_a_block_exist_at_a_time() -> None:
    """A gradient inside a trace, which keeps what is evaluated in it; all scores would be 16 MiB, several times."""
    tokens = 1024
    q, k, v = (mx.random.normal((1, 4, tokens, 8)) for _ in range(3))
    mx.eval(q, k, v)
    peaks = []
    for attend in (in_blocks, attention.plain):
        mx.clear_cache()
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        mx.eval(mx.grad(lambda *a, f=attend: f(*a, SCALE).sum(), argnums=(0, 1, 2))(q, k, v))
        peaks.append(mx.get_peak_memory() - before)
    assert peaks[0] < peaks[1] / 2


def test_a_gradient_that_is_wrong_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison at load, on a device that says it has the kernel."""
    monkeypatch.setattr(mx, "default_device", lambda: mx.gpu)
    assert attention.why_not_fused(4, 2, 8, mx.float32) is None

    def wrong(q: mx.array, k: mx.array, v: mx.array, **options: Any) -> mx.array:
        return attention.plain(q, k, v, options["scale"]) + 0.1 * q

    def raises(*arrays: mx.array, **options: Any) -> mx.array:
        raise RuntimeError("no gradient")

    monkeypatch.setattr(attention, "_mlx_attention", wrong)
    assert "differs" in str(attention.why_not_fused(4, 2, 8, mx.float32))
    monkeypatch.setattr(attention, "_mlx_attention", raises)
    assert "has no gradient here" in str(attention.why_not_fused(4, 2, 8, mx.float32))


def test_a_run_says_that_it_goes_without_the_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, in its notices."""
    model = write_model(tmp_path / "model")
    engine = registry.create("fake", BackendSettings.of(str(model)))
    engine.slower_path = "attention goes by plain operations"
    monkeypatch.setattr("delta_cli.training.setup.registry.create", lambda *given: engine)
    train(make_recipe(model, run__steps=2), tmp_path / "run")
    kept = list(read_lines(RunFolder(tmp_path / "run").notices))
    assert [each["text"] for each in kept if each["name"] == "slower_path"] == ["attention goes by plain operations"]
