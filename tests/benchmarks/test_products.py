"""The operations of MLX's matrix products are counted with those of the gradient."""

from __future__ import annotations

import pytest

pytest.importorskip("mlx.core", reason="MLX is not installed")

import mlx.core as mx
import mlx.nn as nn
from products import counted_products


def test_products_by_hand() -> None:
    """Two multiply-adds a number and inner index; a gradient takes two more products for each of the forward pass."""
    rows, inner, columns = 5, 3, 4
    forward = 2 * rows * inner * columns
    plain, biased = nn.Linear(inner, columns, bias=False), nn.Linear(inner, columns)
    x = mx.ones((rows, inner))
    with counted_products() as found:
        mx.eval(plain(x), biased(x))
        assert found.operations == 2 * forward
        mx.eval(nn.value_and_grad(plain, lambda x: plain(x).sum())(x))
        assert found.operations == 5 * forward
        mx.eval(mx.vjp(plain, [x], [mx.ones((rows, columns))]))
        assert found.operations == 8 * forward
    mx.eval(plain(x))
    assert found.operations == 8 * forward, "nothing is counted outside"


def test_attention_by_hand() -> None:
    """Scores and weighted values: two products of every query with every key, in each head."""
    q, k = mx.ones((1, 4, 6, 8)), mx.ones((1, 2, 10, 8))
    with counted_products() as found:
        mx.eval(mx.fast.scaled_dot_product_attention(q, k, k, scale=1.0))
    assert found.operations == 2 * (2 * 4 * 6 * 8 * 10)
