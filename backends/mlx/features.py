"""Token features on the device within a byte budget, in host memory within another, computed again beyond both."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from backends.interface import Floats, Ids

Stored = mx.array | NDArray[np.uint16] | NDArray[np.float32]  # uint16: the bits of bfloat16
Rows = Iterable[tuple[Ids, mx.array]]  # flat positions [n] of some tokens with their rows [n, H]
Recompute = Callable[[int, int, Callable[[Rows], Floats]], Floats]  # reduce(rows of tokens start:stop)


@dataclass
class MlxFeatureStore:
    """Rows of one batch in ``dtype``, chunk by chunk as they are computed, with the flat positions of their tokens.

    Tokens up to a cut live on the device, those up to another as numpy arrays of the same bits, and of
    the others ``recompute`` makes the rows anew for every reduction. Where a token lives depends on its
    flat position alone.
    """

    width: int  # H
    dtype: mx.Dtype
    budgets: tuple[int, int]  # bytes on the device and the host
    recompute: Recompute
    chunks: list[tuple[Ids, Stored]] = field(default_factory=list)

    @property
    def cuts(self) -> tuple[int, int]:
        """How many tokens there is room for on the device, and on device and host together."""
        device, host = (budget // (self.width * self.dtype.size) for budget in self.budgets)
        return device, device + host

    def cut(self, positions: Ids, rows: mx.array) -> list[tuple[Ids, mx.array, bool]]:
        """Of the rows [n, H] of the tokens at ``positions`` those there is room for, not evaluated: where, what, and
        whether on the host."""
        device, kept = self.cuts
        places = (positions < device, False), ((positions >= device) & (positions < kept), True)
        # Always a copy: a slice would keep the whole array it was taken from.
        return [
            (positions[inside], rows[mx.array(np.flatnonzero(inside))].astype(self.dtype), on_host)
            for inside, on_host in places
            if inside.any()
        ]

    def keep(self, parts: list[tuple[Ids, mx.array, bool]]) -> None:
        """Keep what was ``cut`` and is evaluated."""
        self.chunks += [(positions, to_host(rows) if on_host else rows) for positions, rows, on_host in parts]


@dataclass
class MlxFeatures:
    """The proxies v_t = scale_t · row_t of N tokens of a store: weighted sums and projections over its chunks.

    Arithmetic is float32 within a chunk and float64 over chunks.
    """

    store: MlxFeatureStore
    scale: Floats  # [N] float64
    first: int = 0  # flat position of the first token

    def weighted_sum(self, weights: Floats) -> Floats:
        """Σ_t weights[s, t]·v_t for weights [S, N], float64 [S, H]."""
        factors = (weights * self.scale).astype(np.float32)

        def add(total: Floats, at: Ids, rows: mx.array) -> None:
            # One matrix-vector product a direction: a matrix product may run in reduced precision on a GPU.
            total += np.array(mx.stack([mx.array(row[at]) @ rows for row in factors]), dtype=np.float64)

        return self._reduce((len(weights), self.store.width), add)

    def project(self, direction: Floats) -> Floats:
        """⟨v_t, direction⟩ for every token, float64 [N]."""
        column = mx.array(direction.astype(np.float32))
        return self._each(lambda rows: rows @ column) * self.scale

    def squared_norms(self) -> Floats:
        """‖v_t‖² for every token, float64 [N]."""
        return self._each(lambda rows: mx.sum(mx.square(rows), axis=-1)) * self.scale**2

    def slice(self, start: int, stop: int) -> MlxFeatures:
        """The features of tokens start:stop, a view that is valid until this one is closed."""
        return MlxFeatures(self.store, self.scale[start:stop], self.first + start)

    def close(self) -> None:
        """Free the memory. Closing twice is harmless."""
        self.store.__dict__.clear()
        mx.clear_cache()

    def _each(self, function: Callable[[mx.array], mx.array]) -> Floats:
        """One number for every token, from its row."""

        def fill(result: Floats, at: Ids, rows: mx.array) -> None:
            result[at] = np.array(function(rows))

        return self._reduce((len(self.scale),), fill)

    def _reduce(self, shape: tuple[int, ...], add: Callable[[Floats, Ids, mx.array], None]) -> Floats:
        """What ``add(result, at, rows)`` makes of float64 zeros over all tokens, ``rows`` [c, H] being those ``at``.

        Rows that are computed again may have to be begun anew where memory runs out: they add to zeros of their own.
        """
        last = self.first + len(self.scale)

        def total(chunks: Iterable[tuple[Ids, Stored]]) -> Floats:
            result = np.zeros(shape)
            for positions, stored in chunks:
                inside = np.flatnonzero((positions >= self.first) & (positions < last))
                if len(inside):
                    rows = to_device(stored).astype(self.store.dtype).astype(mx.float32)
                    rows = rows if len(inside) == len(positions) else rows[mx.array(inside)]
                    add(result, positions[inside] - self.first, rows)
            return result

        result = total(self.store.chunks)
        kept = max(self.first, self.store.cuts[1])
        if kept < last:
            result += self.store.recompute(kept, last, total)
        return result


JOIN = 4096  # rows that are drawn a few at a time are joined so many together


class MlxFeatureCollector:
    """Keeps rows of tokens as they are drawn, on the device and then on the host within budgets.

    What is drawn beyond both is not kept, and then there are no features: a forward makes them all.
    """

    def __init__(self, width: int, dtype: mx.Dtype, budgets: tuple[int, int]) -> None:
        self.dtype = dtype
        self._width, self._budgets = width, budgets
        device, host = (budget // (width * dtype.size) for budget in budgets)
        self._limits = device, device + host  # rows on the device, and on both
        self._used = 0
        self._open: list[tuple[list[tuple[int, int]], mx.array]] = []
        self._joined: list[tuple[list[tuple[int, int]], Stored]] = []

    def put(self, tokens: list[tuple[int, int]], rows: mx.array, kept: list[int]) -> None:
        """Keep rows[kept]: those of ``tokens``, each a response and which token of it."""
        before, self._used = self._used, self._used + len(tokens)
        if self._used > self._limits[1]:
            self._open, self._joined = [], []
            return
        mine = rows if len(kept) == len(rows) else rows[mx.array(kept, dtype=mx.int32)]
        mx.async_eval(mine)
        if tokens:
            self._open.append((tokens, mine))
        if sum(len(each) for each, _ in self._open) >= JOIN:
            self._join(on_host=before >= self._limits[0])

    def discard(self, responses: Set[int]) -> None:
        """Forget what was kept of responses that are begun again."""
        for tokens in (*(tokens for tokens, _ in self._open), *(tokens for tokens, _ in self._joined)):
            tokens[:] = [(-1, 0) if token[0] in responses else token for token in tokens]

    def features(self, starts: Ids, scale: Floats) -> MlxFeatures | None:
        """The features of all tokens, with a factor for each [N]; None if some were not kept."""
        if self._used > self._limits[1]:
            return None
        self._join(on_host=self._used > self._limits[0])
        chunks: list[tuple[Ids, Stored]] = []
        for tokens, rows in self._joined:
            response, at = np.array(tokens).T
            chunks.append((np.where(response < 0, -1, starts[response] + at), rows))
        # Every token is here, whatever the budgets: there is nothing to compute again.
        kept = MlxFeatureStore(self._width, self.dtype, (len(scale) * self._width * self.dtype.size, 0), _never, chunks)
        return MlxFeatures(kept, scale)

    def _join(self, *, on_host: bool) -> None:
        if self._open:
            rows = mx.concatenate([rows for _, rows in self._open])
            mx.eval(rows)
            tokens = [token for tokens, _ in self._open for token in tokens]
            self._joined.append((tokens, to_host(rows) if on_host else rows))
            self._open = []


def _never(start: int, stop: int, reduce: Callable[[Rows], Floats]) -> Floats:
    raise AssertionError(f"tokens {start} to {stop} were kept")


def to_host(values: mx.array) -> Stored:
    """The same bits as a numpy array; numpy has no bfloat16."""
    return np.array(values.view(mx.uint16) if values.dtype == mx.bfloat16 else values)


def to_device(stored: Stored) -> mx.array:
    """The rows that ``to_host`` was given."""
    if isinstance(stored, mx.array):
        return stored
    values = mx.array(stored)
    return values.view(mx.bfloat16) if stored.dtype == np.uint16 else values
