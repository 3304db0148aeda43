"""Token features on the device within a byte budget, in host memory within another, computed again beyond both."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from backends.interface import Floats, Ids

_CHUNK = 1024  # tokens whose rows are float64 at a time

# Host memory comes in pieces of so many bytes: CUDA's allocator of pinned memory rounds each up to a power of two
# and keeps it for one of the same size, so one large block could take twice its budget, and those of several
# sizes would pile up.
_PIECE_BYTES = 2**30

Rows = Iterable[tuple[Ids, Tensor]]  # flat positions [n] of some tokens with their rows [n, H]
Recompute = Callable[[int, int, Callable[[Rows], Tensor]], Tensor]  # reduce(rows of tokens start:stop)
_At = slice | Tensor  # indices of some tokens


class TorchFeatures:
    """The proxies v_t = scale_t · row_t of N tokens, in flat order.

    Tokens up to a cut live on the device, those up to another in host memory (pinned, for CUDA), and of the
    others ``recompute`` makes the rows anew for every reduction. Where a token lives depends on its flat
    position alone, so results do not depend on how the batch was computed.
    Reductions are in float64: they take the time of reading the rows, and a float32 product was
    measured to be off by 4e-5 after a few thousand tokens.
    """

    def __init__(
        self, stores: Sequence[Tensor], scale: Tensor, recompute: Recompute, first: int = 0, *, together: bool = False
    ) -> None:
        self._stores = stores  # [C, H] on the device, then pieces [K_i, H] on the host; C + Σ K_i ≤ N
        self._scale = scale  # [N] float32, on the device
        self._recompute = recompute
        self._first = first  # what ``recompute`` calls the first token here
        self._together = together  # some rank has rows to compute again, which all ranks do at the same time

    @classmethod
    def allocate(
        cls,
        count: int,
        size: int,
        dtype: torch.dtype,
        device: torch.device,
        budgets: tuple[int, int],
        recompute: Recompute,
        anywhere: Callable[[bool], bool] = lambda here: False,
    ) -> TorchFeatures:
        """Room for ``count`` features of ``size`` numbers, as far as the bytes on device and host go.

        ``anywhere`` tells whether rows are left over on some rank that computes in step with this one.
        """
        row = size * dtype.itemsize
        cut = min(count, budgets[0] // row)
        rest = min(count - cut, budgets[1] // row)
        piece = max(1, _PIECE_BYTES // (row * _CHUNK)) * _CHUNK  # whole chunks: sums do not depend on the pieces
        stores = [torch.empty(cut, size, dtype=dtype, device=device)]
        for start in range(0, rest, piece):
            rows = min(piece, rest - start)
            stores.append(torch.empty(rows, size, dtype=dtype, pin_memory=device.type == "cuda"))
        together = anywhere(cut + rest < count)
        return cls(stores, torch.ones(count, device=device), recompute, together=together)

    def put(self, positions: Ids, rows: Tensor, scale: Tensor | None = None) -> None:
        """Store rows [n, H] of the tokens at flat ``positions``, to be multiplied by ``scale`` [n]."""
        first = 0
        for store in self._stores:
            mine = (positions >= first) & (positions < first + len(store))
            if mine.any():
                there = torch.from_numpy(positions[mine] - first).to(store.device)
                here = torch.from_numpy(np.flatnonzero(mine)).to(rows.device)
                store[there] = rows[here].to(store.device, store.dtype)
            first += len(store)
        if scale is not None:
            self._scale[torch.from_numpy(positions).to(scale.device)] = scale

    def weighted_sum(self, weights: Floats) -> Floats:
        """Σ_t weights[s, t]·v_t for weights [S, N], float64 [S, H]."""
        factors = self._vector(weights) * self._scale

        def add(total: Tensor, at: _At, rows: Tensor) -> None:
            total += factors[:, at] @ rows

        return self._reduce((len(factors), self._stores[0].shape[1]), add)

    def project(self, direction: Floats) -> Floats:
        """⟨v_t, direction⟩ for every token, float64 [N]."""
        vector = self._vector(direction)
        return self._each(lambda rows, scale: (rows @ vector) * scale)

    def squared_norms(self) -> Floats:
        """‖v_t‖² for every token, float64 [N]."""
        return self._each(lambda rows, scale: torch.linalg.vecdot(rows, rows) * scale**2)

    def slice(self, start: int, stop: int) -> TorchFeatures:
        """The features of tokens start:stop; shares the memory."""
        on_device, *pieces = self._stores
        stores, first = [on_device[start:stop]], len(on_device)
        for piece in pieces:
            if start < first + len(piece) and first < stop:
                stores.append(piece[max(0, start - first) : stop - first])
            first += len(piece)
        recompute, first = self._recompute, self._first + start
        return TorchFeatures(stores, self._scale[start:stop], recompute, first, together=self._together)

    def close(self) -> None:
        """Free the memory."""
        self.__dict__.clear()

    def _vector(self, array: Floats) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array, dtype=np.float64)).to(self._scale.device)

    def _each(self, function: Callable[[Tensor, Tensor], Tensor]) -> Floats:
        """One number for every token, from its row and scale."""

        def fill(result: Tensor, at: _At, rows: Tensor) -> None:
            result[at] = function(rows, self._scale[at])

        return self._reduce((len(self._scale),), fill)

    def _reduce(self, shape: tuple[int, ...], add: Callable[[Tensor, _At, Tensor], None]) -> Floats:
        """What ``add(result, at, rows)`` makes of float64 zeros over all tokens, ``rows`` [c, H] being those ``at``.

        Rows that are computed again may have to be begun anew where memory runs out: they add to zeros of their own.
        """

        def total(chunks: Iterable[tuple[_At, Tensor]]) -> Tensor:
            result = torch.zeros(shape, dtype=torch.float64, device=self._scale.device)
            for at, rows in chunks:
                add(result, at, rows.to(result.device, self._stores[0].dtype, non_blocking=True).double())
            return result

        result = total(self._kept())
        kept, count = sum(map(len, self._stores)), len(self._scale)
        if kept < count or self._together:
            result += self._recompute(self._first + kept, self._first + count, lambda rows: total(self._split(rows)))
        return result.cpu().numpy()

    def _kept(self) -> Iterator[tuple[_At, Tensor]]:
        first = 0
        for store in self._stores:
            for rows in store.split(_CHUNK):
                yield slice(first, first + len(rows)), rows
                first += len(rows)

    def _split(self, found: Rows) -> Iterator[tuple[_At, Tensor]]:
        for positions, rows in found:
            at = torch.from_numpy(positions - self._first).to(self._scale.device)
            yield from zip(at.split(_CHUNK), rows.split(_CHUNK), strict=True)
