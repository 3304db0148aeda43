"""Attention by plain operations: the softmax's variants, and one token per row."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


@dataclass(frozen=True)
class Softmax:
    """Variants of the softmax that no fused kernel of PyTorch supports.

    They materialise all scores of a call in float32, and twice for the gradient.
    """

    softcap: float | None = None  # scores become softcap · tanh(score / softcap)
    sinks: Tensor | None = None  # [heads] the score of a key without a value that every query sees

    @property
    def plain(self) -> bool:
        """Whether it is an ordinary softmax."""
        return self.softcap is None and self.sinks is None

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, visible: Tensor, scaling: float | None) -> Tensor:
        """Outputs shaped like ``query`` [rows, heads, tokens, size]; ``visible`` [.., tokens, keys] says which keys
        count.

        Heads of queries share keys and values if these have fewer heads.
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


def attend_once(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scaling: float | None) -> Tensor:
    """Attention of one token per row; query heads that share keys become the rows of one product.

    Takes queries [B, heads, 1, size], keys and values [B, fewer heads, T, size] and a mask [B, 1, 1, T]; returns [B,
    1, heads, size].
    """
    shared = query.reshape(len(query), keys.shape[1], -1, query.shape[-1])
    found = scaled_dot_product_attention(shared, keys, values, mask, scale=scaling)
    return found.reshape(len(query), 1, query.shape[1], -1)
