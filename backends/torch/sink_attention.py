"""Attention with sinks by PyTorch's flash kernel, which has none.

A sink is a score for every query of a head, without a value (gpt-oss). It only enlarges the sum of exponentials by
which a query's outputs are divided. The kernel returns that sum's logarithm beside its outputs, so both are corrected
after the call. The backward kernel computes probabilities from the logarithm, and their gradient from the outputs, so
given corrected ones it computes the gradient of attention with sinks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from backends.torch.varlen_attention import VarlenLayout


def attend_with_sinks(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    sinks: Tensor,
    layout: VarlenLayout,
    window: int,
    scaling: float | None,
) -> Tensor:
    """Outputs [T, heads, size] for queries [T, heads, size], keys and values [K, fewer heads, size], sinks [heads].

    ``keys`` and ``values`` are those of each sequence, one after another; a query sees the last ``window`` of them up
    to its own token, or all if that is 0.
    """
    inputs = query.contiguous(), keys, values, sinks, layout, window, scaling
    found: Tensor = _SinkAttention.apply(*inputs)  # type: ignore[no-untyped-call]
    return found


def add_sinks(out: Tensor, log_sums: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs [T, heads, size] and logarithms of sums [heads, T] of attention without sinks, as they are with them."""
    enlarged = torch.logaddexp(log_sums.float(), sinks.float()[:, None])
    kept = (log_sums - enlarged).exp().T[..., None]
    return (out * kept).to(out.dtype), enlarged


class _SinkAttention(torch.autograd.Function):
    """The two kernels with the correction between them."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        sinks: Tensor,
        layout: VarlenLayout,
        window: int,
        scaling: float | None,
    ) -> Tensor:
        out, log_sums = add_sinks(*_forward(query, keys, values, layout, window, scaling), sinks)
        ctx.save_for_backward(query, keys, values, sinks, out, log_sums)
        ctx.options = layout, window, scaling
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        query, keys, values, sinks, out, log_sums = ctx.saved_tensors
        found = _backward(gradient.contiguous(), query, keys, values, out, log_sums, *ctx.options)
        # The softmax's gradient at the sink: its probability times zero, its value, less the mean over all keys.
        mean = (gradient * out.to(log_sums.dtype)).sum(-1).T
        at_sinks = -((sinks.float()[:, None] - log_sums).exp() * mean).sum(1)
        return *found, at_sinks.to(sinks.dtype), None, None, None


def _window(window: int) -> dict[str, int]:
    return {"window_size_left": window - 1 if window else -1, "window_size_right": 0}


def _forward(
    query: Tensor, keys: Tensor, values: Tensor, layout: VarlenLayout, window: int, scaling: float | None
) -> tuple[Tensor, Tensor]:
    """The flash kernel's outputs [T, heads, size] and logarithms of sums [heads, T] float32."""
    out, log_sums, *_ = torch.ops.aten._flash_attention_forward(
        *(query, keys, values),
        *(layout.query_starts, layout.key_starts, layout.most_queries, layout.most_keys),
        *(0.0, not window, False),  # no dropout; causal; no mask for debugging
        scale=scaling,
        **_window(window),
    )
    return out, log_sums


def _backward(
    gradient: Tensor,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    out: Tensor,
    log_sums: Tensor,
    layout: VarlenLayout,
    window: int,
    scaling: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of queries, keys and values by the flash kernel, from outputs and logarithms of sums."""
    unused = torch.zeros(2, dtype=torch.uint64, device=query.device), torch.empty(0, device=query.device)  # for dropout
    found: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._flash_attention_backward(
        *(gradient, query, keys, values, out, log_sums),
        *(layout.query_starts, layout.key_starts, layout.most_queries, layout.most_keys),
        *(0.0, not window, *unused),
        scale=scaling,
        **_window(window),
    )
    return found
