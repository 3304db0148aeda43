"""Keys and values of the responses being generated: in slots of equal size, or in pages of one pool.

Row i of a cache holds one response; its tokens stand at columns 0, 1, 2, …, so a token's column is its position.
``SlotCache`` gives each row the columns of the longest response and reads them under a mask. It needs no special
kernel. ``PagedCache`` gives each row the pages that it fills; it needs a kernel that follows a table of pages.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from backends.interface import Ids
from backends.torch.device import on_device
from backends.torch.recurrent import CarriedState
from backends.torch.row_states import RowStates


@dataclass(frozen=True)
class Prefix:
    """The result of prefilling one prompt."""

    length: int  # tokens of the prompt
    hidden: Tensor  # [H] the hidden state that predicts the first response token
    layers: list[tuple[Tensor, Tensor]]  # keys and values, each [T, heads, head size]; empty for recurrent layers
    states: dict[int, CarriedState] = field(default_factory=dict)  # of recurrent layers by number, each [1, ...]

    def clone(self) -> Prefix:
        """A copy that does not keep the prefill's batch alive."""
        states = {layer: state.map(torch.clone) for layer, state in self.states.items()}
        return Prefix(self.length, self.hidden.clone(), [(k.clone(), v.clone()) for k, v in self.layers], states)


@dataclass(frozen=True)
class PageTable:
    """Where the tokens of each row are in a pool of pages, as attention reads them."""

    pages: Tensor  # [rows, P] int32, the pages of each row in order
    lengths: Tensor  # [rows] int32, tokens of each row, the present one included
    windows: tuple[int, ...]  # window of each layer in tokens; 0: all


class KeyValueCache(RowStates, ABC):
    """Passed to transformers as ``past_key_values``; the first ``used`` of at most ``slots`` rows hold responses.

    A forward pass is prepared by ``step`` and ``open`` (one token for each of the first rows) or by ``open_chunk``
    (several tokens for some rows); each layer then calls ``update``. ``settle`` ends a pass over several tokens.
    ``address`` changes when the tensors move.
    """

    address = 0

    def __init__(self, slots: int, dtype: torch.dtype, windows: dict[str, int]) -> None:
        super().__init__(slots)
        self.used = 0
        self._dtype = dtype
        self._windows = windows  # the kinds of attention with their windows in tokens; 0: all
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        self._width = 0  # columns that the present pass attends to

    @property
    @abstractmethod
    def tokens(self) -> int:
        """How many tokens it can hold."""

    @abstractmethod
    def fits(self, lengths: Ids) -> bool:
        """Whether rows of these lengths could be held at the same time."""

    @abstractmethod
    def grow(self, lengths: Ids) -> None:
        """Make room so that row i can hold lengths[i] tokens. Raises OutOfMemoryError if the lengths do not fit."""

    @abstractmethod
    def admit(self, prefix: Prefix, count: int) -> None:
        """Place ``count`` responses of one prompt in the rows after those in use."""

    @abstractmethod
    def arrange(self, order: Ids) -> None:
        """Keep the rows ``order`` (indices of present rows) in that order, and drop the others."""

    @abstractmethod
    def step(self, lengths: Tensor, width: int, grain: int = 1) -> Any:
        """Prepare to append one token to each of the first rows; returns tensors for :meth:`open`.

        ``lengths`` [rows] are the tokens each response has; ``width`` − 1, known to the host, is the largest. Rows past
        the last response write where no token is.
        """

    @abstractmethod
    def open(self, lengths: Tensor, prepared: Any) -> dict[str, Any]:
        """The model's arguments for that step. Reads nothing but its arguments, so it can be recorded in a graph."""

    @abstractmethod
    def open_chunk(self, rows: Ids, lengths: Ids, counts: Ids) -> dict[str, Any]:
        """The model's arguments to append counts[i] tokens, padded to the largest count, to ``rows`` of ``lengths``.

        ``grow`` must have made room for them.
        """

    @abstractmethod
    def update(self, keys: Tensor, values: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Append keys and values [rows, heads, tokens, head size] of a layer; returns what attention reads."""

    def get_seq_length(self, layer: int = 0) -> int:
        """Columns before the present step; transformers calls it for default positions."""
        return self._width - 1

    def _masks(self, positions: Tensor, width: int) -> Any:
        """Which of ``width`` columns tokens at ``positions`` [rows, tokens] see: [rows, 1, tokens, width]."""
        columns = torch.arange(width, device=positions.device)
        age = positions[:, :, None] - columns  # position of the token in each column; negative if there is none
        masks = {
            kind: ((age >= 0) & (age < window) if window else age >= 0)[:, None]
            for kind, window in self._windows.items()
        }
        return masks if len(masks) > 1 else next(iter(masks.values()))


class SlotCache(KeyValueCache):
    """One slot per response, each as long as the longest. Both tensors are [slots, columns, heads, head size].

    The mask ``column <= length`` is all the bookkeeping, and one copy moves a response to another slot. If columns run
    out, the cache grows by half, up to ``most``; also when a prompt enters, because otherwise its first token would
    move everything.
    """

    def __init__(self, slots: int, most: int, dtype: torch.dtype, windows: dict[str, int]) -> None:
        super().__init__(slots, dtype, windows)
        self._most = most  # columns that the longest response may need
        self.columns = 0  # columns allocated; growing moves keys and values
        self._where: tuple[Tensor, Tensor] | None = None
        self._every_row = True

    @property
    def tokens(self) -> int:
        return self.slots * self._most

    def fits(self, lengths: Ids) -> bool:
        return len(lengths) <= self.slots

    def grow(self, lengths: Ids) -> None:
        """Does nothing: ``step`` grows the columns when they are reached."""

    def admit(self, prefix: Prefix, count: int) -> None:
        if not self._keys:
            self._keys = [k.new_empty(self.slots, 0, *k.shape[1:], dtype=self._dtype) for k, _ in prefix.layers]
            self._values = [v.new_empty(self.slots, 0, *v.shape[1:], dtype=self._dtype) for _, v in prefix.layers]
        self._reserve(prefix.length + 1)
        slots = slice(self.used, self.used + count)
        for i, (keys, values) in enumerate(prefix.layers):
            self._keys[i][slots, : prefix.length] = keys[: prefix.length]
            self._values[i][slots, : prefix.length] = values[: prefix.length]
        self._admit_states(prefix.states, self.used, count)
        self.used += count

    def arrange(self, order: Ids) -> None:
        targets = np.flatnonzero(order != np.arange(len(order)))
        if len(targets) and self._keys:
            device = self._keys[0].device
            there, here = (torch.from_numpy(rows).to(device) for rows in (targets, order[targets]))
            for store in (*self._keys, *self._values):
                store[there] = store[here]
        self._arrange_states(order)
        self.used = len(order)

    def step(self, lengths: Tensor, width: int, grain: int = 1) -> Any:
        """Returns the attention mask, which covers ``width`` columns, rounded up to a multiple of ``grain``, or all."""
        self._reserve(width)
        self._width = min(-(-width // grain) * grain, self.columns)
        return self._masks(lengths[:, None], self._width)

    def open(self, lengths: Tensor, prepared: Any) -> dict[str, Any]:
        self._open_states(len(lengths))
        self._where = torch.arange(len(lengths), device=lengths.device)[:, None], lengths[:, None]
        self._every_row = True
        return {"position_ids": lengths[:, None], "attention_mask": prepared}

    def open_chunk(self, rows: Ids, lengths: Ids, counts: Ids) -> dict[str, Any]:
        device = self._keys[0].device
        positions = on_device(lengths[:, None] + np.arange(counts.max()), device)
        self._width = int((lengths + counts.max()).max())
        self._reserve(self._width)
        self._where, self._every_row = (on_device(rows, device)[:, None], positions), False
        self._open_states(self._where[0][:, 0])
        return {"position_ids": positions, "attention_mask": self._masks(positions, self._width)}

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Returns keys and values so far [rows, heads, width, head size]."""
        assert self._where is not None
        stores = self._keys[layer], self._values[layer]
        for store, new in zip(stores, (keys, values), strict=True):
            store[self._where] = new.transpose(1, 2).to(self._dtype)
        rows: Any = slice(len(keys)) if self._every_row else self._where[0][:, 0]
        seen = [store[rows, : self._width].transpose(1, 2) for store in stores]
        return seen[0], seen[1]

    def _reserve(self, columns: int) -> None:
        if columns <= self.columns:
            return
        held = columns - 1
        self.address += 1
        self.columns = max(columns, min(max(held + held // 2, 64), self._most))
        for stores in (self._keys, self._values):
            for i, old in enumerate(stores):  # one layer at a time, because two copies of everything would not fit
                stores[i] = old.new_zeros(self.slots, self.columns, *old.shape[2:])
                stores[i][: self.used, : old.shape[1]] = old[: self.used]


class PagedCache(KeyValueCache):
    """Pages of ``page`` tokens, which rows take as they grow. Both tensors are [pages, page, heads, head size].

    ``tokens`` bounds what all rows hold together, ``most`` a single one. Page 0 belongs to no row: padding is written
    there. The table of pages is kept by the host, and copied to the device when it has changed.
    """

    def __init__(
        self,
        slots: int,
        most: int,
        tokens: int,
        page: int,
        dtype: torch.dtype,
        windows: dict[str, int],
        layer_windows: tuple[int, ...],
    ) -> None:
        super().__init__(slots, dtype, windows)
        self.page = page
        self.pages = 1 + tokens // page
        self._layer_windows = layer_windows
        self._free = list(range(self.pages - 1, 0, -1))
        self._held = np.zeros(slots, dtype=np.int64)  # pages of each row
        self._table = np.zeros((slots, -(-most // page)), dtype=np.int32)
        self._copy: Tensor | None = None  # of the table on the device, unless it has changed
        self._where: Tensor | None = None  # [rows, tokens] places in the flattened pool that the next tokens take
        self._rows: Tensor | None = None  # [rows, P] pages to read as one row, if several tokens are appended

    @property
    def tokens(self) -> int:
        return (self.pages - 1) * self.page

    def fits(self, lengths: Ids) -> bool:
        return len(lengths) <= self.slots and int(self._needed(lengths).sum()) < self.pages

    def _needed(self, lengths: Ids) -> Ids:
        return -(-np.asarray(lengths) // self.page)

    def grow(self, lengths: Ids) -> None:
        for row, needed in enumerate(self._needed(lengths).tolist()):
            while self._held[row] < needed:
                if not self._free:
                    raise torch.OutOfMemoryError("out of memory: the pool of keys and values is full")
                self._table[row, self._held[row]] = self._free.pop()
                self._held[row] += 1
                self._copy = None

    def admit(self, prefix: Prefix, count: int) -> None:
        if not self._keys:
            shape = (self.pages, self.page)
            self._keys = [k.new_zeros(*shape, *k.shape[1:], dtype=self._dtype) for k, _ in prefix.layers]
            self._values = [v.new_zeros(*shape, *v.shape[1:], dtype=self._dtype) for _, v in prefix.layers]
        rows = np.arange(self.used, self.used + count)
        self._admit_states(prefix.states, self.used, count)
        self.used += count
        lengths = self._held[: self.used] * self.page
        lengths[rows] = prefix.length + 1
        self.grow(lengths)
        positions = np.broadcast_to(np.arange(prefix.length), (count, prefix.length))
        places = on_device(self._places(rows, positions), self._keys[0].device)
        for stores, states in ((self._keys, 0), (self._values, 1)):
            for store, layer in zip(stores, prefix.layers, strict=True):
                store.flatten(0, 1)[places] = layer[states][: prefix.length].to(self._dtype).expand(count, -1, -1, -1)

    def _places(self, rows: Ids, positions: Ids) -> Ids:
        """The places [n, tokens] in the flattened pool of tokens at ``positions`` [n, tokens] of ``rows`` [n]."""
        pages = np.take_along_axis(self._table[rows].astype(np.int64), positions // self.page, axis=1)
        return np.asarray(pages * self.page + positions % self.page)

    def arrange(self, order: Ids) -> None:
        dropped = np.setdiff1d(np.arange(self.used), order)
        for row in dropped:
            self._free += self._table[row, : self._held[row]].tolist()
        if len(dropped) or not np.array_equal(order, np.arange(self.used)):
            self._copy = None
            for array in (self._table, self._held):
                array[: len(order)] = array[order]
                array[len(order) : self.used] = 0
        self._arrange_states(order)
        self.used = len(order)

    def step(self, lengths: Tensor, width: int, grain: int = 1) -> Any:
        """Returns the table of pages [rows, P]; ``grow`` must have made room."""
        self._width = width
        if self._copy is None:
            self._copy = on_device(self._table.copy(), lengths.device)
        return self._copy[: len(lengths)]

    def open(self, lengths: Tensor, prepared: Any) -> dict[str, Any]:
        self._open_states(len(lengths))
        page = (lengths // self.page)[:, None]
        self._where = prepared.gather(1, page) * self.page + (lengths % self.page)[:, None]
        self._rows = None
        table = PageTable(prepared, (lengths + 1).to(torch.int32), self._layer_windows)
        return {"position_ids": lengths[:, None], "pages": table}

    def open_chunk(self, rows: Ids, lengths: Ids, counts: Ids) -> dict[str, Any]:
        device = self._keys[0].device
        offsets = np.arange(counts.max())
        positions = lengths[:, None] + offsets
        real = offsets < counts[:, None]
        self._width = int((lengths + counts).max())
        self._where = on_device(np.where(real, self._places(rows, np.where(real, positions, 0)), 0), device)
        self._open_states(on_device(rows, device))
        self._rows = on_device(self._table[rows, : -(-self._width // self.page)].astype(np.int64), device)
        at = on_device(positions, device)
        return {"position_ids": at, "attention_mask": self._masks(at, self._width)}

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Returns both pools for a step, and [rows, heads, width, head size] for a chunk."""
        assert self._where is not None
        stores = self._keys[layer], self._values[layer]
        for store, new in zip(stores, (keys, values), strict=True):
            store.flatten(0, 1)[self._where] = new.transpose(1, 2).to(self._dtype)
        if self._rows is None:
            return stores
        seen = [store[self._rows].flatten(1, 2)[:, : self._width].transpose(1, 2) for store in stores]
        return seen[0], seen[1]
