"""Keys and values of the responses being generated: one slot a response, every response from column 0."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Prefix:
    """What the prefill of one prompt leaves behind."""

    length: int  # tokens of the prompt
    hidden: Tensor  # [H] the head's input that predicts the first response token
    layers: list[tuple[Tensor, Tensor]]  # keys and values, each [T, heads, head size]

    def clone(self) -> Prefix:
        """A copy that keeps nothing of the prefill's batch alive."""
        return Prefix(self.length, self.hidden.clone(), [(k.clone(), v.clone()) for k, v in self.layers])


class SlotCache:
    """Handed to transformers as ``past_key_values``; the first ``used`` slots hold responses.

    ``windows`` names the kinds of attention and how many tokens each looks back on (0: all).
    PositionedRows differ in length, but each starts at column 0, so a token's column is its position: a mask
    ``column <= length`` is all the bookkeeping, and a response moves to another slot by one copy.
    Where columns run out, there come to be half as many again as are held, up to ``most``: for a prompt too, whose
    first token would else move everything. Both tensors are [slots, columns, heads, head size].
    """

    def __init__(self, slots: int, most: int, dtype: torch.dtype, windows: dict[str, int]) -> None:
        self.slots = slots
        self._most = most  # columns that a response can come to need
        self.used = 0
        self._dtype = dtype
        self._windows = windows
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        self.columns = 0  # there are; keys and values lie elsewhere once there are more
        self._width = 0  # columns that the present step attends to
        self._where: tuple[Tensor, Tensor] | None = None

    def admit(self, prefix: Prefix, count: int) -> None:
        """``count`` responses of one prompt enter, in the slots after those in use."""
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
        """Responses at slots ``sources`` move to ``targets``; ``used`` slots remain."""
        if len(sources):
            for store in (*self._keys, *self._values):
                store[targets] = store[sources]
        self.used = used

    def step(self, lengths: Tensor, width: int, grain: int = 1) -> Any:
        """Prepare to append one token to each response; returns the attention mask.

        ``lengths`` [rows] are the tokens each has, ``width`` − 1 the largest of them, known to the host. As many
        columns are attended to, rounded up to a multiple of ``grain``, or all. Rows past the last response write
        where none is.
        """
        self._reserve(width)
        self._width = min(-(-width // grain) * grain, self.columns)
        self.write_at(lengths)
        columns = torch.arange(self._width, device=lengths.device)
        age = lengths[:, None] - columns  # of the token in a column; negative where there is none
        masks = {
            kind: ((age >= 0) & (age < window) if window else age >= 0)[:, None, None]
            for kind, window in self._windows.items()
        }
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def write_at(self, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """The next keys and values of the first slots come to lie in these columns, [rows]; the places of both."""
        self._where = torch.arange(len(lengths), device=lengths.device), lengths
        return self._where

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Append keys and values [rows, heads, 1, head size]; returns all of them, [rows, heads, width, head size]."""
        assert self._where is not None
        stores = self._keys[layer], self._values[layer]
        for store, new in zip(stores, (keys, values), strict=True):
            store[self._where] = new[:, :, 0].to(self._dtype)
        every, seen = slice(len(keys)), slice(self._width)
        return stores[0][every, seen].transpose(1, 2), stores[1][every, seen].transpose(1, 2)

    def get_seq_length(self, layer: int = 0) -> int:
        """Columns before the present step; transformers asks where it needs a default position."""
        return self._width - 1

    def _reserve(self, columns: int) -> None:
        if columns <= self.columns:
            return
        held = columns - 1
        self.columns = max(columns, min(max(held + held // 2, 64), self._most))
        for stores in (self._keys, self._values):
            for i, old in enumerate(stores):  # one layer at a time: two copies of everything would not fit
                stores[i] = old.new_zeros(self.slots, self.columns, *old.shape[2:])
                stores[i][: self.used, : old.shape[1]] = old[: self.used]
