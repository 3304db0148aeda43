"""Causal attention in scoring and updates, without array masks and without a whole matrix of scores.

MLX's fused kernel has a gradient for ``mask="causal"``. Where it is missing (on a CPU) or differs, the queries go a
block at a time: a block sees the keys up to its own end, and in the backward pass its scores are computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import mlx.core as mx

from backends.mlx import ATTENTION_BLOCK as BLOCK
from backends.mlx.features import to_device, to_host
from backends.mlx.kernel_check import value_and_gradient, why_not

LEAST_QUERIES = 9  # MLX's kernel for 8 queries or fewer has no gradient

_mlx_attention = mx.fast.scaled_dot_product_attention


class PromptMask:
    """Responses that attend to their prompts and to themselves; an attention mask without an array.

    The keys are those of the prompts, padded to ``width``, and then those of the responses. ``lengths`` are the
    prompts' real lengths, of each row.
    """

    def __init__(self, lengths: Sequence[int], width: int) -> None:
        self._width = width
        self._groups: list[tuple[slice, int]] = []  # neighbouring rows with prompts of one length
        for row, length in enumerate(lengths):
            if self._groups and self._groups[-1][1] == length:
                self._groups[-1] = slice(self._groups[-1][0].start, row + 1), length
            else:
                self._groups.append((slice(row, row + 1), length))

    def attend(
        self,
        causal: Callable[[mx.array, mx.array, mx.array], mx.array],
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
    ) -> mx.array:
        """Causal attention [B, heads, Tr, D] over each prompt's real keys and the response's own."""
        parts = [
            causal(
                queries[rows], self._without_padding(keys[rows], length), self._without_padding(values[rows], length)
            )
            for rows, length in self._groups
        ]
        return parts[0] if len(parts) == 1 else mx.concatenate(parts)

    def _without_padding(self, array: mx.array, length: int) -> mx.array:
        if length == self._width:
            return array
        return mx.concatenate([array[:, :, :length], array[:, :, self._width :]], axis=2)


class CausalAttention:
    """What ``mx.fast.scaled_dot_product_attention`` computes; ``fused``: the kernel's gradient may be used."""

    def __init__(self, fused: bool) -> None:
        self.fused = fused

    def __call__(
        self, q: mx.array, k: mx.array, v: mx.array, *, scale: float, mask: Any = None, **options: Any
    ) -> mx.array:
        """Queries [B, heads, Tq, D], keys and values [B, key heads, Tk, D] → [B, heads, Tq, D]."""

        def causal(queries: mx.array, keys: mx.array, values: mx.array) -> mx.array:
            if self.fused and queries.shape[2] >= LEAST_QUERIES:
                return _mlx_attention(queries, keys, values, scale=scale, mask="causal")
            return in_blocks(queries, keys, values, scale)

        if isinstance(mask, PromptMask):
            if options.get("sinks") is not None:
                raise TypeError("attention sinks need an array mask")
            return mask.attend(causal, q, k, v)
        if isinstance(mask, str) and mask == "causal" and options.get("sinks") is None:
            return causal(q, k, v)
        return _mlx_attention(q, k, v, scale=scale, mask=mask, **options)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Inside, mlx-lm's models attend with this."""
        before = mx.fast.scaled_dot_product_attention
        mx.fast.scaled_dot_product_attention = self
        try:
            yield
        finally:
            mx.fast.scaled_dot_product_attention = before


def in_blocks(queries: mx.array, keys: mx.array, values: mx.array, scale: float) -> mx.array:
    """Causal attention BLOCK queries at a time, the last query aligned with the last key; so is its gradient."""
    if queries.shape[2] <= BLOCK:
        return plain(queries, keys, values, scale)
    before = keys.shape[2] - queries.shape[2]
    blocks = [slice(start, min(start + BLOCK, queries.shape[2])) for start in range(0, queries.shape[2], BLOCK)]

    def attend(q: mx.array, k: mx.array, v: mx.array) -> mx.array:
        return plain(q, k, v, scale)

    @mx.custom_function
    def forward(q: mx.array, k: mx.array, v: mx.array) -> mx.array:
        # What is evaluated inside a trace keeps all that it was made of. A copy through numpy does not, so the scores
        # of one block exist at a time.
        ends = [(block, before + block.stop) for block in blocks]
        parts = (attend(q[:, :, block], k[:, :, :end], v[:, :, :end]) for block, end in ends)
        return mx.concatenate([to_device(to_host(part)) for part in parts], axis=2)

    @forward.vjp
    def backward(primals: Any, cotangent: mx.array, output: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        q, k, v = primals
        dq: list[mx.array] = []
        dk, dv = mx.zeros_like(k), mx.zeros_like(v)
        for block in blocks:
            chosen = mx.depends(q[:, :, block], [dk, dv]) if dq else q[:, :, block]
            end = before + block.stop
            inputs = [chosen, k[:, :, :end], v[:, :, :end]]
            _, (part, more_k, more_v) = mx.vjp(attend, inputs, [cotangent[:, :, block]])
            dq.append(part)
            dk, dv = dk.at[:, :, :end].add(more_k), dv.at[:, :, :end].add(more_v)
        return mx.concatenate(dq, axis=2), dk, dv

    return cast(mx.array, forward(queries, keys, values))


def plain(queries: mx.array, keys: mx.array, values: mx.array, scale: float) -> mx.array:
    """Causal attention by products and a softmax in float32; the last query is aligned with the last key."""
    heads, key_heads, size = queries.shape[1], keys.shape[1], queries.shape[2]
    grouped = (queries * scale).reshape(queries.shape[0], key_heads, heads // key_heads, size, -1)
    scores = grouped @ keys[:, :, None].swapaxes(-1, -2)
    position = mx.arange(keys.shape[2] - size, keys.shape[2])
    scores = mx.where(position[:, None] >= mx.arange(keys.shape[2]), scores, mx.finfo(scores.dtype).min)
    found = mx.softmax(scores, axis=-1, precise=True) @ values[:, :, None]
    return found.reshape(*queries.shape[:3], values.shape[-1])


def why_not_fused(heads: int, key_heads: int, size: int, dtype: mx.Dtype) -> str | None:
    """Why the fused kernel's gradient cannot be used on this device, as a clause; None if it can.

    Value and gradient are compared with :func:`plain` in float32.
    """
    if mx.default_device() != mx.gpu:
        return "this device has no fused kernel"
    key, tokens = mx.random.key(0), 2 * LEAST_QUERIES + 16
    shapes = [(2, heads, LEAST_QUERIES + 16, size), (2, key_heads, tokens, size), (2, key_heads, tokens, size)]
    inputs = [
        mx.random.normal(shape, key=each).astype(dtype)
        for shape, each in zip(shapes, mx.random.split(key, 3), strict=True)
    ]
    slopes = mx.random.normal(shapes[0], key=key).astype(dtype)
    scale = size**-0.5

    def fused() -> list[mx.array]:
        return value_and_gradient(lambda q, k, v: _mlx_attention(q, k, v, scale=scale, mask="causal"), inputs, slopes)

    def known() -> list[mx.array]:
        wide = [each.astype(mx.float32) for each in inputs]
        return value_and_gradient(lambda q, k, v: plain(q, k, v, scale), wide, slopes.astype(mx.float32))

    return why_not(fused, known, 1e-3 if dtype == mx.float32 else 5e-2)
