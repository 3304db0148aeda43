"""Attention with capped scores (Gemma 2) over a packed row, by PyTorch's flex attention.

No fused kernel of PyTorch caps scores, but flex attention compiles one from functions of a score and of its place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.nn.functional import pad

from backends.batching import PackedBatch
from backends.torch.compiled_layers import compile_dynamic

STEP = 128  # rows are padded to multiples of this, the size of the mask's blocks


@dataclass(frozen=True)
class FlexLayout:
    """Which token of a packed row sees which, in blocks of 128 queries and 128 keys."""

    groups: Tensor  # [T] the prompt that each token belongs to, counted from 0; -1: padding
    responses: Tensor  # [T] the response, counted from 1 among all; 0: the token is of a prompt
    positions: Tensor  # [T] in its sequence
    masks: dict[int, BlockMask] = field(default_factory=dict)  # by window

    @classmethod
    def of(cls, batch: PackedBatch, device: torch.device) -> FlexLayout:
        """The layout of a packed batch."""
        # int32, because the mask's blocks are found by computing it for every pair of tokens once
        groups = np.full(len(batch.ids) + -len(batch.ids) % STEP, -1, np.int32)
        responses, positions = np.zeros_like(groups), np.zeros_like(groups)
        positions[: len(batch.ids)] = batch.positions
        count = 0
        for number, group in enumerate(batch.groups):
            begin = group.start + group.prompt
            groups[group.start : begin + group.responses.sum()] = number
            own = np.arange(count + 1, count + 1 + len(group.responses))
            responses[begin : begin + group.responses.sum()] = own.repeat(group.responses)
            count += len(own)
        tensors = [torch.from_numpy(array).to(device) for array in (groups, responses, positions)]
        return cls(tensors[0], tensors[1], tensors[2])

    def mask(self, window: int) -> BlockMask:
        """The mask of layers with a window, in tokens; 0 means all."""
        if window not in self.masks:
            size, device = len(self.groups), self.groups.device
            self.masks[window] = create_block_mask(self._sees(window), None, None, size, size, device=device)
        return self.masks[window]

    def _sees(self, window: int) -> Callable[..., Tensor]:
        groups, responses, positions = self.groups, self.responses, self.positions

        def sees(_: Tensor, __: Tensor, query: Tensor, key: Tensor) -> Tensor:
            age = positions[query] - positions[key]
            same = (responses[key] == 0) | (responses[key] == responses[query])
            seen = (groups[query] == groups[key]) & same & (age >= 0)
            return seen & (age < window) if window else seen

        return sees


@cache
def _cap(limit: float) -> Callable[..., Tensor]:
    def capped(score: Tensor, *_: Tensor) -> Tensor:
        return limit * torch.tanh(score / limit)

    return capped


@cache
def _kernel() -> Any:
    return compile_dynamic(flex_attention)


def attend_capped(
    query: Tensor, key: Tensor, value: Tensor, layout: FlexLayout, window: int, scaling: float | None, limit: float
) -> Tensor:
    """Outputs [T, heads, size] for queries [T, heads, size], and keys and values [T, fewer heads, size].

    Scores become limit · tanh(score / limit).
    """
    missing = len(layout.groups) - len(query)
    states = (pad(state, (0, 0, 0, 0, 0, missing)).transpose(0, 1)[None] for state in (query, key, value))
    found: Tensor = _kernel()(
        *states,
        score_mod=_cap(limit),
        block_mask=layout.mask(window),
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return found[0].transpose(0, 1)[: len(query)]
