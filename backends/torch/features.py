"""Token features: on the device within a byte budget, then in host memory within another, recomputed beyond."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from backends.interface import BackendError, Floats, Ids
from backends.torch.device import out_of_memory

_CHUNK = 1024  # tokens whose rows are converted to float64 at a time

# Host memory is allocated in pieces of this many bytes. CUDA's allocator of pinned memory rounds each up to a power
# of two and reuses it only for the same size, so one large block could take twice its budget, and blocks of
# different sizes would accumulate.
_PIECE_BYTES = 2**30
_DRAWN_BYTES = 2**26  # bytes in a piece of memory for sampled rows

PositionedRows = Iterable[tuple[Ids, Tensor]]  # flat positions [n] of some tokens, and their rows [n, H]
RecomputeRows = Callable[[int, int, Callable[[PositionedRows], Tensor]], Tensor]  # start, stop, reduce → its result
_At = slice | Tensor  # indices of some tokens
_Add = Callable[[Tensor, _At, Tensor], None]


class _Reductions(ABC):
    """The reductions over the proxies v_t = scale_t · row_t of N tokens, wherever the rows are stored.

    They run in float64, which takes no longer than reading the rows. A float32 product was measured to be off by 4e-5
    after a few thousand tokens.
    """

    _scale: Tensor  # [N] float32, on the device
    _width: int  # H

    @abstractmethod
    def _reduce(self, shape: tuple[int, ...], add: _Add) -> Floats:
        """Call ``add(result, at, rows)`` for all tokens, ``rows`` [c, H] being those ``at``; the result starts at 0."""

    def weighted_sum(self, weights: Floats) -> Floats:
        """Σ_t weights[s, t]·v_t for weights [S, N], float64 [S, H]."""
        factors = self._vector(weights) * self._scale

        def add(total: Tensor, at: _At, rows: Tensor) -> None:
            total += factors[:, at] @ rows

        return self._reduce((len(factors), self._width), add)

    def project(self, direction: Floats) -> Floats:
        """⟨v_t, direction⟩ for every token, float64 [N]."""
        vector = self._vector(direction)
        return self._each(lambda rows, scale: (rows @ vector) * scale)

    def squared_norms(self) -> Floats:
        """‖v_t‖² for every token, float64 [N]."""
        return self._each(lambda rows, scale: torch.linalg.vecdot(rows, rows) * scale**2)

    def close(self) -> None:
        """Free the memory."""
        self.__dict__.clear()

    def _vector(self, array: Floats) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array, dtype=np.float64)).to(self._scale.device)

    def _each(self, function: Callable[[Tensor, Tensor], Tensor]) -> Floats:
        """One number per token, from its row and scale."""

        def fill(result: Tensor, at: _At, rows: Tensor) -> None:
            result[at] = function(rows, self._scale[at])

        return self._reduce((len(self._scale),), fill)


class TorchFeatures(_Reductions):
    """The features of a forward pass, in flat order.

    Tokens up to one position are on the device, those up to a second one in host memory (pinned for CUDA), and
    ``recompute`` computes the rest anew for every reduction. The place of a token depends only on its flat position,
    so results do not depend on how the batch was computed.
    """

    def __init__(
        self,
        stores: Sequence[Tensor],
        scale: Tensor,
        recompute: RecomputeRows,
        first: int = 0,
        *,
        in_step: bool = False,
    ) -> None:
        self._stores = stores  # [C, H] on the device, then pieces [K_i, H] on the host; C + Σ K_i ≤ N
        self._width = stores[0].shape[1]
        self._scale = scale  # [N] float32, on the device
        self._recompute = recompute
        self._first = first  # the position of the first token for ``recompute``
        self._in_step = in_step  # some rank has rows to recompute, which all ranks do together

    @classmethod
    def allocate(
        cls,
        count: int,
        size: int,
        dtype: torch.dtype,
        device: torch.device,
        budgets: tuple[int, int],
        recompute: RecomputeRows,
        anywhere: Callable[[bool], bool] = lambda here: False,
    ) -> TorchFeatures:
        """Allocate ``count`` features of ``size`` numbers within the byte budgets of device and host.

        ``anywhere`` says whether any rank that computes in step with this one has rows to recompute.
        """
        row = size * dtype.itemsize
        cut = min(count, budgets[0] // row)
        rest = min(count - cut, budgets[1] // row)
        try:
            stores = _memory(cut, rest, size, dtype, device)
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
            raise BackendError(
                f"out of memory for the features of {count} tokens, with feature_bytes = {budgets[0]} and "
                f"feature_host_bytes = {budgets[1]}; lower the first if the device is full, the second if the host is"
            ) from error
        in_step = anywhere(cut + rest < count)
        return cls(stores, torch.ones(count, device=device), recompute, in_step=in_step)

    def put(self, positions: Ids, rows: Tensor, scale: Tensor | None = None) -> None:
        """Store the rows [n, H] of the tokens at flat ``positions``, and the factors ``scale`` [n] of these rows."""
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

    def slice(self, start: int, stop: int) -> TorchFeatures:
        """The features of the tokens start:stop, in the same memory."""
        on_device, *pieces = self._stores
        stores, first = [on_device[start:stop]], len(on_device)
        for piece in pieces:
            if start < first + len(piece) and first < stop:
                stores.append(piece[max(0, start - first) : stop - first])
            first += len(piece)
        recompute, first = self._recompute, self._first + start
        return TorchFeatures(stores, self._scale[start:stop], recompute, first, in_step=self._in_step)

    def _reduce(self, shape: tuple[int, ...], add: _Add) -> Floats:
        """As above.

        Rows that are computed again are summed apart, since that may have to start over if memory runs out.
        """

        def total(chunks: Iterable[tuple[_At, Tensor]]) -> Tensor:
            result = torch.zeros(shape, dtype=torch.float64, device=self._scale.device)
            for at, rows in chunks:
                add(result, at, rows.to(result.device, self._stores[0].dtype, non_blocking=True).double())
            return result

        result = total(self._kept())
        kept, count = sum(map(len, self._stores)), len(self._scale)
        if kept < count or self._in_step:
            result += self._recompute(self._first + kept, self._first + count, lambda rows: total(self._split(rows)))
        return result.cpu().numpy()

    def _kept(self) -> Iterator[tuple[_At, Tensor]]:
        first = 0
        for store in self._stores:
            for rows in store.split(_CHUNK):
                yield slice(first, first + len(rows)), rows
                first += len(rows)

    def _split(self, found: PositionedRows) -> Iterator[tuple[_At, Tensor]]:
        for positions, rows in found:
            at = torch.from_numpy(positions - self._first).to(self._scale.device)
            yield from zip(at.split(_CHUNK), rows.split(_CHUNK), strict=True)


@dataclass
class _Drawn:
    """Rows of sampled tokens in a piece of memory that may have room for more."""

    rows: Tensor  # [K, H] on the device or the host
    places: Ids  # [K, 2] the response, and which of its tokens; −1 where there is none
    used: int = 0


class TorchFeatureCollector:
    """Keeps rows of tokens while they are sampled, in any order, on the device and then on the host within budgets.

    If some rows fit neither, there are no features, and a forward pass computes all of them later.
    """

    def __init__(self, width: int, dtype: torch.dtype, device: torch.device, budgets: tuple[int, int], most: int):
        row = width * dtype.itemsize
        self._width, self._dtype, self._device = width, dtype, device
        self._room = [min(most, budgets[0] // row), budgets[1] // row]  # rows left in the budgets of device and host
        self._piece = max(1, _DRAWN_BYTES // row)
        self._pieces: list[_Drawn] = []
        self._overflow = False

    def put(self, responses: Ids, at: Ids, rows: Tensor) -> None:
        """Keep the rows [n, H] of the tokens numbered ``at`` [n] in their ``responses`` [n]."""
        first = 0
        while first < len(responses) and not self._overflow:
            piece = self._open_piece()
            if piece is None:
                self._overflow = True
                self._pieces.clear()
                return
            count = min(len(responses) - first, len(piece.rows) - piece.used)
            here, there = slice(first, first + count), slice(piece.used, piece.used + count)
            piece.rows[there] = rows[here].to(piece.rows.device, self._dtype)
            piece.places[there] = np.stack([responses[here], at[here]], axis=1)
            piece.used += count
            first += count

    def discard(self, responses: Ids, drawn: Ids) -> None:
        """Drop the rows of the tokens from number ``drawn`` [n] on in ``responses`` [n], which are drawn again."""
        first = dict(zip(responses.tolist(), drawn.tolist(), strict=True))
        for piece in self._pieces:
            kept = np.array([first.get(response, np.inf) for response in piece.places[:, 0].tolist()])
            piece.places[piece.places[:, 1] >= kept] = -1

    def features(self, starts: Ids, scale: Tensor) -> DrawnFeatures | None:
        """The features of all tokens, with a scale for each [N]; None if some were not kept."""
        if self._overflow:
            return None
        parts = []
        for piece in self._pieces:
            inside = np.flatnonzero(piece.places[: piece.used, 0] >= 0)
            response, at = piece.places[inside].T
            positions = torch.from_numpy(starts[response] + at).to(scale.device)
            parts.append((piece.rows, torch.from_numpy(inside).to(piece.rows.device), positions))
        return DrawnFeatures(parts, scale, self._width)

    def _open_piece(self) -> _Drawn | None:
        """A piece of memory with free rows; None if the budgets are used up."""
        if self._pieces and self._pieces[-1].used < len(self._pieces[-1].rows):
            return self._pieces[-1]
        for where, device in enumerate((self._device, torch.device("cpu"))):
            count = min(self._piece, self._room[where])
            if count:
                self._room[where] -= count
                rows = torch.empty(count, self._width, dtype=self._dtype, device=device)
                self._pieces.append(_Drawn(rows, np.full((count, 2), -1)))
                return self._pieces[-1]
        return None


class DrawnFeatures(_Reductions):
    """The features of tokens as they were sampled: rows in any order, with the position of each."""

    def __init__(self, parts: Sequence[tuple[Tensor, Tensor, Tensor]], scale: Tensor, width: int) -> None:
        self._parts = parts  # rows [K, H], indices [k] of the used ones, their flat positions [k]
        self._scale = scale
        self._width = width

    def slice(self, start: int, stop: int) -> DrawnFeatures:
        """The features of the tokens start:stop, in the same memory."""
        parts = []
        for rows, index, positions in self._parts:
            inside = ((positions >= start) & (positions < stop)).nonzero()[:, 0]
            if len(inside):
                parts.append((rows, index[inside.to(index.device)], positions[inside] - start))
        return DrawnFeatures(parts, self._scale[start:stop], self._width)

    def _reduce(self, shape: tuple[int, ...], add: _Add) -> Floats:
        result = torch.zeros(shape, dtype=torch.float64, device=self._scale.device)
        for rows, index, positions in self._parts:
            for mine, at in zip(index.split(_CHUNK), positions.split(_CHUNK), strict=True):
                add(result, at, rows[mine].to(result.device).double())
        return result.cpu().numpy()


def _memory(device_rows: int, host_rows: int, size: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Rows of ``size`` numbers on the device, then those on the host in pieces of whole chunks, which sums go by."""
    piece = max(1, _PIECE_BYTES // (size * dtype.itemsize * _CHUNK)) * _CHUNK
    stores = [torch.empty(device_rows, size, dtype=dtype, device=device)]
    for start in range(0, host_rows, piece):
        rows = min(piece, host_rows - start)
        stores.append(torch.empty(rows, size, dtype=dtype, pin_memory=device.type == "cuda"))
    return stores
