"""Forward passes over prompts that keep their keys and values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
from transformers import DynamicCache

from backends.batching import pack
from backends.interface import Ids, Sequences
from backends.torch.cache import Prefix

if TYPE_CHECKING:
    from backends.torch.model import TorchPolicy


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
