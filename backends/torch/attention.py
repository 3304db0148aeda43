"""Attention over a packed row of tokens: prompts to themselves, responses to their prompt and themselves.

Everything else in a transformer works token by token, so a row without padding, in which a prompt is
computed once for all its responses, costs what its tokens cost. Only attention must know who is whose.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.bias import CausalBias, causal_lower_right
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from backends.batching import PackedBatch
from backends.interface import Ids

NAME = "packed_sdpa"  # what a model is loaded with, as transformers knows it


@dataclass(frozen=True)
class Block:
    """Sequences of like length that share a prefix: a rectangle of ``rows`` × ``width`` queries.

    Padding is at the end of each row, where causal attention lets no token see it.
    """

    tokens: Tensor  # [rows · width] in the packed row; the last token of a sequence stands for its padding
    rows: int
    width: int
    prefix: slice  # of the packed row; empty for prompts


@dataclass(frozen=True)
class Layout:
    """Who attends to whom in a packed row of T tokens."""

    blocks: tuple[Block, ...]
    places: Tensor  # [T] where each token is among the queries of all blocks

    @classmethod
    def of(cls, batch: PackedBatch, device: torch.device) -> Layout:
        """The blocks of a packed batch: one or more of prompts, one or more of each prompt's responses."""
        places, blocks, end = np.empty(len(batch.ids), dtype=np.int64), [], 0
        for prefix, starts, lengths in _families(batch):
            for run in _alike(lengths):
                width = int(lengths[run][0])
                columns = np.arange(width)
                tokens = starts[run, None] + np.minimum(columns, lengths[run, None] - 1)
                real = columns < lengths[run, None]
                places[tokens[real]] = end + np.flatnonzero(real)
                end += tokens.size
                blocks.append(Block(torch.from_numpy(tokens.ravel()).to(device), len(run), width, prefix))
        return cls(tuple(blocks), torch.from_numpy(places).to(device))


def _families(batch: PackedBatch) -> Iterator[tuple[slice, Ids, Ids]]:
    """Sequences that share a prefix: the prefix, where each begins, how many tokens it has."""
    prompts = np.array([group.prompt for group in batch.groups])
    yield slice(0, 0), np.array([group.start for group in batch.groups]), prompts
    for group in batch.groups:
        first = group.start + group.prompt
        starts = first + np.cumsum(group.responses) - group.responses
        yield slice(group.start, first), starts, group.responses


def _alike(lengths: Ids) -> Iterator[Ids]:
    """Indices of ``lengths`` above 0, longest first, in runs of which none is half as long as the longest."""
    order = np.argsort(-lengths, kind="stable")
    order = order[lengths[order] > 0]
    while len(order):
        count = int(np.sum(2 * lengths[order] > lengths[order[0]]))
        yield order[:count]
        order = order[count:]


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    layout: Layout | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention of a layer, called by transformers with tensors [1, heads, T, size]; returns [1, T, heads, size].

    Without a layout it is that of transformers, with the mask it is given.
    """
    if layout is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **options)
    # Norms leave queries and keys in float32 under autocast, values come straight from a product.
    query, key, value = (states[0].transpose(0, 1).to(value.dtype) for states in (query, key, value))
    outputs = [_attend(block, query, key, value, scaling, sliding_window) for block in layout.blocks]
    return torch.cat(outputs).index_select(0, layout.places)[None], None


def _attend(
    block: Block, query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None
) -> Tensor:
    """The outputs [rows · width, heads, size] of a block's queries; tensors are [T, heads, size]."""
    shape = block.rows, block.width
    prefix = block.prefix.stop - block.prefix.start

    mask = _mask(block.width, prefix, window, query.device)
    # On CUDA only the flash kernel shares keys among heads, and it takes neither float32 nor a mask of its own.
    grouped = query.device.type == "cpu" or (query.dtype != torch.float32 and isinstance(mask, CausalBias | None))

    def seen(states: Tensor) -> Tensor:
        """Keys or values of what the queries see, [rows, heads, prefix + width, size]."""
        own = states.index_select(0, block.tokens).unflatten(0, shape)
        if prefix:
            own = torch.cat([states[block.prefix].expand(block.rows, -1, -1, -1), own], dim=1)
        return (own if grouped else own.repeat_interleave(query.shape[1] // own.shape[2], dim=2)).transpose(1, 2)

    own = query.index_select(0, block.tokens).unflatten(0, shape).transpose(1, 2)
    found = scaled_dot_product_attention(
        own, seen(key), seen(value), mask, is_causal=mask is None, scale=scaling, enable_gqa=grouped
    )
    return found.transpose(1, 2).flatten(0, 1)


def _mask(width: int, prefix: int, window: int | None, device: torch.device) -> Tensor | None:
    """Query i sees the keys up to prefix + i, the last ``window`` of them; None is plain causal attention."""
    if window and prefix + width > window:
        age = torch.arange(prefix, prefix + width, device=device)[:, None] - torch.arange(prefix + width, device=device)
        return (age >= 0) & (age < window)
    return causal_lower_right(width, prefix + width) if prefix else None


AttentionInterface.register(NAME, packed_attention)
