"""Token features on the device, the part beyond a byte budget in host memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from backends.interface import Floats, Ids

Stored = mx.array | NDArray[np.uint16] | NDArray[np.float32]  # uint16: the bits of bfloat16


@dataclass
class FeatureStore:
    """Features of one batch as they are computed: chunks [n, H] with the flat positions of their tokens.

    Stored in ``dtype`` on the device until they fill ``budget`` bytes, then as numpy arrays of the
    same bits. Arithmetic is float32 within a chunk and float64 over chunks.
    """

    width: int  # H
    dtype: mx.Dtype
    budget: int
    used: int = 0
    chunks: list[tuple[Stored, Ids]] = field(default_factory=list)

    def append(self, values: mx.array, positions: Ids) -> None:
        """Keep the features [n, H] of the tokens at ``positions`` [n]."""
        values = values.astype(self.dtype)
        mx.eval(values)
        if self.used + values.nbytes > self.budget:
            self.chunks.append((to_host(values), positions))
        else:
            self.used += values.nbytes
            self.chunks.append((values, positions))


@dataclass
class MlxFeatures:
    """The features of tokens ``start:stop`` of a store: weighted sums and projections over all chunks."""

    store: FeatureStore
    start: int
    stop: int

    def weighted_sum(self, weights: Floats) -> Floats:
        """Σ_t weights[s, t]·v_t for weights [S, N], float64 [S, H]."""
        total = np.zeros((len(weights), self.store.width))
        for values, tokens in self._chunks():
            # One matrix-vector product a direction: a matrix product may run in reduced precision on a GPU.
            parts = [mx.array(row[tokens].astype(np.float32)) @ values for row in weights]
            total += np.array(mx.stack(parts), dtype=np.float64)
        return total

    def project(self, direction: Floats) -> Floats:
        """⟨v_t, direction⟩ for every token, float64 [N]."""
        column = mx.array(direction.astype(np.float32))
        return self._each(lambda values: values @ column)

    def squared_norms(self) -> Floats:
        """‖v_t‖² for every token, float64 [N]."""
        return self._each(lambda values: mx.sum(mx.square(values), axis=-1))

    def slice(self, start: int, stop: int) -> MlxFeatures:
        """The features of tokens start:stop, a view that is valid until this one is closed."""
        return MlxFeatures(self.store, self.start + start, min(self.start + stop, self.stop))

    def close(self) -> None:
        """Free the memory. Closing twice is harmless."""
        self.store.chunks.clear()
        mx.clear_cache()

    def _each(self, function: Callable[[mx.array], mx.array]) -> Floats:
        out = np.zeros(self.stop - self.start)
        for values, tokens in self._chunks():
            out[tokens] = np.array(function(values))
        return out

    def _chunks(self) -> Iterator[tuple[mx.array, Ids]]:
        """The float32 features of every chunk that reaches into the view, with their tokens' places in it."""
        for stored, positions in self.store.chunks:
            inside = np.flatnonzero((positions >= self.start) & (positions < self.stop))
            if len(inside):
                values = to_device(stored)
                values = values if len(inside) == len(positions) else values[mx.array(inside)]
                yield values.astype(mx.float32), positions[inside] - self.start


def to_host(values: mx.array) -> Stored:
    """The same bits as a numpy array; numpy has no bfloat16."""
    return np.array(values.view(mx.uint16) if values.dtype == mx.bfloat16 else values)


def to_device(stored: Stored) -> mx.array:
    """What ``to_host`` was given."""
    if isinstance(stored, mx.array):
        return stored
    values = mx.array(stored)
    return values.view(mx.bfloat16) if stored.dtype == np.uint16 else values
