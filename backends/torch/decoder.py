"""The forward passes of a rollout: over prompts, whose keys and values are kept, then over the tokens that follow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import DynamicCache

from backends.batching import pack
from backends.interface import Ids, Sequences
from backends.torch.cache import KeyValueCache, Prefix
from backends.torch.cuda_graphs import GraphRunner, grain
from backends.torch.device import on_device

if TYPE_CHECKING:
    from backends.torch.model import TorchPolicy

CHUNK_PAIRS = 2**26  # queries × keys, at most, in a pass that appends several tokens, which needs a dense mask


def prefill(policy: TorchPolicy, prompts: Sequence[Ids]) -> list[Prefix]:
    """One forward pass over some prompts in a packed row; what each leaves behind."""
    starts = np.zeros(len(prompts) + 1, dtype=np.int64)  # no response tokens yet
    batch = pack(Sequences(tuple(prompts), starts[:0], starts), [[row] for row in range(len(prompts))])
    cache, layout = DynamicCache(), policy.layout(batch, keep_states=True)
    hidden = policy.packed_hidden(batch, cache, layout)
    kept = (layout.states and layout.states.kept) or {}
    empty = hidden.new_empty(len(hidden), 0, 0)
    by_token = [
        (empty, empty) if layer.keys is None else (layer.keys[0].transpose(0, 1), layer.values[0].transpose(0, 1))
        for layer in cache.layers
    ]
    found = []
    for place, (group, last) in enumerate(zip(batch.groups, batch.predicts, strict=True)):
        part = slice(group.start, group.start + group.prompt)
        layers = [(keys[part], values[part]) for keys, values in by_token]
        states = {layer: state.row(place) for layer, state in kept.items()}
        found.append(Prefix(group.prompt, hidden[last], layers, states))
    return found


def prefill_all(policy: TorchPolicy, prompts: Sequence[Ids], budget: int) -> Iterator[Prefix]:
    """What decoding needs to know of each prompt; a pass computes at most ``budget`` tokens, or one prompt."""
    first, tokens = 0, 0
    for place, prompt in enumerate(prompts):
        tokens += len(prompt)
        if place > first and tokens > budget:
            yield from prefill(policy, prompts[first:place])
            first, tokens = place, len(prompt)
    if first < len(prompts):
        yield from prefill(policy, prompts[first:])


class Decoder:
    """Appends one token to each of the first rows of a cache, or several tokens to some rows.

    On CUDA rows are rounded up, and in slots columns too, so that shapes recur; values past the last response or its
    tokens are computed but never read.
    """

    def __init__(self, policy: TorchPolicy, cache: KeyValueCache, graphs: GraphRunner) -> None:
        self._policy, self._cache, self._graphs = policy, cache, graphs
        self._address = cache.address
        self._lengths: Ids | None = None  # those of the last step
        self._at: Tensor | None = None  # the same on the device

    def __call__(self, ids: Tensor, lengths: Ids) -> Tensor:
        """Append ids [n] to the first rows, which have ``lengths`` [n] tokens; returns hidden states [n, H]."""
        count, width = len(ids), int(lengths.max()) + 1
        rows = self._graphs.rows(count, self._cache.slots)
        at = self._positions(lengths, rows)
        columns = max(64, grain(width, 8)) if self._graphs.records else 1
        prepared = self._cache.step(at, width, columns)
        if self._address != self._cache.address:
            self._address = self._cache.address
            self._graphs.forget()
        padded = pad(ids, (0, rows - count)) if rows > count else ids
        hidden: Tensor = self._graphs.run("forward", self._forward, padded, at, prepared)
        return hidden[:count].clone() if self._graphs.records else hidden

    def _positions(self, lengths: Ids, rows: int) -> Tensor:
        """``lengths`` [rows] on the device, padded with zeros; not copied there if each row has grown by one token."""
        known, at = self._lengths, self._at
        self._lengths = lengths
        if at is not None and known is not None and len(at) == rows and np.array_equal(known + 1, lengths):
            self._at = at + 1
        else:
            self._at = on_device(np.pad(lengths, (0, rows - len(lengths))), self._policy.device)
        return self._at

    def _forward(self, ids: Tensor, lengths: Tensor, prepared: Any) -> Tensor:
        return self._policy.hidden(
            ids[:, None], past_key_values=self._cache, use_cache=True, **self._cache.open(lengths, prepared)
        )[:, 0]

    def append(self, rows: Ids, lengths: Ids, chunks: Sequence[Ids], budget: int) -> Tensor:
        """Append chunks[i] of any lengths to ``rows`` [m] of ``lengths`` [m]; returns the last hidden states [m, H].

        A pass takes at most about ``budget`` tokens. The cache must have room for them.
        """
        self._lengths = None
        counts = np.array([len(chunk) for chunk in chunks])
        found: list[Tensor] = [torch.empty(0)] * len(rows)
        recurrent = self._policy.carries_state is not None
        for part in _together(counts, lengths, budget, equal=recurrent):
            ids = np.zeros((len(part), counts[part].max()), dtype=np.int64)
            for line, row in zip(ids, part, strict=True):
                line[: counts[row]] = chunks[row]
            if recurrent and not self._policy.carries_state:  # these layers take several tokens only at the start
                for column in range(ids.shape[1]):
                    one = np.ones_like(counts[part])
                    hidden = self._append(ids[:, column : column + 1], rows[part], lengths[part] + column, one)
                last = np.zeros_like(counts[part])
            else:
                hidden, last = self._append(ids, rows[part], lengths[part], counts[part]), counts[part] - 1
            for line, at, row in zip(hidden, last.tolist(), part.tolist(), strict=True):
                found[row] = line[at]
        return torch.stack(found)

    def _append(self, ids: Ids, rows: Ids, lengths: Ids, counts: Ids) -> Tensor:
        """Append counts[i] of the tokens ids[i] to ``rows`` of ``lengths``; returns hidden states [rows, tokens, H]."""
        hidden = self._policy.hidden(
            on_device(ids, self._policy.device),
            past_key_values=self._cache,
            use_cache=True,
            **self._cache.open_chunk(rows, lengths, counts),
        )
        self._cache.settle()
        return hidden


def _together(counts: Ids, lengths: Ids, budget: int, equal: bool) -> Iterator[Ids]:
    """Indices of rows to pass together, longest chunks first.

    None has less than half the tokens of the longest, or all have as many if ``equal``: padding would change the states
    of recurrent layers.
    """
    order = np.argsort(-counts, kind="stable")
    while len(order):
        longest = int(counts[order[0]])
        pairs = longest * (int(lengths[order].max()) + longest)
        most = max(1, min(budget // longest, CHUNK_PAIRS // pairs))
        similar = counts[order] == longest if equal else 2 * counts[order] > longest
        count = min(most, int(np.sum(similar)))
        yield order[:count]
        order = order[count:]
