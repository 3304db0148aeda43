"""Forward passes of one token per response, recorded as CUDA graphs where possible.

Such a pass launches a thousand small kernels, which takes the host longer than the GPU needs to run them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from backends.interface import Ids
from backends.torch.cache import SlotCache
from backends.torch.model import TorchPolicy


@dataclass(frozen=True)
class _Recording:
    """A recorded forward pass over a number of rows and columns, and its input and output buffers."""

    graph: torch.cuda.CUDAGraph
    inputs: Any  # ids [rows], lengths [rows] and masks
    where: Any  # the cache positions it writes to
    hidden: Tensor  # [rows, H]


class Decoder:
    """Forward passes of one token for each response in a cache.

    A recording is valid for a number of rows and columns of the cache at its present address. Both are rounded up so
    that shapes recur; values past the last response or its tokens are computed but never read. A shape is recorded the
    second time it occurs. If a model does something that cannot be recorded, its kernels are launched one by one.
    """

    def __init__(self, policy: TorchPolicy, cache: SlotCache) -> None:
        self._policy, self._cache = policy, cache
        self._records = policy.device.type == "cuda"
        self._columns = 0
        self._seen: dict[tuple[int, ...], _Recording | None] = {}  # recordings by rows and columns
        self._pool: Any = None  # the memory pool that recordings share

    def __call__(self, ids: Tensor, lengths: Ids) -> Tensor:
        """Append ids [n] to the responses, which have ``lengths`` [n] tokens; returns hidden states [n, H]."""
        count, width = len(ids), int(lengths.max()) + 1
        if not self._records:
            at = torch.from_numpy(lengths).to(ids.device)
            return self._forward(ids, at, self._cache.step(at, width))
        rows = min(self._cache.slots, count + -count % _grain(count, 2))
        padded = ids.new_zeros(rows)
        padded[:count] = ids
        at = torch.nn.functional.pad(torch.from_numpy(lengths), (0, rows - count)).to(ids.device)
        masks = self._cache.step(at, width, max(64, _grain(width, 8)))
        return self._replayed(padded, at, masks)[:count].clone()

    def _replayed(self, *inputs: Any) -> Tensor:
        if self._columns != self._cache.columns:  # their addresses have changed
            self._columns, self._seen, self._pool = self._cache.columns, {}, None
        shape = tuple(size for tensor in tree_flatten(inputs)[0] for size in tensor.shape)
        if shape not in self._seen:
            self._seen[shape] = None
            return self._forward(*inputs)
        recording = self._seen[shape] = self._seen[shape] or self._record(inputs)
        if recording is None:
            return self._forward(*inputs)
        for place, value in zip(tree_flatten(recording.inputs)[0], tree_flatten(inputs)[0], strict=True):
            place.copy_(value)
        recording.graph.replay()
        return recording.hidden

    def _record(self, inputs: Any) -> _Recording | None:
        """Record a forward pass without running it; None if that fails."""
        own = tree_map(torch.clone, inputs)
        where = self._cache.write_at(own[1])
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        try:
            graph, hidden = _recorded(lambda: self._forward(*own), self._pool)
        except RuntimeError:
            self._records = False
            _recorded(
                lambda: torch.zeros(1, device=own[0].device)
            )  # a capture that succeeds releases the random generator
            self._cache.write_at(inputs[1])
            return None
        return _Recording(graph, own, where, hidden)

    def _forward(self, ids: Tensor, lengths: Tensor, masks: Any) -> Tensor:
        hidden = self._policy.hidden(
            ids[:, None],
            position_ids=lengths[:, None],
            attention_mask=masks,
            past_key_values=self._cache,
            use_cache=True,
        )
        return hidden[:, 0]


def _grain(size: int, parts: int) -> int:
    """The rounding step for ``size``: a fraction of the next power of two."""
    return max(1, (1 << size.bit_length() - 1) // parts)


def _recorded(function: Callable[[], Tensor], pool: Any = None) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """Record the kernels that a function launches; returns the graph and its result's buffer. Raises RuntimeError.

    ``torch.cuda.graph`` would first collect garbage and empty the allocator's cache, every time.
    """
    graph, present, aside = torch.cuda.CUDAGraph(), torch.cuda.current_stream(), torch.cuda.Stream()
    aside.wait_stream(present)
    with torch.cuda.stream(aside):
        graph.capture_begin(pool, capture_error_mode="thread_local")
        try:
            result = function()
        finally:
            graph.capture_end()
    present.wait_stream(aside)
    return graph, result
