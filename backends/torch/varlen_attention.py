"""Attention over a packed row as sequences of any lengths: no padding, no masks, one call of the kernel per layer.

Each prompt is a sequence, and each response is one whose keys begin with those of its prompt. On CUDA, PyTorch's flash
kernel takes such sequences (``varlen_attn``, public since PyTorch 2.13), and windows as two numbers. That kernel is
FlashAttention 2, which reaches a third of an H100's peak. cuDNN has kernels made for such GPUs, but PyTorch offers them
only for as many queries as keys. So there a long sequence is a call of its own, with its prompt as queries too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_cudnn_attention
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad, scaled_dot_product_attention

from backends.batching import PackedBatch, pack
from backends.interface import Sequences
from backends.torch.capped_attention import attend_capped
from backends.torch.device import first_line, out_of_memory
from backends.torch.sink_attention import attend_with_sinks

if TYPE_CHECKING:
    from backends.torch.model import TorchPolicy

CHECKED = (40, (300, 200, 7))  # tokens of a prompt and of its responses that the check computes
CHECKED_CAP = 1.0  # of scores, in place of a model's: random scores would not come near to 50
LONGEST_WINDOW = 4096  # that the check goes past
LARGEST_HEAD = 256  # that the flash kernel takes
SQUARE = 1024  # prompt and response together have at least so many tokens in a square
# Squares are padded to multiples of this, because cuDNN plans for about a second when it first sees a width.
SQUARE_STEP = 512


@dataclass(frozen=True)
class VarlenLayout:
    """The sequences of a packed row. Their queries are the tokens of the row, in order."""

    query_starts: Tensor  # [S + 1] int32, where the queries of each sequence begin
    key_starts: Tensor  # [S + 1] int32, where its keys begin among ``keys``
    keys: Tensor  # [K] positions in the row of the tokens that each sequence attends to, one after another
    most_queries: int  # of a sequence
    most_keys: int

    @classmethod
    def of(cls, batch: PackedBatch, device: torch.device, below: int | None = None) -> VarlenLayout:
        """The prompts and responses of a packed batch, if ``below`` is given only those with fewer keys.

        Responses without a token in the row are no sequences.
        """
        taken = [each for each in _sequences(batch) if below is None or each.keys < below]
        keys = [np.r_[each.prompt : each.prompt + each.prefix, each.start : each.start + each.tokens] for each in taken]
        return cls(
            query_starts=_starts([each.tokens for each in taken]).to(device),
            key_starts=_starts([each.keys for each in taken]).to(device),
            keys=torch.from_numpy(np.concatenate(keys)).to(device),
            most_queries=max(each.tokens for each in taken),
            most_keys=max(each.keys for each in taken),
        )


@dataclass(frozen=True)
class SquareLayout:
    """The sequences of a packed row, the long ones as squares; each list has an entry for every sequence, in order."""

    sizes: list[int]  # tokens in the row
    prompts: list[int | None]  # where in these lists its prompt is; None for prompts
    widths: list[int]  # of its square, padding included; 0 for short sequences
    short: VarlenLayout | None  # those that are no squares; None if there are none

    @classmethod
    def of(cls, batch: PackedBatch, device: torch.device) -> SquareLayout:
        """The prompts and responses of a packed batch."""
        every = list(_sequences(batch))
        place = {each.start: at for at, each in enumerate(every)}
        long = [each.keys >= SQUARE for each in every]
        return cls(
            sizes=[each.tokens for each in every],
            prompts=[place[each.prompt] if each.prefix else None for each in every],
            widths=[
                is_long * -(-each.keys // SQUARE_STEP) * SQUARE_STEP for each, is_long in zip(every, long, strict=True)
            ],
            short=None if all(long) else VarlenLayout.of(batch, device, below=SQUARE),
        )


@dataclass(frozen=True)
class _Sequence:
    """A prompt or a response in a packed row."""

    start: int  # its first token in the row
    tokens: int
    prompt: int  # the first token of its prompt
    prefix: int  # tokens of the prompt that it sees; 0 for prompts

    @property
    def keys(self) -> int:
        return self.prefix + self.tokens


def _sequences(batch: PackedBatch) -> Iterator[_Sequence]:
    for group in batch.groups:
        yield _Sequence(group.start, group.prompt, group.start, 0)
        end = group.start + group.prompt
        for count in group.responses.tolist():
            if count:
                yield _Sequence(end, count, group.start, group.prompt)
            end += count


def _starts(counts: list[int]) -> Tensor:
    return torch.from_numpy(np.concatenate([[0], np.cumsum(counts)]).astype(np.int32))


def takes(query: Tensor, value: Tensor) -> bool:
    """Whether the kernel takes queries and values of these head sizes."""
    return query.shape[-1] == value.shape[-1] <= LARGEST_HEAD


def attend_sequences(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: VarlenLayout,
    window: int,
    scaling: float | None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Outputs [T, heads, size] for queries [T, heads, size], and keys and values [T, fewer heads, size].

    A token sees the last ``window`` tokens of its sequence; 0 means all. ``sinks`` [heads] are further scores.
    """
    # Indexing sums the gradient of a prompt's keys over its responses in a fixed order, which index_select does not.
    keys, values = key[layout.keys], value[layout.keys]
    if sinks is not None:
        return attend_with_sinks(query, keys, values, sinks, layout, window, scaling)
    return _kernel(query, keys, values, layout, window, scaling)


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


def attend_squares(query: Tensor, key: Tensor, value: Tensor, layout: SquareLayout, scaling: float | None) -> Tensor:
    """Outputs [T, heads, size] for queries [T, heads, size], and keys and values [T, fewer heads, size], no windows."""
    queries, *states = (state.split(layout.sizes) for state in (query, key, value))
    outputs: list[Tensor] = []
    short: list[Tensor] = []
    if layout.short:
        own = [part for part, width in zip(queries, layout.widths, strict=True) if not width]
        found = attend_sequences(torch.cat(own), key, value, layout.short, 0, scaling)
        short = list(found.split([len(part) for part in own]))
    for at, (own_query, prompt, width) in enumerate(zip(queries, layout.prompts, layout.widths, strict=True)):
        if not width:
            outputs.append(short.pop(0))
            continue
        seen = [part[at] if prompt is None else torch.cat([part[prompt], part[at]]) for part in states]
        prefix, padding = len(seen[0]) - len(own_query), width - len(seen[0])
        # Nobody reads what the queries of the prompt see, so they are zeros.
        square = pad(own_query, (0, 0, 0, 0, prefix, padding))
        keys, values = (pad(state, (0, 0, 0, 0, 0, padding)) for state in seen)
        found = _square_kernel(square, keys, values, scaling)
        outputs.append(found[prefix : prefix + len(own_query)])
    return torch.cat(outputs)


def _square_kernel(query: Tensor, keys: Tensor, values: Tensor, scaling: float | None) -> Tensor:
    """Causal attention [tokens, heads, size] of one sequence; on CUDA by cuDNN, or a RuntimeError."""
    query, keys, values = (state.transpose(0, 1)[None] for state in (query, keys, values))
    on_gpu = query.device.type == "cuda"
    grouped = query.shape[1] != keys.shape[1]
    if grouped and on_gpu and not can_use_cudnn_attention(SDPAParams(query, keys, values, None, 0.0, True, True)):
        keys, values = (state.repeat_interleave(query.shape[1] // state.shape[1], dim=1) for state in (keys, values))
        grouped = False
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION) if on_gpu else nullcontext():
        found = scaled_dot_product_attention(query, keys, values, is_causal=True, scale=scaling, enable_gqa=grouped)
    return found[0].transpose(0, 1)


def made_for_squares(device: torch.device) -> bool:
    """Whether cuDNN has kernels made for this GPU, Hopper or a data centre's Blackwell; FlashAttention 2 has not."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] in (9, 10)


def kernel_fault(policy: TorchPolicy, squares: bool = False) -> str | None:
    """Why the kernel cannot be used with this model on its device; None if outputs and gradients are right.

    ``squares`` asks about the kernel for squares, which only layers without windows use.
    """
    windows = {0} & set(policy.layer_windows) if squares else set(policy.layer_windows)
    try:
        gap = max((_gap(policy, window, squares) for window in sorted(windows)), default=0.0)
    except (RuntimeError, TypeError, ValueError, ImportError, OSError, NotImplementedError) as error:
        if out_of_memory(error):  # says nothing about the kernel
            raise
        return f"it cannot be used here ({first_line(error)})"
    return None if gap < 0.03 else f"its result is off by {gap:.2g} of the largest number"


def _gap(policy: TorchPolicy, window: int, squares: bool) -> float:
    """The largest difference to rectangles, of outputs and gradients, relative to the largest number of each."""
    from backends.torch.attention import PackedLayout, attend_rectangles
    from backends.torch.softmax import Softmax

    prompt, responses = CHECKED
    longest = max(responses[0], min(window, LONGEST_WINDOW) + 40, SQUARE if squares else 0)
    lengths = np.array([longest, *responses[1:]])
    starts = np.concatenate([[0], np.cumsum(lengths)])
    ids = np.zeros(prompt, np.int64)
    batch = pack(Sequences((ids,) * len(lengths), np.zeros(starts[-1], np.int64), starts), [[0, 1, 2]])
    layout = PackedLayout(batch, (window,), policy.device)
    config = policy.config
    cap = CHECKED_CAP if policy.caps_scores else None
    heads = config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    noise = torch.Generator().manual_seed(0)
    counts = heads, getattr(config, "num_key_value_heads", None) or heads, heads
    shared, fewer, _ = counts
    shapes: list[tuple[int, ...]] = [(len(batch.ids), count, size) for count in (shared, fewer, fewer, heads)]
    if policy.has_sinks:
        shapes.insert(3, (heads,))
    *states, weight = (torch.randn(*shape, generator=noise).to(policy.device, policy.dtype) for shape in shapes)
    found = []
    with torch.enable_grad():
        for fast in (True, False):
            query, key, value, *rest = given = [state.clone().requires_grad_() for state in states]
            softmax = Softmax(cap, rest[0] if rest else None)
            if not fast:
                out = attend_rectangles(query, key, value, layout.rectangles, window, None, softmax)
            elif squares:
                out = attend_squares(query, key, value, layout.squared, None)
            elif cap:
                out = attend_capped(query, key, value, layout.flex, window, None, cap)
            else:
                out = attend_sequences(query, key, value, layout.sequences, window, None, softmax.sinks)
            torch.autograd.backward(out, weight)
            found.append([out.detach(), *(state.grad for state in given)])
    pairs = [(mine.float(), other.float()) for mine, other in zip(*found, strict=True) if mine is not None]
    return max(float((mine - other).abs().max() / other.abs().max()) for mine, other in pairs)
