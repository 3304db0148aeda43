"""The states of recurrent layers for the rows of a cache, one row for each response being generated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from backends.interface import Ids
from backends.torch.device import on_device
from backends.torch.recurrent import CarriedState


class RowState(CarriedState):
    """The states of one layer for some rows; a pass changes them in place."""

    def update_conv_state(
        self, inputs: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None, **_: Any
    ) -> Tensor:
        kept = self.conv[state_idx]
        padded = super().update_conv_state(inputs, layer_idx, state_idx, conv_kernel_size)
        self.conv[state_idx] = kept.copy_(self.conv[state_idx])
        return padded

    def update_recurrent_state(self, state: Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> Tensor:
        return self.recurrent[state_idx].copy_(state)

    def is_recording_past(self, layer_idx: int) -> bool:
        return False


class RowStates:
    """The cache that transformers' recurrent layers read and write, a state for each row.

    A pass is prepared by ``_open_states``. If it takes the first rows it works on them in place; for other rows it
    works on copies, which ``settle`` writes back.
    """

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self._states: dict[int, RowState] = {}  # by layer; tensors [slots, ...], allocated when the first prompt enters
        self._state_rows: int | Tensor = 0  # those of the present pass: the first n, or indices
        self._copies: dict[int, RowState] = {}  # by layer, of the rows of the present pass

    def _admit_states(self, states: Mapping[int, CarriedState], first: int, count: int) -> None:
        """Place the states after one prompt, [1, ...] each, in ``count`` rows."""
        for layer, state in states.items():
            if layer not in self._states:
                empty = state.map(lambda part: part.new_zeros(self.slots, *part.shape[1:]))
                self._states[layer] = RowState(empty.conv, empty.recurrent)
            for store, part in self._states[layer].pairs(state):
                store[first : first + count] = part

    def _arrange_states(self, order: Ids) -> None:
        """Keep the rows ``order`` in that order."""
        targets = np.flatnonzero(order != np.arange(len(order)))
        for state in self._states.values():
            for store, _ in state.pairs(state):
                there, here = (on_device(rows, store.device) for rows in (targets, order[targets]))
                store[there] = store[here]

    def states_of(self, row: int) -> dict[int, CarriedState]:
        """Copies of the present states of one row, by layer."""
        return {layer: state.map(lambda part: part[row : row + 1].clone()) for layer, state in self._states.items()}

    def restore(self, row: int, states: Mapping[int, CarriedState]) -> None:
        """Put states that :meth:`states_of` returned into a row."""
        for layer, state in states.items():
            for store, part in self._states[layer].pairs(state):
                store[row : row + 1] = part

    def _open_states(self, rows: int | Tensor) -> None:
        """Prepare a pass over the first ``rows``, or over rows by index."""
        self._state_rows, self._copies = rows, {}

    def settle(self) -> None:
        """Write the states of a pass over rows by index back to these rows."""
        if isinstance(self._state_rows, Tensor):
            for layer, copies in self._copies.items():
                for store, part in self._states[layer].pairs(copies):
                    store[self._state_rows] = part
        self._copies = {}

    def _of(self, layer: int) -> RowState:
        if layer not in self._copies:
            rows = slice(self._state_rows) if isinstance(self._state_rows, int) else self._state_rows
            present = self._states[layer].map(lambda part: part[rows])
            self._copies[layer] = RowState(present.conv, present.recurrent)
        return self._copies[layer]

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """The last inputs of a convolution, for the rows of the present pass."""
        return self._of(layer_idx).get_conv_state(layer_idx, state_idx)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """The state of a recurrence, for the rows of the present pass."""
        return self._of(layer_idx).get_recurrent_state(layer_idx, state_idx)

    def update_conv_state(self, inputs: Tensor, layer_idx: int, state_idx: int = 0, **options: Any) -> Tensor:
        """See :class:`CarriedState`."""
        return self._of(layer_idx).update_conv_state(inputs, layer_idx, state_idx, **options)

    def update_recurrent_state(self, state: Tensor, layer_idx: int, state_idx: int = 0, **options: Any) -> Tensor:
        """See :class:`CarriedState`."""
        return self._of(layer_idx).update_recurrent_state(state, layer_idx, state_idx, **options)

    def is_recording_past(self, layer_idx: int) -> bool:
        """False: states are changed in place."""
        return False

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Whether the rows have begun."""
        return bool(self._states)
