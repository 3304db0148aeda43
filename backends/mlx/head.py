"""The LM head on its own: log-probabilities, entropies, proxies and gradients of one chunk of tokens.

All of it in float32, whatever the weights are stored in: products in bfloat16 have 8 bits, which is 0.03 nats
and more where there are 32,000 tokens. Weights in 16 bits are widened a block at a time.

Logits exist for one chunk at a time, in scoring for two (``computed_ahead``). The gradient is written out
instead of differentiated, because MLX evaluates the chunks of one graph side by side: checkpointed
chunks of a head were measured to keep more than twenty of them alive at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from backends.interface import Floats, Proxy

BLOCK = 2**14  # rows of the head that are widened at a time: 128 MiB of 2,048 numbers each
Part = TypeVar("Part")  # a tree with arrays
QUANTISED = (nn.QuantizedLinear, nn.QuantizedEmbedding)


@dataclass(frozen=True)
class MlxHead:
    """logits = h·Wᵀ with W [V, H], plain or quantised, as arrays of one moment."""

    name: str  # of the weight in the model
    weight: mx.array
    packing: dict[str, Any] | None  # of quantised weights: scales, biases, group_size, bits, mode
    bias: bool  # whether the module adds one, which this class does not
    softcap: float | None = None  # logits become softcap · tanh(logit / softcap)

    @classmethod
    def of(cls, module: nn.Module, path: str, softcap: float | None = None) -> MlxHead:
        """The head that ``module``, a linear layer or a tied embedding, computes, its logits within ± ``softcap``."""
        packing = None
        if isinstance(module, QUANTISED):
            packing = {key: getattr(module, key) for key in ("scales", "group_size", "bits", "mode")}
            packing["biases"] = module.get("biases")
        return cls(f"{path}.weight", module.weight, packing, "bias" in module, softcap)

    @property
    def width(self) -> int:
        """H, which quantised weights do not show."""
        return int(self.rows(mx.array([0])).shape[-1])

    def logits(self, hidden: mx.array) -> mx.array:
        """[..., H] → float32 [..., V]."""
        products = self._products(hidden.astype(mx.float32))
        return products if self.softcap is None else self.softcap * mx.tanh(products / self.softcap)

    def slopes(self, hidden: mx.array) -> mx.array | None:
        """d(capped logit)/d(product) of hidden states [n, H], [n, V]; None: 1 everywhere."""
        return None if self.softcap is None else 1 - mx.square(self.logits(hidden) / self.softcap)

    def _products(self, hidden: mx.array) -> mx.array:
        """h·Wᵀ: float32 [..., H] → [..., V]."""
        if self.packing:  # computes in the wider of the types of the hidden states and the scales
            return mx.quantized_matmul(hidden, self.weight, transpose=True, **self.packing)
        if self.weight.dtype == mx.float32:
            return hidden @ self.weight.T
        parts: list[mx.array] = []
        for block in self._blocks():
            # A block is widened when the one before has been used, so that one exists at a time.
            weight = mx.depends(self.weight[block], parts[-1]) if parts else self.weight[block]
            parts.append(hidden @ weight.astype(mx.float32).T)
        return mx.concatenate(parts, axis=-1)

    def transposed(self, over_vocabulary: mx.array) -> mx.array:
        """x·W: float32 [n, V] → [n, H]."""
        if self.packing:
            return mx.quantized_matmul(over_vocabulary, self.weight, transpose=False, **self.packing)
        if self.weight.dtype == mx.float32:
            return over_vocabulary @ self.weight
        total = mx.zeros((len(over_vocabulary), self.weight.shape[1]))
        for block in self._blocks():
            weight = mx.depends(self.weight[block], total)
            total = total + over_vocabulary[:, block] @ weight.astype(mx.float32)
        return total

    def _blocks(self) -> Iterator[slice]:
        return chunks(len(self.weight), BLOCK)

    def rows(self, ids: mx.array) -> mx.array:
        """W at ``ids``, of any shape: [..., H] float32."""
        if not self.packing:
            return self.weight[ids].astype(mx.float32)
        packing: dict[str, Any] = {
            key: _widened(value[ids]) if isinstance(value, mx.array) else value for key, value in self.packing.items()
        }
        return mx.dequantize(self.weight[ids], **packing).astype(mx.float32)

    def log_softmax(self, hidden: mx.array, temperature: float) -> mx.array:
        """log softmax(logits / temperature), float32 [n, V]."""
        logits = self.logits(hidden) / temperature
        return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def _widened(scales: mx.array) -> mx.array:
    """Scales as float32, in which rows are made of them; those of some kinds of quantisation are codes."""
    return scales.astype(mx.float32) if mx.issubdtype(scales.dtype, mx.floating) else scales


def pick(over_vocabulary: mx.array, targets: mx.array) -> mx.array:
    """The entry of each row at its target: [n, V], [n] → [n]."""
    return mx.take_along_axis(over_vocabulary, targets[:, None], axis=-1).squeeze(-1)


def entropy(log_softmax: mx.array) -> mx.array:
    """−Σ p·log p of each row, nats, [n]."""
    return -mx.sum(mx.exp(log_softmax) * log_softmax, axis=-1)


def proxies(head: MlxHead, hidden: mx.array, targets: mx.array, log_softmax: mx.array, proxy: Proxy) -> mx.array:
    """The token-gradient proxies v of a chunk, [n, H] (method, section 2); of ``output_row`` without its 1 − p."""
    if proxy.kind == "output_row":
        return hidden
    slopes = head.slopes(hidden)
    rows = head.rows(targets)
    if slopes is not None:
        rows = rows * pick(slopes, targets)[:, None]
    if proxy.kind == "hidden_exact":
        p = mx.exp(log_softmax)
        return rows - head.transposed(p if slopes is None else p * slopes)
    k = min(proxy.k, log_softmax.shape[-1])
    likeliest = mx.argpartition(-log_softmax, kth=k - 1, axis=-1)[:, :k]
    q = mx.softmax(mx.take_along_axis(log_softmax, likeliest, axis=-1), axis=-1)
    if slopes is not None:
        q = q * mx.take_along_axis(slopes, likeliest, axis=-1)
    return rows - (q[:, None, :] @ head.rows(likeliest)).squeeze(1)


def chunks(tokens: int, size: int) -> Iterator[slice]:
    """Slices of at most ``size`` that cover ``range(tokens)``."""
    return (slice(start, min(start + size, tokens)) for start in range(0, tokens, size))


def computed_ahead(parts: Iterable[Part]) -> Iterator[Part]:
    """Each of ``parts``, its arrays being computed; the next is under way while one is read, so at most two exist."""
    before: list[Part] = []
    for part in parts:
        mx.async_eval(part)
        yield from before
        before = [part]
    yield from before


def pullback(
    head: MlxHead,
    hidden: mx.array,
    targets: mx.array,
    slopes: Callable[[Floats], Floats],
    temperature: float,
    size: int,
    add: Callable[[mx.array], None] | None = None,
) -> mx.array:
    """The gradient of Σ c·logp for c = slopes(logp), float32 [n], with respect to the hidden states: float32 [n, H].

    What adds up to that with respect to the head, float32 [V, H], is handed to ``add`` as it comes.

    dlogp/dlogits = (onehot(y) − softmax(logits / temperature)) / temperature. Logits exist for ``size`` tokens at a
    time; of more tokens than that they are made twice, but for those that were at hand last.
    """
    parts = list(chunks(len(targets), size))
    found, at_hand = [], None
    for part in parts:
        at_hand = head.log_softmax(hidden[part], temperature)
        found.append(np.array(pick(at_hand, targets[part])))
    coefficients = mx.array(slopes(np.concatenate(found)).astype(np.float32)) / temperature
    dhidden: list[mx.array] = []
    for part in reversed(parts):
        scaled = coefficients[part]
        dlogits = mx.exp(head.log_softmax(hidden[part], temperature) if at_hand is None else at_hand)
        at_hand = None
        dlogits = (-scaled[:, None] * dlogits).at[mx.arange(len(scaled)), targets[part]].add(scaled)
        derivative = head.slopes(hidden[part])
        if derivative is not None:
            dlogits = dlogits * derivative
        dhidden.append(head.transposed(dlogits))
        mx.eval(dlogits, dhidden)  # before the next chunk's logits
        if add is not None:
            add(dlogits.T @ hidden[part].astype(mx.float32))
    return mx.concatenate(dhidden[::-1])


def loss_scale(gradient: mx.array) -> float:
    """The power of two that brings the largest entry near 1: below 6e-8 float16 has nothing, and a batch of many
    tokens gives each of them less."""
    largest = float(np.array(mx.max(mx.abs(gradient)))) if gradient.size else 0.0
    return 2.0 ** -round(math.log2(largest)) if 0 < largest < math.inf else 1.0
