"""Attention of one token per row over keys and values in pages, and the check that its kernel computes the same.

On CUDA the flash kernel of PyTorch (``varlen_attn`` with a block table, public since PyTorch 2.13) reads the pages of
each row and no others. The plain path gathers the pages of all rows into one padded array; the check compares with it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from backends.interface import Ids
from backends.torch.cache import PagedCache, PageTable
from backends.torch.decoder import prefill
from backends.torch.device import first_line, out_of_memory
from backends.torch.sink_attention import add_sinks
from backends.torch.softmax import Softmax, attend_once

if TYPE_CHECKING:
    from backends.torch.model import TorchPolicy

PAGE = 256  # tokens of a page; the flash kernel takes multiples of this number
CHECKED_TOKENS = 300  # of the sequence that the check decodes, unless a window is longer
LONGEST_WINDOW = 4096  # that the check goes past


def attend_pages(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    table: PageTable,
    window: int,
    scaling: float | None,
    softmax: Softmax,
) -> Tensor:
    """Outputs [rows, 1, heads, size] for queries [rows, heads, 1, size] and pools [pages, page, fewer heads, size]."""
    if query.device.type == "cuda":
        if softmax.softcap is not None:
            raise NotImplementedError("the kernel has no capped scores")
        return _flash(query, keys, values, table, window, scaling, softmax.sinks)
    pages = table.pages.long()
    every_key, every_value = (pool[pages].flatten(1, 2).transpose(1, 2) for pool in (keys, values))
    columns = torch.arange(every_key.shape[2], device=query.device)
    seen = columns < table.lengths[:, None]
    if window:
        seen &= columns >= table.lengths[:, None] - window
    visible = seen[:, None, None]
    if not softmax.plain:
        return softmax.attend(query, every_key, every_value, visible, scaling).transpose(1, 2)
    return attend_once(query, every_key, every_value, visible, scaling)


def _flash(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    table: PageTable,
    window: int,
    scaling: float | None,
    sinks: Tensor | None,
) -> Tensor:
    from torch.nn.attention.varlen import AuxRequest, varlen_attn

    rows = len(query)
    starts = torch.arange(rows + 1, dtype=torch.int32, device=query.device)
    found, log_sums = varlen_attn(
        query[:, :, 0].to(values.dtype),
        keys,
        values,
        starts,
        None,
        1,
        table.pages.shape[1] * keys.shape[1],
        scale=scaling,
        window_size=(window - 1, 0) if window else (-1, -1),
        enable_gqa=query.shape[1] != keys.shape[2],
        seqused_k=table.lengths,
        block_table=table.pages,
        return_aux=AuxRequest(lse=True),
    )
    if sinks is not None:
        found, _ = add_sinks(found, log_sums, sinks)
    return found[:, None]


@torch.no_grad()
def kernel_fault(policy: TorchPolicy) -> str | None:
    """Why pages cannot be used with this model on its device; None if a decoded token gets the right hidden state."""
    count = max([CHECKED_TOKENS, *(min(window, LONGEST_WINDOW) + 40 for window in policy.windows.values() if window)])
    ids = np.arange(count) * 7 % policy.vocabulary
    try:
        with policy.compute():
            [whole] = prefill(policy, [ids])
            expected, found = whole.hidden.float(), _decoded(policy, ids)
    except (RuntimeError, TypeError, ValueError, ImportError, NotImplementedError) as error:
        if out_of_memory(error):  # says nothing about the kernel
            raise
        return f"it cannot be used here ({first_line(error)})"
    gap = float((found - expected).abs().max() / expected.abs().max())
    limit = 0.05 if policy.dtype == torch.bfloat16 else 1e-3
    return None if gap < limit else f"its result is off by {gap:.2g} of the largest hidden number"


def _decoded(policy: TorchPolicy, ids: Ids) -> Tensor:
    """The last hidden state [2, H] float32 of two rows of ``ids``, whose last token is decoded from pages."""
    [prefix] = prefill(policy, [ids[:-1]])
    room = 2 * (len(ids) + PAGE)
    cache = PagedCache(2, len(ids), room, PAGE, policy.dtype, policy.windows, policy.layer_windows)
    cache.admit(prefix, 2)
    cache.grow(np.full(2, len(ids)))
    lengths = torch.full((2,), prefix.length, device=policy.device)
    inputs = cache.open(lengths, cache.step(lengths, len(ids)))
    last = torch.full((2, 1), int(ids[-1]), device=policy.device)
    return policy.hidden(last, past_key_values=cache, use_cache=True, **inputs)[:, 0].float()
