"""How a model computes differently while its gradient is taken: differentiable operations and checkpointed layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map

from backends.mlx.attention import CausalAttention
from backends.mlx.recurrence import DeltaRule


@contextmanager
def differentiable(model: nn.Module, attention: CausalAttention, delta_rule: DeltaRule) -> Iterator[None]:
    """Within the context, the model uses operations that have a gradient and whose memory long responses do not fill.

    For the recurrences of hybrid models (Qwen3.5, Qwen3-Next, Kimi Linear), mlx-lm's layers use a kernel without a
    gradient unless they are in training mode. Dropout stays off, because rollouts were sampled without it.
    """
    modules = [module for _, module in model.named_modules() if not module.training]
    modules = [module for module in modules if not isinstance(module, (nn.Dropout, nn.Dropout2d, nn.Dropout3d))]
    try:
        for module in modules:
            module._training = True  # train() would switch dropout on too
        with attention.active(), delta_rule.active():
            yield
    finally:
        for module in modules:
            module._training = False


@contextmanager
def checkpointed(layers: Sequence[nn.Module]) -> Iterator[None]:
    """Inside, each layer keeps its input alone and is computed again in the backward pass."""

    def again(place: int, forward: Callable[..., Any], *inputs: Any) -> Any:
        given = [leaf for _, leaf in tree_flatten(inputs) if _has_gradient(leaf)]

        def compute(parameters: dict[str, Any], given: list[mx.array]) -> Any:
            layers[place].update(parameters)
            left = iter(given)
            hidden, own, named = tree_map(lambda leaf: next(left) if _has_gradient(leaf) else leaf, inputs)
            return forward(hidden, *own, **named)

        return mx.checkpoint(compute)(layers[place].trainable_parameters(), given)

    with replaced(layers, again):
        yield


@contextmanager
def replaced(layers: Sequence[nn.Module], compute: Callable[..., Any]) -> Iterator[None]:
    """Inside, layer ``place`` computes ``compute(place, its own __call__, hidden, arguments, options)``.

    The layers become instances of a subclass and then of their own class again, so that no other model of that class
    notices; mlx-lm's ``grad_checkpoint`` changes the class itself.
    """
    classes = [type(layer) for layer in layers]
    try:
        for place, (layer, cls) in enumerate(zip(layers, classes, strict=True)):
            layer.__class__ = _class(cls, place, compute)
        yield
    finally:
        for layer, cls in zip(layers, classes, strict=True):
            layer.__class__ = cls


def _class(cls: type[nn.Module], place: int, compute: Callable[..., Any]) -> type[nn.Module]:
    def call(self: nn.Module, hidden: mx.array, *arguments: Any, **options: Any) -> Any:
        return compute(place, lambda x, *a, **o: cls.__call__(self, x, *a, **o), hidden, arguments, options)

    return type(f"Replaced{cls.__name__}", (cls,), {"__call__": call})


def _has_gradient(leaf: Any) -> bool:
    """Whether gradients flow through an input of a layer: hidden states, Gemma's inputs per layer, shared keys."""
    return isinstance(leaf, mx.array) and mx.issubdtype(leaf.dtype, mx.floating)
