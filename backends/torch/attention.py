"""Attention over a packed row of tokens: prompts to themselves, responses to their prompt and themselves.

Everything else in a transformer works token by token, so a row without padding, in which a prompt is
computed once for all its responses, costs what its tokens cost. Only attention must know who is whose.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_flash_attention
from torch.nn.attention.bias import CausalBias, causal_lower_right
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from backends.batching import PackedBatch
from backends.interface import Ids

NAME = "packed_rows"  # of this attention, among those that transformers knows


@dataclass(frozen=True)
class Block:
    """Sequences of like length that share a prefix: a rectangle of ``rows`` × ``width`` queries.

    Padding is at the end of each row, where causal attention lets no token see it.
    """

    rows: int
    width: int
    prompt: int | None  # the prefix of responses; None for prompts themselves


@dataclass(frozen=True)
class Layout:
    """Who attends to whom in a packed row of T tokens."""

    blocks: tuple[Block, ...]
    queries: Tensor  # [Q] tokens of the row as the blocks hold them; a sequence's last token stands for its padding
    places: Tensor  # [T] where each token is among the queries
    prompts: Tensor  # all tokens of prompts, one prompt after another
    prompt_sizes: tuple[int, ...]
    windows: tuple[int, ...]  # tokens that each layer looks back on; 0: all
    reached: set[int | None] = field(default_factory=set)  # layers whose attention has used the layout

    @classmethod
    def of(cls, batch: PackedBatch, windows: tuple[int, ...], device: torch.device) -> Layout:
        """The blocks of a packed batch: one or more of prompts, one or more of each prompt's responses."""
        places, end = np.empty(len(batch.ids), dtype=np.int64), 0
        blocks: list[Block] = []
        queries: list[Ids] = []
        for prompt, starts, lengths in _families(batch):
            for run in _alike(lengths):
                width = int(lengths[run][0])
                columns = np.arange(width)
                tokens = starts[run, None] + np.minimum(columns, lengths[run, None] - 1)
                real = columns < lengths[run, None]
                places[tokens[real]] = end + np.flatnonzero(real)
                end += tokens.size
                blocks.append(Block(len(run), width, prompt))
                queries.append(tokens.ravel())
        prompts = [np.arange(group.start, group.start + group.prompt) for group in batch.groups]
        return cls(
            blocks=tuple(blocks),
            queries=torch.from_numpy(np.concatenate(queries)).to(device),
            places=torch.from_numpy(places).to(device),
            prompts=torch.from_numpy(np.concatenate(prompts)).to(device),
            prompt_sizes=tuple(group.prompt for group in batch.groups),
            windows=windows,
        )


def _families(batch: PackedBatch) -> Iterator[tuple[int | None, Ids, Ids]]:
    """Sequences that share a prefix: its prompt, where each begins, how many tokens it has."""
    starts = np.array([group.start for group in batch.groups])
    yield None, starts, np.array([group.prompt for group in batch.groups])
    for prompt, group in enumerate(batch.groups):
        before = np.cumsum(group.responses) - group.responses
        yield prompt, group.start + group.prompt + before, group.responses


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
    layout: Layout | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention of a layer, called by transformers with tensors [1, heads, T, size]; returns [1, T, heads, size].

    Without a layout it is that of transformers, with the mask it is given. Raises ValueError where the
    model asks for more than a softmax with capped logits or sinks.
    """
    if options.get("position_bias") is not None:
        raise ValueError("attention with position_bias is not supported")
    softmax = Softmax(options.get("softcap"), options.get("s_aux"))
    if layout is None and softmax.plain:
        out, _ = sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **options)
        return out, None
    if layout is None:
        visible = attention_mask
        if visible is None:
            visible = _visible(query.shape[2], key.shape[2] - query.shape[2], 0, query.device)
        return softmax.attend(query, key, value, visible, scaling).transpose(1, 2), None
    layer = getattr(module, "layer_idx", None)
    layout.reached.add(layer)
    window = layout.windows[layer or 0]
    # Norms leave queries and keys in float32 under autocast, values come straight from a product.
    states = [state[0].transpose(0, 1).to(value.dtype) for state in (query, key, value)]
    sizes = [block.rows * block.width for block in layout.blocks]
    gathered = [state.index_select(0, layout.queries).split(sizes) for state in states]
    # Each prompt once, not once for each block: a gradient summed over copies would depend on their order.
    prefixes = [state.index_select(0, layout.prompts).split(layout.prompt_sizes) for state in states[1:]]
    outputs = []
    for block, queries, *own in zip(layout.blocks, *gathered, strict=True):
        seen = own if block.prompt is None else [prefix[block.prompt] for prefix in prefixes]
        outputs.append(_attend(block, queries, own, seen, scaling, window, softmax))
    return torch.cat(outputs).index_select(0, layout.places)[None], None


@dataclass(frozen=True)
class Softmax:
    """What some models do otherwise inside their attention: no fused kernel of PyTorch's knows it.

    All scores of a block then exist at once, float32, and twice for the gradient.
    """

    softcap: float | None = None  # scores become softcap · tanh(score / softcap)
    sinks: Tensor | None = None  # [heads] the score of a key without a value, which every query sees

    @property
    def plain(self) -> bool:
        """Whether there is nothing of the kind."""
        return self.softcap is None and self.sinks is None

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, visible: Tensor, scaling: float | None) -> Tensor:
        """Outputs like ``query`` [rows, heads, tokens, size] where ``visible`` says who sees whom, [.., tokens, keys].

        Heads of queries share keys and values where these have fewer.
        """
        keys, values = (states.repeat_interleave(query.shape[1] // states.shape[1], dim=1) for states in (keys, values))
        scores = (query @ keys.transpose(2, 3)).float() * (query.shape[-1] ** -0.5 if scaling is None else scaling)
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        scores = scores.masked_fill(~visible, -torch.inf)
        if self.sinks is not None:
            sinks = self.sinks.float()[None, :, None, None].expand(*scores.shape[:3], 1)
            scores = torch.cat([scores, sinks], dim=-1)
        return scores.softmax(-1)[..., : keys.shape[2]].to(values.dtype) @ values


def _attend(
    block: Block,
    query: Tensor,
    own: list[Tensor],
    prefixes: list[Tensor],
    scaling: float | None,
    window: int,
    softmax: Softmax,
) -> Tensor:
    """The outputs [rows · width, heads, size] of a block's queries [rows · width, heads, size].

    ``own`` are their keys and values, ``prefixes`` those [prefix, heads, size] of the prompt, where there is one.
    """
    shape = block.rows, block.width
    prefix = 0 if block.prompt is None else len(prefixes[0])
    query = query.unflatten(0, shape).transpose(1, 2)
    keys, values = (states.unflatten(0, shape).transpose(1, 2) for states in own)
    if prefix:
        shared = [states.transpose(0, 1).expand(block.rows, -1, -1, -1) for states in prefixes]
        keys, values = (torch.cat(parts, dim=2) for parts in zip(shared, (keys, values), strict=True))
    if not softmax.plain:
        visible = _visible(block.width, prefix, window, query.device)
        return softmax.attend(query, keys, values, visible, scaling).transpose(1, 2).flatten(0, 1)
    mask = _mask(block.width, prefix, window, query.device)
    grouped = _takes_fewer_keys(query, keys, values, mask)
    if not grouped:
        keys, values = (states.repeat_interleave(query.shape[1] // states.shape[1], dim=1) for states in (keys, values))
    found = scaled_dot_product_attention(
        query, keys, values, mask, is_causal=mask is None, scale=scaling, enable_gqa=grouped
    )
    return found.transpose(1, 2).flatten(0, 1)


def _mask(width: int, prefix: int, window: int, device: torch.device) -> Tensor | None:
    """Query i sees the keys up to prefix + i, the last ``window`` of them; None is plain causal attention."""
    if window and prefix + width > window:
        return _visible(width, prefix, window, device)
    return causal_lower_right(width, prefix + width) if prefix else None


def _visible(width: int, prefix: int, window: int, device: torch.device) -> Tensor:
    """The same as one truth value for each query and key, [width, prefix + width]."""
    every = torch.ones(width, prefix + width, dtype=torch.bool, device=device).tril_(prefix)
    return every.triu_(prefix - window + 1) if window else every


def _takes_fewer_keys(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> bool:
    """Whether the kernel for these [rows, heads, tokens, size] lets heads of queries share keys.

    On CUDA only the flash kernel does, for causal masks; the others would score whole matrices.
    """
    if query.device.type != "cuda":
        return True
    parameters = SDPAParams(query, keys, values, None, 0.0, False, True)
    return isinstance(mask, CausalBias | None) and can_use_flash_attention(parameters)


AttentionInterface.register(NAME, packed_attention)
