"""Forward passes over prompts that keep their keys and values."""

from __future__ import annotations

from collections.abc import Sequence
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
    cache = DynamicCache()
    hidden = policy.packed_hidden(batch, cache)
    found = []
    for group, last in zip(batch.groups, batch.predicts, strict=True):
        part = slice(group.start, group.start + group.prompt)
        layers = [(layer.keys[0, :, part], layer.values[0, :, part]) for layer in cache.layers]
        by_token = [(keys.transpose(0, 1), values.transpose(0, 1)) for keys, values in layers]
        found.append(Prefix(group.prompt, hidden[last], by_token))
    return found
