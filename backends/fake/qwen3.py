"""Qwen3 in numpy and float64, complete, forward and backward.

Every piece of the model is a function that returns its output and a closure ``back``. Given the derivative of the loss
with respect to the output, ``back`` adds the derivatives of the weights to ``grads`` and returns the derivative with
respect to the input. A forward pass that drops the closures is inference.

Letters in shapes: B sequences, T positions of them, S positions that can be attended to, H hidden
size, D head size, G key-value heads, M query heads that share one, I intermediate size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy.special import expit

from backends.arrays import Doubles
from backends.interface import Ids

NumpyWeights = dict[str, Doubles]  # by name, as in model.safetensors
Back = Callable[[Doubles], Doubles]

EMBEDDING, HEAD, FINAL_NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"


@dataclass(frozen=True)
class Qwen3Config:
    """The values of config.json on which the forward pass depends."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_epsilon: float
    rope_theta: float
    tied: bool  # the head is the embedding


@dataclass
class NumpyCache:
    """Rotated keys and values of the positions so far, one slot for each position: [layers, B, G, slots, D]."""

    keys: Doubles
    values: Doubles

    @classmethod
    def empty(cls, config: Qwen3Config, rows: int, slots: int) -> NumpyCache:
        shape = (config.layers, rows, config.kv_heads, slots, config.head_dim)
        return cls(np.zeros(shape), np.zeros(shape))

    def select(self, rows: Ids) -> NumpyCache:
        """A cache with the sequences at ``rows``, in that order; a sequence may be repeated."""
        return NumpyCache(self.keys[:, rows], self.values[:, rows])

    def extended(self, other: NumpyCache) -> NumpyCache:
        """A cache with the sequences of both, this one's first."""
        return NumpyCache(
            np.concatenate([self.keys, other.keys], axis=1), np.concatenate([self.values, other.values], axis=1)
        )

    def update(self, layer: int, positions: Ids, key: Doubles, value: Doubles) -> tuple[Doubles, Doubles]:
        """Store key and value [B, G, T, D] at ``positions`` [B, T]; returns all up to the largest one [B, G, S, D]."""
        row, used = np.arange(len(positions))[:, None], int(positions.max()) + 1
        for store, new in ((self.keys, key), (self.values, value)):
            store[layer][row, :, positions] = new.swapaxes(1, 2)
        return self.keys[layer, :, :, :used], self.values[layer, :, :, :used]


def rotate(x: Doubles, angles: Doubles) -> Doubles:
    """Rotary position embedding: entries i and i + D/2 of a head are rotated together. −angles is the inverse."""
    first, second = np.split(x, 2, axis=-1)
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


class Qwen3:
    """The model: weights, the gradient added up so far, and the forward pass."""

    def __init__(self, config: Qwen3Config, weights: NumpyWeights) -> None:
        self.config = config
        self.weights = weights
        self.grads = {name: np.zeros_like(weight) for name, weight in weights.items()}
        self.head = EMBEDDING if config.tied else HEAD

    def trunk(self, ids: Ids, positions: Ids, cache: NumpyCache | None = None) -> tuple[Doubles, Back]:
        """Ids and positions [B, T] to post-norm hidden states [B, T, H], the input of the head.

        Without a cache, the tokens attend to each other only, and their positions are 0, 1, 2, … in every row.
        """
        config, backs = self.config, []
        frequencies = config.rope_theta ** -(np.arange(0, config.head_dim, 2) / config.head_dim)
        angles = positions[:, None, :, None] * frequencies  # [B, 1, T, D/2]
        x = self.weights[EMBEDDING][ids]  # [B, T, H]
        for layer in range(config.layers):
            x, back = self._residual(f"model.layers.{layer}", layer, x, positions, angles, cache)
            backs.append(back)
        x, norm_back = self._rms_norm(FINAL_NORM, x)

        def back_trunk(dx: Doubles) -> Doubles:
            dx = norm_back(dx)
            for back in reversed(backs):
                dx = back(dx)
            np.add.at(self.grads[EMBEDDING], ids, dx)
            return dx

        return x, back_trunk

    def _residual(
        self, prefix: str, layer: int, x: Doubles, positions: Ids, angles: Doubles, cache: NumpyCache | None
    ) -> tuple[Doubles, Back]:
        """x + attention(norm(x)), then the same with the gated unit. [B, T, H]"""
        y, norm1 = self._rms_norm(f"{prefix}.input_layernorm.weight", x)
        y, attention = self._attention(f"{prefix}.self_attn", layer, y, positions, angles, cache)
        x = x + y
        y, norm2 = self._rms_norm(f"{prefix}.post_attention_layernorm.weight", x)
        y, swiglu = self._swiglu(f"{prefix}.mlp", y)

        def back(dx: Doubles) -> Doubles:
            dx = dx + norm2(swiglu(dx))
            return dx + norm1(attention(dx))

        return x + y, back

    def _attention(
        self, prefix: str, layer: int, x: Doubles, positions: Ids, angles: Doubles, cache: NumpyCache | None
    ) -> tuple[Doubles, Back]:
        """Causal attention; M query heads share a key-value head. [B, T, H]"""
        B, T, _ = x.shape
        G, D = self.config.kv_heads, self.config.head_dim
        M = self.config.heads // G
        query, back_query = self._head_vectors(f"{prefix}.q", x, angles)  # [B, G·M, T, D]
        key, back_key = self._head_vectors(f"{prefix}.k", x, angles)  # [B, G, T, D]
        value, back_value = self._linear(f"{prefix}.v_proj.weight", x)
        value = value.reshape(B, T, G, D).swapaxes(1, 2)  # [B, G, T, D]
        if cache is not None:
            key, value = cache.update(layer, positions, key, value)
        query = query.reshape(B, G, M, T, D)
        key, value = key[:, :, None], value[:, :, None]  # [B, G, 1, S, D]

        scores = query @ key.swapaxes(-1, -2) / np.sqrt(D)  # [B, G, M, T, S]
        seen = np.arange(key.shape[-2]) <= positions[:, None, None, :, None]
        scores = np.where(seen, scores, -np.inf)
        attention = np.exp(scores - scores.max(-1, keepdims=True))
        attention /= attention.sum(-1, keepdims=True)
        mixed = (attention @ value).reshape(B, G * M, T, D).swapaxes(1, 2).reshape(B, T, -1)  # [B, T, G·M·D]
        y, back_output = self._linear(f"{prefix}.o_proj.weight", mixed)

        def back(dy: Doubles) -> Doubles:
            dmixed = back_output(dy).reshape(B, T, G * M, D).swapaxes(1, 2).reshape(B, G, M, T, D)
            dvalue = (attention.swapaxes(-1, -2) @ dmixed).sum(2)  # [B, G, S, D]
            dattention = dmixed @ value.swapaxes(-1, -2)
            dscores = attention * (dattention - (dattention * attention).sum(-1, keepdims=True)) / np.sqrt(D)
            dquery = (dscores @ key).reshape(B, G * M, T, D)
            dkey = (dscores.swapaxes(-1, -2) @ query).sum(2)
            return back_query(dquery) + back_key(dkey) + back_value(dvalue.swapaxes(1, 2).reshape(B, T, G * D))

        return y, back

    def _head_vectors(self, prefix: str, x: Doubles, angles: Doubles) -> tuple[Doubles, Back]:
        """Queries or keys: projected, normalised within each head, rotated. [B, heads, T, D]"""
        B, T, _ = x.shape
        y, linear = self._linear(f"{prefix}_proj.weight", x)
        y, norm = self._rms_norm(f"{prefix}_norm.weight", y.reshape(B, T, -1, self.config.head_dim))

        def back(dy: Doubles) -> Doubles:
            return linear(norm(rotate(dy, -angles).swapaxes(1, 2)).reshape(B, T, -1))

        return rotate(y.swapaxes(1, 2), angles), back

    def _swiglu(self, prefix: str, x: Doubles) -> tuple[Doubles, Back]:
        """down(silu(gate(x)) · up(x)). [B, T, H]"""
        gate, back_gate = self._linear(f"{prefix}.gate_proj.weight", x)  # [B, T, I]
        up, back_up = self._linear(f"{prefix}.up_proj.weight", x)
        sigmoid = expit(gate)
        y, back_down = self._linear(f"{prefix}.down_proj.weight", gate * sigmoid * up)

        def back(dy: Doubles) -> Doubles:
            dproduct = back_down(dy)
            dgate = dproduct * up * sigmoid * (1 + gate * (1 - sigmoid))
            return back_gate(dgate) + back_up(dproduct * gate * sigmoid)

        return y, back

    def _rms_norm(self, name: str, x: Doubles) -> tuple[Doubles, Back]:
        """weight · x / sqrt(mean(x²) + epsilon), over the last axis."""
        weight = self.weights[name]
        inverse = 1 / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + self.config.norm_epsilon)
        unit = x * inverse

        def back(dy: Doubles) -> Doubles:
            self.grads[name] += (dy * unit).reshape(-1, len(weight)).sum(0)
            dunit = dy * weight
            dx: Doubles = inverse * (dunit - unit * np.mean(dunit * unit, axis=-1, keepdims=True))
            return dx

        return weight * unit, back

    def _linear(self, name: str, x: Doubles) -> tuple[Doubles, Back]:
        """x·Wᵀ over the last axis, as one matrix product, which is several times faster than one for each row."""
        weight, flat = self.weights[name], x.reshape(-1, x.shape[-1])
        y = (flat @ weight.T).reshape(*x.shape[:-1], -1)

        def back(dy: Doubles) -> Doubles:
            dflat = dy.reshape(-1, dy.shape[-1])
            self.grads[name] += dflat.T @ flat
            return (dflat @ weight).reshape(x.shape)

        return y, back
