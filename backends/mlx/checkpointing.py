"""Gradient checkpointing of the layers of one model, for as long as a block runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn


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
