"""Token features: the two reductions that the coefficients need, over the proxies v [N, H] in any storage."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import ArrayLike

from delta_cli.credit.checks import as_numpy

if TYPE_CHECKING:  # the core itself needs nothing but numpy
    from backends.arrays import Floats, Ids


# Bytes of float64 in a chunk: fits the cache of a core and stays below BLAS's threshold for threads
_CHUNK_BYTES = 2**20


class FeatureReductions(Protocol):
    """Proxies v [N, H] of the response tokens, flat and in order.

    A direction is an array of any fixed shape; the core only adds, scales and multiplies directions elementwise.
    """

    def weighted_sum(self, weights: Floats) -> Floats:
        """Σ_t weights[s, t]·v_t for weights [S, N]: one direction for each of S rows."""

    def project(self, direction: Floats) -> Floats:
        """⟨v_t, direction⟩ for every token, [N]."""


class DenseFeatures:
    """v = scale·hidden, never materialised: rows of a numpy matrix with a factor each.

    Products run in float64, chunk by chunk, whatever the type of ``hidden``.
    """

    def __init__(self, hidden: Floats, scale: Floats | None = None) -> None:
        self.hidden = hidden  # [N, H]
        self.scale = np.ones(len(hidden)) if scale is None else np.asarray(scale, np.float64)  # [N]

    def _chunks(self) -> Iterator[tuple[slice, Floats]]:
        tokens, width = self.hidden.shape
        size = max(1, _CHUNK_BYTES // (8 * max(width, 1)))
        for first in range(0, tokens, size):
            part = slice(first, min(first + size, tokens))
            yield part, self.hidden[part].astype(np.float64, copy=False)

    def weighted_sum(self, weights: ArrayLike) -> Floats:
        """Σ_t weights[s, t]·v_t, float64 [S, H], for weights [S, N]."""
        weights = np.asarray(weights, np.float64)
        if weights.ndim != 2 or weights.shape[1] != len(self.hidden):
            raise ValueError(f"weights must be [S, N] with N = {len(self.hidden)} features, not {list(weights.shape)}")
        total = np.zeros((len(weights), self.hidden.shape[1]))
        for part, hidden in self._chunks():
            total += (weights[:, part] * self.scale[part]) @ hidden
        return total

    def project(self, direction: ArrayLike) -> Floats:
        """⟨v_t, direction⟩, float64 [N], for a direction [H]."""
        direction = np.asarray(direction, np.float64)
        result = np.empty(len(self.hidden))
        for part, hidden in self._chunks():
            result[part] = hidden @ direction
        return result * self.scale

    def squared_norms(self) -> Floats:
        """‖v_t‖², float64 [N]."""
        result = np.empty(len(self.hidden))
        for part, hidden in self._chunks():
            result[part] = np.einsum("th,th->t", hidden, hidden)
        return result * self.scale**2

    def slice(self, start: int, stop: int) -> DenseFeatures:
        """The features of tokens start:stop, without a copy."""
        return DenseFeatures(self.hidden[start:stop], self.scale[start:stop])


class JoinedFeatures:
    """The features of several runs of tokens, one after another; ``counts`` are the tokens of each."""

    def __init__(self, parts: Sequence[Any], counts: Sequence[int]) -> None:
        self._parts = list(parts)
        self._ends = np.cumsum(counts)
        self._spans = [slice(int(end) - count, int(end)) for end, count in zip(self._ends, counts, strict=True)]

    def weighted_sum(self, weights: ArrayLike) -> Floats:
        """Σ_t weights[s, t]·v_t for weights [S, N]."""
        array = np.asarray(weights)
        found: Floats = sum(
            (part.weighted_sum(array[:, span]) for part, span in zip(self._parts, self._spans, strict=True)),
            start=np.zeros(()),
        )
        return found

    def project(self, direction: ArrayLike) -> Floats:
        """⟨v_t, direction⟩, [N]."""
        return np.concatenate([np.zeros(0), *(part.project(direction) for part in self._parts)])

    def squared_norms(self) -> Floats:
        """‖v_t‖², [N]."""
        return np.concatenate([np.zeros(0), *(part.squared_norms() for part in self._parts)])

    def slice(self, start: int, stop: int) -> JoinedFeatures:
        """The features of tokens start:stop."""
        parts, counts = [], []
        for part, span in zip(self._parts, self._spans, strict=True):
            first, last = max(start, span.start), min(stop, span.stop)
            if first < last:
                parts.append(part.slice(first - span.start, last - span.start))
                counts.append(last - first)
        return JoinedFeatures(parts, counts)

    def close(self) -> None:
        """Free all of them."""
        for part in self._parts:
            part.close()


class SelectedFeatures:
    """The features of some of M tokens, those at ``places``, ascending, each multiplied by its factor in ``scale``."""

    def __init__(self, features: Any, places: Ids, count: int, scale: Floats | None = None) -> None:
        self._features = features
        self._places = places  # [N]
        self._count = count  # M
        self._scale = np.ones(len(places)) if scale is None else scale  # [N]

    def weighted_sum(self, weights: ArrayLike) -> Floats:
        """Σ_t weights[s, t]·v_t for weights [S, N]."""
        chosen = np.asarray(weights)
        every = np.zeros((len(chosen), self._count))
        every[:, self._places] = chosen * self._scale
        found: Floats = self._features.weighted_sum(every)
        return found

    def project(self, direction: ArrayLike) -> Floats:
        """⟨v_t, direction⟩, [N]."""
        found: Floats = self._features.project(direction)[self._places] * self._scale
        return found

    def squared_norms(self) -> Floats:
        """‖v_t‖², [N]."""
        found: Floats = self._features.squared_norms()[self._places] * self._scale**2
        return found

    def slice(self, start: int, stop: int) -> SelectedFeatures:
        """The features of tokens start:stop."""
        places = self._places[start:stop]
        first, last = (int(places[0]), int(places[-1]) + 1) if len(places) else (0, 0)
        return SelectedFeatures(
            self._features.slice(first, last), places - first, last - first, self._scale[start:stop]
        )

    def close(self) -> None:
        """Free all M."""
        self._features.close()


def output_row_features(hidden: ArrayLike, logprobs: ArrayLike) -> DenseFeatures:
    """The default proxy v = (1 − p)·h (method, section 2.1), from arrays of numpy or of any library with DLPack.

    ``hidden`` [N, H] is the input of the LM head at the position that predicts each token, of any float type numpy
    has; ``logprobs`` [N] are the tokens' log-probabilities. A torch tensor in host memory is not copied. Raises
    ValueError if the shapes do not fit or an array cannot be read.
    """
    hidden, logprobs = as_numpy(hidden, "hidden"), np.asarray(as_numpy(logprobs, "logprobs"), np.float64)
    if hidden.ndim != 2 or logprobs.shape != hidden.shape[:1]:
        raise ValueError(f"hidden must be [N, H] and logprobs [N]; got {list(hidden.shape)} and {list(logprobs.shape)}")
    return DenseFeatures(hidden, -np.expm1(logprobs))
