"""Keys and values of the responses being generated: one slot per response, each starting at column 0."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Prefix:
    """The result of prefilling one prompt."""

    length: int  # tokens of the prompt
    hidden: Tensor  # [H] the hidden state that predicts the first response token
    layers: list[tuple[Tensor, Tensor]]  # keys and values, each [T, heads, head size]

    def clone(self) -> Prefix:
        """A copy that does not keep the prefill's batch alive."""
        return Prefix(self.length, self.hidden.clone(), [(k.clone(), v.clone()) for k, v in self.layers])


class SlotCache:
    """Passed to transformers as ``past_key_values``; the first ``used`` slots hold responses.

    ``windows`` names the kinds of attention with their windows in tokens (0: all). Rows differ in length, but each
    starts at column 0, so a token's column is its position: the mask ``column <= length`` is all the bookkeeping, and
    one copy moves a response to another slot. If columns run out, the cache grows by half, up to ``most``; also when a
    prompt enters, because otherwise its first token would move everything. Both tensors are [slots, columns, heads,
    head size].
    """

    def __init__(self, slots: int, most: int, dtype: torch.dtype, windows: dict[str, int]) -> None:
        self.slots = slots
        self._most = most  # columns that the longest response may need
        self.used = 0
        self._dtype = dtype
        self._windows = windows
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        self.columns = 0  # columns allocated; growing moves keys and values
        self._width = 0  # columns that the present step attends to
        self._where: tuple[Tensor, Tensor] | None = None

    def admit(self, prefix: Prefix, count: int) -> None:
        """Place ``count`` responses of one prompt in the slots after those in use."""
        if not self._keys:
            self._keys = [k.new_empty(self.slots, 0, *k.shape[1:], dtype=self._dtype) for k, _ in prefix.layers]
            self._values = [v.new_empty(self.slots, 0, *v.shape[1:], dtype=self._dtype) for _, v in prefix.layers]
        self._reserve(prefix.length + 1)
        slots = slice(self.used, self.used + count)
        for i, (keys, values) in enumerate(prefix.layers):
            self._keys[i][slots, : prefix.length] = keys[: prefix.length]
            self._values[i][slots, : prefix.length] = values[: prefix.length]
        self.used += count

    def move(self, sources: Tensor, targets: Tensor, used: int) -> None:
        """Move responses from slots ``sources`` to ``targets``; ``used`` slots remain."""
        if len(sources):
            for store in (*self._keys, *self._values):
                store[targets] = store[sources]
        self.used = used

    def step(self, lengths: Tensor, width: int, grain: int = 1) -> Any:
        """Prepare to append one token to each response; returns the attention mask.

        ``lengths`` [rows] are the tokens each response has; ``width`` − 1, known to the host, is the largest.
        Attention covers that many columns, rounded up to a multiple of ``grain``, or all. Rows past the last response
        write where no token is.
        """
        self._reserve(width)
        self._width = min(-(-width // grain) * grain, self.columns)
        self.write_at(lengths)
        columns = torch.arange(self._width, device=lengths.device)
        age = lengths[:, None] - columns  # position of the token in each column; negative if there is none
        masks = {
            kind: ((age >= 0) & (age < window) if window else age >= 0)[:, None, None]
            for kind, window in self._windows.items()
        }
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def write_at(self, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Direct the next keys and values of the first slots to these columns, [rows]; returns the places of both."""
        self._where = torch.arange(len(lengths), device=lengths.device), lengths
        return self._where

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Append keys and values [rows, heads, 1, head size]; returns those so far [rows, heads, width, head size]."""
        assert self._where is not None
        stores = self._keys[layer], self._values[layer]
        for store, new in zip(stores, (keys, values), strict=True):
            store[self._where] = new[:, :, 0].to(self._dtype)
        every, seen = slice(len(keys)), slice(self._width)
        return stores[0][every, seen].transpose(1, 2), stores[1][every, seen].transpose(1, 2)

    def get_seq_length(self, layer: int = 0) -> int:
        """Columns before the present step; transformers calls it for default positions."""
        return self._width - 1

    def _reserve(self, columns: int) -> None:
        if columns <= self.columns:
            return
        held = columns - 1
        self.columns = max(columns, min(max(held + held // 2, 64), self._most))
        for stores in (self._keys, self._values):
            for i, old in enumerate(stores):  # one layer at a time, because two copies of everything would not fit
                stores[i] = old.new_zeros(self.slots, self.columns, *old.shape[2:])
                stores[i][: self.used, : old.shape[1]] = old[: self.used]
