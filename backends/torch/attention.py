"""Attention over a packed row of tokens: prompts attend to themselves, responses to their prompt and themselves.

Everything else in a transformer works token by token. So in a row without padding, in which a prompt is computed once
for all its responses, only attention must know which tokens belong together.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_flash_attention
from torch.nn.attention.bias import CausalBias, causal_lower_right
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from backends.batching import PackedBatch, similar_lengths
from backends.interface import Ids
from backends.torch.cache import PageTable
from backends.torch.capped_attention import FlexLayout, attend_capped
from backends.torch.paged_attention import attend_pages
from backends.torch.recurrent import StateLayout
from backends.torch.softmax import Softmax, attend_once
from backends.torch.varlen_attention import SquareLayout, VarlenLayout, attend_sequences, attend_squares, takes

NAME = "packed_rows"  # the name under which transformers knows this attention


# The assumed cost of a kernel call on CUDA, in queries × keys: estimated from a step on one H100, not tuned. To save
# calls, responses to several prompts are padded into one. On a CPU a call costs nothing extra.
CALL_PAIRS = {"cpu": 0, "cuda": 2**20}
MASKED_PAIRS = 2**25  # queries × keys, at most, in a call with padded prompts, which needs a dense mask
# Scores or entries of a mask, at most, in a call that materialises them: those of all queries would be gigabytes.
PART_SCORES = 2**28
ALIGNMENT = 8  # pad keys to a multiple of this; otherwise the kernel pads the mask in every layer


@dataclass(frozen=True)
class Block:
    """Sequences of similar length: ``rows`` × ``width`` queries for each of some prompts, or the prompts themselves.

    Rows are padded at the end, where causal attention hides it from every token; prefixes are padded at the start.
    """

    rows: int
    width: int
    prompts: tuple[int, ...] = ()  # the prefixes; empty for prompts themselves
    prefix: int = 0  # tokens of the longest prefix
    columns: Tensor | None = (
        None  # [prompts · prefix] their positions among the tokens of all prompts; None for a single prompt
    )
    padding: Tensor | None = None  # [prompts, 1, prefix + width] which keys are padding; None if there is none

    @property
    def shape(self) -> tuple[int, int]:
        """The number of sequences, and queries in each."""
        return self.rows * max(1, len(self.prompts)), self.width


@dataclass(frozen=True)
class Rectangles:
    """Which token attends to which in a packed row of T tokens, as padded blocks."""

    blocks: tuple[Block, ...]
    queries: Tensor  # [Q] positions in the row, in the order of the blocks; padding repeats a sequence's last token
    places: Tensor  # [T] the position of each token among the queries
    prompts: Tensor  # all tokens of prompts, one prompt after another
    prompt_sizes: tuple[int, ...]

    @classmethod
    def of(cls, batch: PackedBatch, device: torch.device) -> Rectangles:
        """The blocks of a packed batch: one or more of prompts, and one or more of responses."""
        places, end = np.empty(len(batch.ids), dtype=np.int64), 0
        blocks: list[Block] = []
        queries: list[Ids] = []
        sizes = np.array([group.prompt for group in batch.groups])
        starts = np.array([group.start for group in batch.groups])
        themselves = [[_Run(None, 0, starts[run], sizes[run])] for run in similar_lengths(sizes)]
        for members in (*themselves, *_merged(_responses(batch), CALL_PAIRS[device.type])):
            rows, width = max(run.rows for run in members), max(run.width for run in members)
            columns = np.arange(width)
            for run in members:
                padded = np.minimum(np.arange(rows), run.rows - 1)  # repeats its last sequence in place of missing ones
                tokens = run.starts[padded, None] + np.minimum(columns, run.lengths[padded, None] - 1)
                real = (columns < run.lengths[padded, None]) & (np.arange(rows) < run.rows)[:, None]
                places[tokens[real]] = end + np.flatnonzero(real)
                end += tokens.size
                queries.append(tokens.ravel())
            blocks.append(_block(members, rows, width, sizes, device))
        prompts = [np.arange(group.start, group.start + group.prompt) for group in batch.groups]
        return cls(
            blocks=tuple(blocks),
            queries=torch.from_numpy(np.concatenate(queries)).to(device),
            places=torch.from_numpy(places).to(device),
            prompts=torch.from_numpy(np.concatenate(prompts)).to(device),
            prompt_sizes=tuple(sizes.tolist()),
        )


@dataclass(frozen=True)
class PackedLayout:
    """How the layers compute a packed row; what attention needs is worked out when a layer first asks for it."""

    batch: PackedBatch
    windows: tuple[int, ...]  # window of each layer in tokens; 0: all
    device: torch.device
    states: StateLayout | None = None  # for recurrent layers
    varlen: bool = False  # whether a kernel takes sequences of any lengths
    squares: bool = False  # whether another, faster one takes the long sequences of layers without windows
    reached: set[int | None] = field(default_factory=set)  # layers that have used the layout

    @cached_property
    def rectangles(self) -> Rectangles:
        """The row as padded blocks."""
        return Rectangles.of(self.batch, self.device)

    @cached_property
    def sequences(self) -> VarlenLayout:
        """The row as sequences without padding."""
        return VarlenLayout.of(self.batch, self.device)

    @cached_property
    def flex(self) -> FlexLayout:
        """The row as blocks of a mask."""
        return FlexLayout.of(self.batch, self.device)

    @cached_property
    def squared(self) -> SquareLayout:
        """The row as sequences, the long ones as squares."""
        return SquareLayout.of(self.batch, self.device)


@dataclass(frozen=True)
class _Run:
    """Sequences of similar length that share a prefix, longest first."""

    prompt: int | None
    prefix: int  # tokens of the prompt
    starts: Ids
    lengths: Ids

    @property
    def rows(self) -> int:
        return len(self.starts)

    @property
    def width(self) -> int:
        return int(self.lengths[0])


def _responses(batch: PackedBatch) -> Iterator[_Run]:
    """The responses of each prompt, as runs."""
    for prompt, group in enumerate(batch.groups):
        starts = group.start + group.prompt + np.cumsum(group.responses) - group.responses
        for run in similar_lengths(group.responses):
            yield _Run(prompt, group.prompt, starts[run], group.responses[run])


def _merged(runs: Iterable[_Run], call: int) -> Iterator[list[_Run]]:
    """Group runs of several prompts into shared calls while that pads fewer than ``call`` queries × keys per saved
    call.

    A call takes at most one run of each prompt; otherwise the order would decide a gradient with three terms.
    """

    def pairs(members: list[_Run]) -> int:
        rows, width = max(run.rows for run in members), max(run.width for run in members)
        return len(members) * rows * width * (max(run.prefix for run in members) + width)

    members: list[_Run] = []
    for run in sorted(runs, key=lambda run: (run.width, run.prefix), reverse=True) if call else runs:
        joined = [*members, run]
        padding = pairs(joined) - sum(pairs([one]) for one in joined)
        too_much = padding >= call * len(members) or pairs(joined) > MASKED_PAIRS
        if members and (too_much or run.prompt in {one.prompt for one in members}):
            yield members
            joined = [run]
        members = joined
    if members:
        yield members


def _block(members: list[_Run], rows: int, width: int, sizes: Ids, device: torch.device) -> Block:
    """The block of one call: one run of each of some prompts that all have ``sizes`` tokens."""
    prompts = tuple(run.prompt for run in members if run.prompt is not None)
    if len(prompts) < 2:
        return Block(rows, width, prompts, members[0].prefix)
    prefix = max(run.prefix for run in members)
    unlike = min(run.prefix for run in members) < prefix
    if unlike:
        prefix += -(prefix + width) % ALIGNMENT
    own = sizes[list(prompts)]
    missing = prefix - own[:, None]  # padding columns of each, which repeat its first token
    columns = (np.cumsum(sizes) - sizes)[list(prompts), None] + np.maximum(np.arange(prefix) - missing, 0)
    padding = torch.from_numpy(np.arange(prefix + width) < missing)[:, None].to(device) if unlike else None
    return Block(rows, width, prompts, prefix, torch.from_numpy(columns.ravel()).to(device), padding)


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    layout: PackedLayout | None = None,
    pages: PageTable | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """The attention of a layer, called by transformers with tensors [1, heads, T, size]; returns [1, T, heads, size].

    Without a layout it is transformers' own attention with the given mask; with ``pages``, ``key`` and ``value`` are
    pools of pages. Raises ValueError if the model needs more
    than a softmax with capped logits or sinks.
    """
    if options.get("position_bias") is not None:
        raise ValueError("attention with position_bias is not supported")
    softmax = Softmax(options.get("softcap"), options.get("s_aux"))
    if pages is not None:
        window = pages.windows[getattr(module, "layer_idx", None) or 0]
        return attend_pages(query, key, value, pages, window, scaling, softmax), None
    if layout is None and softmax.plain and query.shape[2] == 1:
        return attend_once(query, key, value, attention_mask, scaling), None
    if layout is None and softmax.plain:
        out, _ = sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **options)
        return out, None
    if layout is None:
        visible = attention_mask
        if visible is None:
            visible = _visible(query.shape[2], key.shape[2], key.shape[2] - query.shape[2], 0, query.device)
        return softmax.attend(query, key, value, visible, scaling).transpose(1, 2), None
    layer = getattr(module, "layer_idx", None)
    layout.reached.add(layer)
    window = layout.windows[layer or 0]
    # Under autocast, norms leave queries and keys in float32, while values come from a product in 16 bits.
    q, k, v = (state[0].transpose(0, 1).to(value.dtype) for state in (query, key, value))
    if layout.varlen and takes(query, value) and not (softmax.softcap and softmax.sinks is not None):
        if softmax.softcap:
            return attend_capped(q, k, v, layout.flex, window, scaling, softmax.softcap)[None], None
        if layout.squares and not window and softmax.plain:
            return attend_squares(q, k, v, layout.squared, scaling)[None], None
        return attend_sequences(q, k, v, layout.sequences, window, scaling, softmax.sinks)[None], None
    return attend_rectangles(q, k, v, layout.rectangles, window, scaling, softmax)[None], None


def attend_rectangles(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: Rectangles,
    window: int,
    scaling: float | None,
    softmax: Softmax,
) -> Tensor:
    """Outputs [T, heads, size] for queries [T, heads, size], and keys and values [T, fewer heads, size]."""
    states = query, key, value
    sizes = [math.prod(block.shape) for block in layout.blocks]
    gathered = [state.index_select(0, layout.queries).split(sizes) for state in states]
    # Each prompt once, not once per block: a gradient summed over copies would depend on their order.
    whole = [state.index_select(0, layout.prompts) for state in states[1:]]
    prefixes = [state.split(layout.prompt_sizes) for state in whole]
    outputs = []
    for block, queries, *own in zip(layout.blocks, *gathered, strict=True):
        if block.columns is not None:
            seen = [state.index_select(0, block.columns) for state in whole]
        else:
            seen = [prefix[block.prompts[0]] for prefix in prefixes] if block.prompts else own
        outputs.append(_attend(block, queries, own, seen, scaling, window, softmax))
    return torch.cat(outputs).index_select(0, layout.places)


def _attend(
    block: Block,
    query: Tensor,
    own: list[Tensor],
    prefixes: list[Tensor],
    scaling: float | None,
    window: int,
    softmax: Softmax,
) -> Tensor:
    """The outputs [queries, heads, size] for a block's queries [queries, heads, size].

    ``own`` are the keys and values of the same tokens, ``prefixes`` [prompts · prefix, heads, size] those of their
    prompts, if any.
    """
    query = query.unflatten(0, block.shape).transpose(1, 2)
    keys, values = (states.unflatten(0, block.shape).transpose(1, 2) for states in own)
    if block.prompts:
        shared = [states.unflatten(0, (-1, 1, block.prefix)).transpose(2, 3) for states in prefixes]
        shared = [states.expand(-1, block.rows, -1, -1, -1).flatten(0, 1) for states in shared]
        keys, values = (torch.cat(parts, dim=2) for parts in zip(shared, (keys, values), strict=True))
    parts = _parts(block, window, 1 if softmax.plain else query.shape[1])
    if len(parts) > 1 and not (softmax.plain and _mask_free(block, window)):
        outputs = [
            checkpoint(_attend_part, block, query, keys, values, part, scaling, window, softmax, use_reentrant=False)
            for part in parts
        ]
        return torch.cat(outputs, dim=2).transpose(1, 2).flatten(0, 1)
    every = slice(block.width), slice(block.prefix + block.width)
    found = _attend_part(block, query, keys, values, every, scaling, window, softmax)
    return found.transpose(1, 2).flatten(0, 1)


def _attend_part(
    block: Block,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    part: tuple[slice, slice],
    scaling: float | None,
    window: int,
    softmax: Softmax,
) -> Tensor:
    """The outputs [sequences, heads, queries, size] for some queries, which see no keys but those of the part."""
    query, keys, values = query[:, :, part[0]], keys[:, :, part[1]], values[:, :, part[1]]
    if not softmax.plain:
        return softmax.attend(query, keys, values, _seen(block, window, part, query.device), scaling)
    mask = _mask(block, window, part, query.device)
    grouped = _takes_fewer_keys(query, keys, values, mask)
    if not grouped:
        keys, values = (states.repeat_interleave(query.shape[1] // states.shape[1], dim=1) for states in (keys, values))
    return scaled_dot_product_attention(
        query, keys, values, mask, is_causal=mask is None, scale=scaling, enable_gqa=grouped
    )


def _parts(block: Block, window: int, heads: int) -> list[tuple[slice, slice]]:
    """Queries and the keys that they may see, so that a part has at most ``PART_SCORES`` scores in ``heads`` heads."""
    width, each = block.width, block.shape[0] * heads
    if each * width * (block.prefix + width) <= PART_SCORES:
        return [(slice(width), slice(block.prefix + width))]
    keys = min(window, block.prefix + width) if window else block.prefix + width
    count = max(1, PART_SCORES // (each * keys))
    count = max(1, min(count, PART_SCORES // (each * min(keys + count, block.prefix + width))))
    found = []
    for start in range(0, width, count):
        stop = min(start + count, width)
        oldest = max(0, block.prefix + start - window + 1) if window else 0
        found.append((slice(start, stop), slice(oldest, block.prefix + stop)))
    return found


def _mask_free(block: Block, window: int) -> bool:
    """Whether attention is plain and causal, which kernels compute without a mask."""
    return block.padding is None and not (window and block.prefix + block.width > window)


def _mask(block: Block, window: int, part: tuple[slice, slice], device: torch.device) -> Tensor | None:
    """Query i sees the keys up to prefix + i, at most the last ``window``; None means plain causal attention."""
    if not _mask_free(block, window):
        return _seen(block, window, part, device)
    return causal_lower_right(block.width, block.prefix + block.width) if block.prefix else None


def _seen(block: Block, window: int, part: tuple[slice, slice], device: torch.device) -> Tensor:
    """The mask of a part as booleans, [queries, keys], or with padding [sequences, 1, queries, keys]."""
    queries, keys = part
    start, oldest = queries.start or 0, keys.start or 0
    every = _visible(queries.stop - start, keys.stop - oldest, block.prefix + start - oldest, window, device)
    if block.padding is None:
        return every
    return (every & ~block.padding[:, :, keys]).repeat_interleave(block.rows, dim=0)[:, None]


def _visible(queries: int, keys: int, prefix: int, window: int, device: torch.device) -> Tensor:
    """Which keys each query sees without padding, [queries, keys]; the first query comes after ``prefix`` keys."""
    every = torch.ones(queries, keys, dtype=torch.bool, device=device).tril_(prefix)
    return every.triu_(prefix - window + 1) if window else every


def _takes_fewer_keys(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> bool:
    """Whether the kernel for these [rows, heads, tokens, size] lets query heads share keys.

    On CUDA only the flash kernel does, with causal masks; the others would materialise all scores.
    """
    if query.device.type != "cuda":
        return True
    parameters = SDPAParams(query, keys, values, None, 0.0, False, True)
    return isinstance(mask, CausalBias | None) and can_use_flash_attention(parameters)


AttentionInterface.register(NAME, packed_attention)
