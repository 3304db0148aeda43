"""Counts the operations of the matrix products that MLX is asked for; seconds of a processor's BLAS hide them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import mlx.core as mx

BACKWARD = 2  # products of the backward pass for each product of the forward pass


class Products:
    """Multiplications and additions of matrix products, those of their gradients included."""

    def __init__(self) -> None:
        self.operations = 0
        self._tracing = 0  # depth of functions that are being differentiated

    def add(self, rows: int, inner: int, columns: int) -> None:
        """Count a product [rows, inner] × [inner, columns]."""
        self.operations += 2 * rows * inner * columns * (1 + BACKWARD * (self._tracing > 0))

    @contextmanager
    def _traced(self) -> Iterator[None]:
        self._tracing += 1
        try:
            yield
        finally:
            self._tracing -= 1

    def matmul(self, original: Callable[..., mx.array]) -> Callable[..., mx.array]:
        """``a @ b``, counted."""

        def product(a: mx.array, b: mx.array, *more: Any, **options: Any) -> mx.array:
            found = original(a, b, *more, **options)
            self.add(found.size // found.shape[-1], a.shape[-1], found.shape[-1])
            return found

        return product

    def addmm(self, original: Callable[..., mx.array]) -> Callable[..., mx.array]:
        """``c + a @ b``, counted."""

        def product(c: mx.array, a: mx.array, b: mx.array, *more: Any, **options: Any) -> mx.array:
            found = original(c, a, b, *more, **options)
            self.add(found.size // found.shape[-1], a.shape[-1], found.shape[-1])
            return found

        return product

    def attention(self, original: Callable[..., mx.array]) -> Callable[..., mx.array]:
        """MLX's attention, counted as two products with every key."""

        def attend(q: mx.array, k: mx.array, v: mx.array, **options: Any) -> mx.array:
            rows = math.prod(q.shape[:-1])
            self.add(rows, q.shape[-1], k.shape[-2])
            self.add(rows, k.shape[-2], v.shape[-1])
            return original(q, k, v, **options)

        return attend

    def differentiated(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """``mx.grad`` or ``mx.value_and_grad``, whose functions are differentiated when they are called."""

        def make(function: Callable[..., Any], *more: Any, **options: Any) -> Callable[..., Any]:
            found = original(function, *more, **options)

            def call(*arguments: Any, **named: Any) -> Any:
                with self._traced():
                    return found(*arguments, **named)

            return call

        return make

    def vjp(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """``mx.vjp``, which differentiates at once."""

        def call(*arguments: Any, **options: Any) -> Any:
            with self._traced():
                return original(*arguments, **options)

        return call


@contextmanager
def counted_products() -> Iterator[Products]:
    """Within the context, the products of MLX's ``@``, ``matmul``, ``addmm`` and attention are counted."""
    found = Products()
    with (
        patch.object(mx.array, "__matmul__", found.matmul(mx.array.__matmul__)),
        patch.object(mx, "matmul", found.matmul(mx.matmul)),
        patch.object(mx, "addmm", found.addmm(mx.addmm)),
        patch.object(mx.fast, "scaled_dot_product_attention", found.attention(mx.fast.scaled_dot_product_attention)),
        patch.object(mx, "grad", found.differentiated(mx.grad)),
        patch.object(mx, "value_and_grad", found.differentiated(mx.value_and_grad)),
        patch.object(mx, "vjp", found.vjp(mx.vjp)),
    ):
        yield found
