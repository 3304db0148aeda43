"""The gated delta rule by chunks: values and gradients against a loop in float64, and against mlx-lm's operations."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("mlx.core", reason="needs MLX")
import mlx.core as mx
from mlx_lm.models import gated_delta

from backends.mlx import recurrence
from backends.mlx.recurrence import CHUNK, STEPS, DeltaRule, in_chunks

ROWS, KEY_HEADS, HEADS, KEYS, VALUES = 2, 2, 4, 5, 3


def oracle(q: Any, k: Any, v: Any, g: Any, beta: Any, state: Any) -> tuple[np.ndarray, np.ndarray]:
    """The recurrence token by token in float64."""
    state, share = np.array(state, np.float64), v.shape[2] // q.shape[2]
    found = np.zeros(v.shape)
    for row, token, head in np.ndindex(*v.shape[:3]):
        key, query = k[row, token, head // share], q[row, token, head // share]
        state[row, head] *= g[row, token, head]
        error = v[row, token, head] - state[row, head] @ key
        state[row, head] += beta[row, token, head] * np.outer(error, key)
        found[row, token, head] = state[row, head] @ query
    return found, state


def given(tokens: int, *, alike: bool = False, least: float = 0.6) -> list[np.ndarray]:
    """Random inputs; ``alike`` makes all keys equal without decay, the worst case for the triangular system."""
    rng = np.random.default_rng(0)
    q, k = (rng.normal(size=(ROWS, tokens, KEY_HEADS, KEYS)) for _ in range(2))
    if alike:
        k[:] = k[:, :1]
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    g, beta = (rng.uniform(low, 1, (ROWS, tokens, HEADS)) for low in (least, 0))
    if alike:
        g[:], beta[:] = 1, 1
    return [q, k, rng.normal(size=(ROWS, tokens, HEADS, VALUES)), g, beta, rng.normal(size=(ROWS, HEADS, VALUES, KEYS))]


@pytest.mark.parametrize("tokens", [1, 3, CHUNK, 2 * CHUNK + 5])
@pytest.mark.parametrize("kind", [{}, {"alike": True}, {"least": 0.0}], ids=["usual", "alike", "forgetful"])
def test_values_are_those_of_a_loop(tokens: int, kind: dict[str, Any]) -> None:
    arrays = given(tokens, **kind)
    found = in_chunks(*(mx.array(each.astype(np.float32)) for each in arrays))
    for one, other in zip(found, oracle(*arrays), strict=True):
        assert one.shape == other.shape
        np.testing.assert_allclose(np.array(one), other, rtol=0, atol=2e-5 * np.abs(other).max())


@pytest.mark.parametrize("kind", [{}, {"alike": True}, {"least": 0.0}], ids=["usual", "alike", "forgetful"])
def test_gradients_are_those_of_the_loop(kind: dict[str, Any]) -> None:
    """Finite differences of the oracle's outputs and last state, by each input along a random direction."""
    arrays, rng, step = given(CHUNK + 5, **kind), np.random.default_rng(1), 1e-6
    slopes = [rng.normal(size=each.shape) for each in oracle(*arrays)]
    _, gradients = mx.vjp(
        lambda *a: list(in_chunks(*a)),
        [mx.array(each.astype(np.float32)) for each in arrays],
        [mx.array(each.astype(np.float32)) for each in slopes],
    )
    for place, array in enumerate(arrays):
        direction, sides = rng.normal(size=array.shape), []
        for sign in (1, -1):
            moved = [each + sign * step * direction if at == place else each for at, each in enumerate(arrays)]
            sides.append(sum((one * other).sum() for one, other in zip(oracle(*moved), slopes, strict=True)))
        expected = (sides[0] - sides[1]) / (2 * step)
        found = (np.array(gradients[place], np.float64) * direction).sum()
        assert found == pytest.approx(expected, rel=5e-4, abs=5e-4 * np.abs(direction).sum() ** 0.5)


def test_results_keep_mlx_lm_s_types() -> None:
    """A float32 output would turn the rest of a bfloat16 model into float32."""
    arrays = [mx.array(each.astype(np.float32)).astype(mx.bfloat16) for each in given(3)]
    arrays[5] = arrays[5].astype(mx.float32)
    for one, other in zip(in_chunks(*arrays), gated_delta.gated_delta_ops(*arrays), strict=True):
        assert one.dtype == other.dtype


@pytest.mark.parametrize("case", ["masked", "a decay for each key dimension"])
def test_the_token_by_token_path(case: str) -> None:
    """The input is longer than the stretch between kept states."""
    arrays = [mx.array(each.astype(np.float32)) for each in given(STEPS + 3)]
    mask = mx.array(np.random.default_rng(2).random((ROWS, STEPS + 3)) < 0.8) if case == "masked" else None
    if mask is None:
        arrays[3] = mx.random.uniform(0.5, 1, (*arrays[3].shape, KEYS), key=mx.random.key(0))
    found = DeltaRule(fused=False)(*arrays, mask)
    for one, other in zip(found, gated_delta.gated_delta_ops(*arrays, mask), strict=True):
        np.testing.assert_array_equal(np.array(one), np.array(other))


def test_memory_of_the_gradient() -> None:
    """Token by token, MLX would keep every state, and a gradient of all inputs for every token."""
    mx.random.seed(0)
    tokens, width = 512, 32
    q, k, v = (0.25 * mx.random.normal((1, tokens, 1, width)) for _ in range(3))
    g, beta = mx.random.uniform(0.5, 1, (1, tokens, 1)), mx.random.uniform(0, 1, (1, tokens, 1))
    start = mx.zeros((1, 1, width, width))
    mx.eval(q, k, v, g, beta, start)
    peaks = []
    for compute in (gated_delta.gated_delta_ops, in_chunks):
        mx.clear_cache()
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        slopes = mx.grad(lambda *a, f=compute: mx.sum(mx.sin(f(*a, start)[0])), argnums=(0, 1, 2, 3, 4))
        mx.eval(slopes(q, k, v, g, beta))
        peaks.append(mx.get_peak_memory() - before)
    assert peaks[1] < peaks[0] / 2


def test_a_kernel_whose_gradient_is_wrong_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison at load, on a device that claims to have the kernel."""
    assert recurrence.why_not_fused(2, 4, 16) == "this device has no fused kernel"
    monkeypatch.setattr(mx, "default_device", lambda: mx.gpu)
    assert recurrence.why_not_fused(2, 4, 16) is None
    right = mx.fast.gated_delta_update
    monkeypatch.setattr(mx.fast, "gated_delta_update", lambda q, *more: right(1.1 * q, *more))
    assert "differs" in str(recurrence.why_not_fused(2, 4, 16))

    def raises(*arrays: mx.array) -> mx.array:
        raise RuntimeError("no gradient")

    monkeypatch.setattr(mx.fast, "gated_delta_update", raises)
    assert "has no gradient here" in str(recurrence.why_not_fused(2, 4, 16))
