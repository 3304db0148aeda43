"""Attention over a packed row as sequences of any lengths: no padding, no masks, one call of the kernel per layer.

Each prompt is a sequence, and each response is one whose keys begin with those of its prompt. On CUDA, PyTorch's flash
kernel takes such sequences (``varlen_attn``, public since PyTorch 2.13), and windows as two numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from backends.batching import PackedBatch, pack
from backends.interface import Ids, Sequences
from backends.torch.device import out_of_memory

if TYPE_CHECKING:
    from backends.torch.model import TorchPolicy

CHECKED = (40, (300, 200, 7))  # tokens of a prompt and of its responses that the check computes
LONGEST_WINDOW = 4096  # that the check goes past
LARGEST_HEAD = 256  # that the flash kernel takes


@dataclass(frozen=True)
class VarlenLayout:
    """The sequences of a packed row. Their queries are the tokens of the row, in order."""

    query_starts: Tensor  # [S + 1] int32, where the queries of each sequence begin
    key_starts: Tensor  # [S + 1] int32, where its keys begin among ``keys``
    keys: Tensor  # [K] positions in the row of the tokens that each sequence attends to, one after another
    most_queries: int  # of a sequence
    most_keys: int

    @classmethod
    def of(cls, batch: PackedBatch, device: torch.device) -> VarlenLayout:
        """The prompts and responses of a packed batch; responses without a token in the row are no sequences."""
        queries: list[int] = []
        keys: list[Ids] = []
        for group in batch.groups:
            prompt = np.arange(group.start, group.start + group.prompt)
            queries.append(group.prompt)
            keys.append(prompt)
            end = group.start + group.prompt
            for count in group.responses.tolist():
                if count:
                    queries.append(count)
                    keys.append(np.concatenate([prompt, np.arange(end, end + count)]))
                end += count
        return cls(
            query_starts=_starts(queries).to(device),
            key_starts=_starts([len(tokens) for tokens in keys]).to(device),
            keys=torch.from_numpy(np.concatenate(keys)).to(device),
            most_queries=max(queries),
            most_keys=max(len(tokens) for tokens in keys),
        )


def _starts(counts: list[int]) -> Tensor:
    return torch.from_numpy(np.concatenate([[0], np.cumsum(counts)]).astype(np.int32))


def takes(query: Tensor, value: Tensor) -> bool:
    """Whether the kernel takes queries and values of these head sizes."""
    return query.shape[-1] == value.shape[-1] <= LARGEST_HEAD


def attend_sequences(
    query: Tensor, key: Tensor, value: Tensor, layout: VarlenLayout, window: int, scaling: float | None
) -> Tensor:
    """Outputs [T, heads, size] for queries [T, heads, size], and keys and values [T, fewer heads, size].

    A token sees the last ``window`` tokens of its sequence; 0 means all.
    """
    # Indexing sums the gradient of a prompt's keys over its responses in a fixed order, which index_select does not.
    return _kernel(query, key[layout.keys], value[layout.keys], layout, window, scaling)


def _kernel(
    query: Tensor, keys: Tensor, values: Tensor, layout: VarlenLayout, window: int, scaling: float | None
) -> Tensor:
    """The flash kernel; ``keys`` and ``values`` are those of each sequence, one after another."""
    from torch.nn.attention.varlen import varlen_attn

    found = varlen_attn(
        query.contiguous(),
        keys,
        values,
        layout.query_starts,
        layout.key_starts,
        layout.most_queries,
        layout.most_keys,
        scale=scaling,
        window_size=(window - 1 if window else -1, 0),
        enable_gqa=query.shape[1] != keys.shape[1],
    )
    assert isinstance(found, Tensor)  # it returns more only if asked to
    return found


def kernel_fault(policy: TorchPolicy) -> str | None:
    """Why the kernel cannot be used with this model on its device; None if outputs and gradients are right."""
    try:
        gap = max(_gap(policy, window) for window in sorted(set(policy.layer_windows)))
    except (RuntimeError, TypeError, ValueError, ImportError, NotImplementedError) as error:
        if out_of_memory(error):  # says nothing about the kernel
            raise
        return f"it cannot be used here ({(str(error).strip().splitlines() or [type(error).__name__])[0]})"
    return None if gap < 0.03 else f"its result is off by {gap:.2g} of the largest number"


def _gap(policy: TorchPolicy, window: int) -> float:
    """The largest difference to rectangles, of outputs and gradients, relative to the largest number of each."""
    from backends.torch.attention import PackedLayout, attend_rectangles
    from backends.torch.softmax import Softmax

    prompt, responses = CHECKED
    longest = max(responses[0], min(window, LONGEST_WINDOW) + 40)
    lengths = np.array([longest, *responses[1:]])
    starts = np.concatenate([[0], np.cumsum(lengths)])
    ids = np.zeros(prompt, np.int64)
    batch = pack(Sequences((ids,) * len(lengths), np.zeros(starts[-1], np.int64), starts), [[0, 1, 2]])
    layout = PackedLayout(batch, (window,), policy.device)
    config = policy.config
    heads = config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    noise = torch.Generator().manual_seed(0)
    counts = heads, getattr(config, "num_key_value_heads", None) or heads, heads
    shared, fewer, _ = counts
    shapes = [(len(batch.ids), count, size) for count in (shared, fewer, fewer, heads)]
    *states, weight = (torch.randn(*shape, generator=noise).to(policy.device, policy.dtype) for shape in shapes)
    found = []
    with torch.enable_grad():
        for varlen in (True, False):
            query, key, value = given = [state.clone().requires_grad_() for state in states]
            if varlen:
                out = attend_sequences(query, key, value, layout.sequences, window, None)
            else:
                out = attend_rectangles(query, key, value, layout.rectangles, window, None, Softmax())
            torch.autograd.backward(out, weight)
            found.append([out.detach(), *(state.grad for state in given)])
    pairs = [(mine.float(), other.float()) for mine, other in zip(*found, strict=True) if mine is not None]
    return max(float((mine - other).abs().max() / other.abs().max()) for mine, other in pairs)
