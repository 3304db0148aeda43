"""What a model does otherwise while its gradient is computed: checkpointed layers, kernels that have a gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import gated_delta

from backends.mlx.attention import CausalAttention

CHUNK = 64  # tokens of a recurrence between states that are kept


@contextmanager
def differentiable(model: nn.Module, attention: CausalAttention) -> Iterator[None]:
    """Inside, the model computes with operations that have a gradient, in memory that long responses do not fill.

    mlx-lm picks a fused kernel without a gradient for the recurrences of hybrid models (Qwen3.5, Qwen3-Next,
    Kimi Linear) unless their layers are in training mode. The plain operations it picks then would keep several
    states a token, megabytes each: of them one every CHUNK tokens is kept, and the rest is computed again.
    Dropout stays off: log-probabilities are to be those that were sampled from.
    """
    modules = [module for _, module in model.named_modules() if not module.training]
    modules = [module for module in modules if not isinstance(module, (nn.Dropout, nn.Dropout2d, nn.Dropout3d))]
    plain = gated_delta.gated_delta_ops
    try:
        for module in modules:
            module._training = True  # train() would switch dropout on too
        gated_delta.gated_delta_ops = _in_chunks(plain)
        with attention.active():
            yield
    finally:
        gated_delta.gated_delta_ops = plain
        for module in modules:
            module._training = False


def _in_chunks(recurrence: Callable[..., Any]) -> Callable[..., Any]:
    """The recurrence CHUNK tokens at a time, each chunk computed again in the backward pass."""

    def call(
        q: mx.array,
        k: mx.array,
        v: mx.array,
        g: mx.array,
        beta: mx.array,
        state: mx.array,
        mask: mx.array | None = None,
    ) -> tuple[mx.array, mx.array]:
        outputs = []
        for start in range(0, q.shape[1], CHUNK):
            tokens = slice(start, start + CHUNK)
            known = None if mask is None else mask[:, tokens]
            compute = mx.checkpoint(lambda *arrays, known=known: recurrence(*arrays, known))
            output, state = compute(*(array[:, tokens] for array in (q, k, v, g, beta)), state)
            outputs.append(output)
        return mx.concatenate(outputs, axis=1), state

    return call


@contextmanager
def checkpointed(layers: Sequence[nn.Module]) -> Iterator[None]:
    """Inside, each layer keeps its input alone and is computed again in the backward pass.

    The layers become instances of a subclass and then of their own class again, so that no other
    model of that class notices; mlx-lm's ``grad_checkpoint`` changes the class itself.
    """
    classes = [type(layer) for layer in layers]
    try:
        for layer, cls in zip(layers, classes, strict=True):
            layer.__class__ = _checkpointed_class(cls)
        yield
    finally:
        for layer, cls in zip(layers, classes, strict=True):
            layer.__class__ = cls


def _checkpointed_class(cls: type[nn.Module]) -> type[nn.Module]:
    def call(self: nn.Module, hidden: mx.array, *args: Any, **kwargs: Any) -> Any:
        def compute(parameters: dict[str, Any], hidden: mx.array) -> Any:
            self.update(parameters)
            return cls.__call__(self, hidden, *args, **kwargs)

        return mx.checkpoint(compute)(self.trainable_parameters(), hidden)

    return type(f"Checkpointed{cls.__name__}", (cls,), {"__call__": call})
