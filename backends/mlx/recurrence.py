"""The gated delta rule, the recurrence of hybrid models (Qwen3.5, Qwen3-Next), with a gradient.

On a GPU, MLX's fused kernel computes both. Without a kernel, as on a CPU, or if its gradient is wrong, each chunk of
tokens is computed with matrix products (arXiv 2412.06464, section 3.3), and only one state per chunk is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import mlx.core as mx
from mlx_lm.models import gated_delta

from backends.mlx.kernel_check import value_and_gradient, why_not

CHUNK = 32  # tokens computed together, a power of 2; 16 is slower, 64 needs more memory
STEPS = 64  # tokens between the states that are kept when the recurrence runs token by token
LEAST_DECAY = 1e-30  # smaller decays count as this one; the logarithm of 0 would have no gradient

_token_by_token = gated_delta.gated_delta_ops


class DeltaRule:
    """A replacement for mlx-lm's ``gated_delta_ops`` with a gradient; ``fused`` says whether to use MLX's kernel."""

    def __init__(self, fused: bool) -> None:
        self.fused = fused

    def __call__(
        self,
        q: mx.array,
        k: mx.array,
        v: mx.array,
        g: mx.array,
        beta: mx.array,
        state: mx.array,
        mask: mx.array | None = None,
    ) -> tuple[mx.array, mx.array]:
        """The outputs and the last state, as in :func:`in_chunks`."""
        if self.fused and g.ndim == 3:
            output, last = mx.fast.gated_delta_update(q, k, v, g, beta, state, mask)
            return output, last
        return in_chunks(q, k, v, g, beta, state, mask)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Within the context, mlx-lm's layers in training mode use this rule."""
        before = gated_delta.gated_delta_ops
        gated_delta.gated_delta_ops = self
        try:
            yield
        finally:
            gated_delta.gated_delta_ops = before


def in_chunks(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    g: mx.array,
    beta: mx.array,
    state: mx.array,
    mask: mx.array | None = None,
) -> tuple[mx.array, mx.array]:
    """Apply S ← g·S + β·(v − g·S·k)·kᵀ and o = S·q to every token, one chunk at a time.

    Takes ``q`` and ``k`` [B, T, Hk, Dk], ``v`` [B, T, Hv, Dv], ``g`` and ``beta`` [B, T, Hv] and ``state`` [B, Hv, Dv,
    Dk]; tokens outside ``mask`` [B, T] do not change the state. Returns o [B, T, Hv, Dv] in the type of ``q`` and the
    last state in float32. With a mask, or with one decay per key dimension (``g`` [B, T, Hv, Dk]), it runs token by
    token.
    """
    if g.ndim != 3 or mask is not None:
        return _one_by_one(q, k, v, g, beta, state, mask)
    repeats, tokens, dtype = v.shape[2] // q.shape[2], q.shape[1], q.dtype
    q, k = (mx.repeat(array, repeats, axis=2) if repeats > 1 else array for array in (q, k))
    size = min(CHUNK, 1 << (tokens - 1).bit_length())
    # [B, Hv, chunks, C, ·] in float32; the padding of the last chunk does not change the state: β = 0 and decay 1
    q, k, v, rate, past = (_chunked(array, size) for array in (q, k, v, beta[..., None], 1 - g[..., None]))
    output, last = _chunks(q, k, v, 1 - past, rate, state.astype(mx.float32).swapaxes(-1, -2))
    output = output.reshape(*output.shape[:2], -1, output.shape[-1])[:, :, :tokens]
    return output.swapaxes(1, 2).astype(dtype), last.swapaxes(-1, -2)


def _chunked(array: mx.array, size: int) -> mx.array:
    """[B, T, H, D] → float32 [B, H, chunks, C, D], the last chunk filled with zeros."""
    array = mx.pad(array.astype(mx.float32), [(0, 0), (0, -array.shape[1] % size), (0, 0), (0, 0)])
    return array.swapaxes(1, 2).reshape(array.shape[0], array.shape[2], -1, size, array.shape[3])


def _chunks(
    q: mx.array, k: mx.array, v: mx.array, decay: mx.array, rate: mx.array, state: mx.array
) -> tuple[mx.array, mx.array]:
    """Return the outputs [B, H, chunks, C, Dv] and the last state [B, H, Dk, Dv].

    Let u_t = β_t·(v_t − g_t·S_{t−1}·k_t), and let Γ_t be the product of the chunk's decays up to t. Then
    S_t = Γ_t·S_0 + Σ_{i≤t} Γ_t/Γ_i · u_i·k_iᵀ, and the u_t solve a unit lower triangular system.
    """
    size = q.shape[3]
    logs = mx.cumsum(mx.log(mx.maximum(decay, LEAST_DECAY)), axis=-2)  # log Γ
    below = mx.tril(mx.ones((size, size)), -1)
    until = mx.tril(mx.ones((size, size)))
    between = mx.exp((logs - logs.swapaxes(-1, -2)) * until) * until  # Γ_t/Γ_i for i ≤ t
    total, rest = mx.exp(logs), between[..., -1, :, None]  # Γ_t, Γ_C/Γ_i
    keys = k.swapaxes(-1, -2)
    solved = cast(mx.array, _inverse(rate * (k @ keys) * between * below))
    own, of_start = solved @ (rate * v), solved @ (rate * total * k)  # u = own − of_start·S_0
    within, reading, written = (q @ keys) * between, total * q, (rest * k).swapaxes(-1, -2)
    outputs = []
    for number in range(q.shape[2]):
        u = own[:, :, number] - of_start[:, :, number] @ state
        outputs.append(reading[:, :, number] @ state + within[:, :, number] @ u)
        state = total[:, :, number, -1:] * state + written[:, :, number] @ u
    return mx.stack(outputs, axis=2), state


@mx.custom_function
def _inverse(lower: mx.array) -> mx.array:
    """(1 + L)⁻¹ for strictly lower triangular L [..., C, C], where C is a power of 2.

    The blocks double in size each time: [[A, 0], [B, D]]⁻¹ = [[A⁻¹, 0], [−D⁻¹·B·A⁻¹, D⁻¹]]. A series in powers of L
    would lose its digits to cancellation if keys are similar.
    """
    size, half = lower.shape[-1], 1
    found = mx.ones((*lower.shape[:-2], size, 1, 1))  # the inverses of the diagonal blocks
    while half < size:
        count = size // (2 * half)
        blocks = lower.reshape(*lower.shape[:-2], count, 2 * half, count, 2 * half)
        corners = mx.moveaxis(mx.diagonal(blocks, axis1=-4, axis2=-2), -1, -3)[..., half:, :half]
        first, second = found[..., 0::2, :, :], found[..., 1::2, :, :]
        corner = -(second @ corners @ first)
        top = mx.concatenate([first, mx.zeros_like(first)], axis=-1)
        found = mx.concatenate([top, mx.concatenate([corner, second], axis=-1)], axis=-2)
        half *= 2
    return found.squeeze(-3)


@_inverse.vjp
def _inverse_vjp(lower: mx.array, cotangent: mx.array, output: mx.array) -> mx.array:
    turned = output.swapaxes(-1, -2)
    return -(turned @ cotangent @ turned)


def _one_by_one(
    q: mx.array, k: mx.array, v: mx.array, g: mx.array, beta: mx.array, state: mx.array, mask: mx.array | None
) -> tuple[mx.array, mx.array]:
    """Run the recurrence token by token; the backward pass recomputes STEPS tokens at a time."""
    outputs = []
    for start in range(0, q.shape[1], STEPS):
        tokens = slice(start, start + STEPS)
        known = None if mask is None else mask[:, tokens]
        # mx.checkpoint takes no mask as an argument.
        again = mx.checkpoint(lambda *arrays, known=known: _token_by_token(*arrays, known))
        output, state = again(*(array[:, tokens] for array in (q, k, v, g, beta)), state)
        outputs.append(output)
    return mx.concatenate(outputs, axis=1), state


def why_not_fused(key_heads: int, heads: int, size: int) -> str | None:
    """Why this device cannot use the fused kernel, as a clause; None if it can.

    Compares the kernel's value and gradient with those of mlx-lm's operations, token by token.
    """
    if mx.default_device() != mx.gpu:
        return "this device has no fused kernel"
    keys = mx.random.split(mx.random.key(0), 6)
    tokens = CHUNK + 3
    q, k = (mx.random.normal((1, tokens, key_heads, size), key=keys[place]) * size**-0.5 for place in (0, 1))
    v, slopes = (mx.random.normal((1, tokens, heads, size), key=keys[place]) for place in (2, 3))
    g, beta = (mx.random.uniform(0.5, 1, (1, tokens, heads), key=keys[place]) for place in (4, 5))
    state = mx.zeros((1, heads, size, size))

    def result(rule: Callable[..., Any]) -> list[mx.array]:
        return value_and_gradient(lambda *arrays: [rule(*arrays, state)[0]], [q, k, v, g, beta], slopes)

    return why_not(lambda: result(mx.fast.gated_delta_update), lambda: result(_token_by_token), 1e-3)
