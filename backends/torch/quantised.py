"""Optimizer moments in 8 bits: a code for each number and a float32 scale for each block of 256 numbers.

The codes are those of dynamic tree quantisation by block (Dettmers et al. 2022, "8-bit Optimizers via Block-wise
Quantization", sections 1.3 to 2.2): seven decades below the block's largest number, each lower one with half as many
codes, all at midpoints of equal steps.

The second moment differs in two ways. If it were rounded to 0, its update would be divided by epsilon alone; in blocks
whose gradients span a few decades, updates were measured to become hundreds of times too large. So it is stored as its
square root, which spans half as many decades, and its lowest code means 1e-7 of the scale instead of 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 256  # numbers that share a scale
_DECADES = 7


def codes_of_first(device: torch.device) -> Tensor:
    """The values of the 256 codes of a first moment, ascending from −1 to 1, float32."""
    above = _positive(codes_of_top_decade=64)
    return torch.cat([-above.flip(0)[1:], torch.zeros(1), above]).to(device)  # only 1 has no negative


def codes_of_root(device: torch.device) -> Tensor:
    """The values of the 256 codes of a second moment's square root, ascending from 1e-7 to 1, float32."""
    return torch.cat([torch.tensor([1e-7]), _positive(codes_of_top_decade=128)]).to(device)


def _positive(codes_of_top_decade: int) -> Tensor:
    """The values of the positive codes, ascending; decade k below the first has 2^k times fewer codes."""
    decades = []
    for below in reversed(range(_DECADES)):
        steps = codes_of_top_decade >> below
        middles = 0.1 + 0.9 * (torch.arange(steps, dtype=torch.float64) + 0.5) / steps
        decades.append(middles * 10.0**-below)
    return torch.cat([*decades, torch.ones(1, dtype=torch.float64)]).float()


def quantise(values: Tensor, meanings: Tensor) -> tuple[Tensor, Tensor]:
    """The nearest codes, uint8 [n], and the scales, float32 [n/256], of values [n]; n is a multiple of 256."""
    blocks = values.view(-1, BLOCK)
    scales = blocks.abs().amax(1)
    shares = blocks / scales.clamp_min(torch.finfo(torch.float32).tiny)[:, None]
    middles = (meanings[1:] + meanings[:-1]) / 2
    return torch.bucketize(shares.view(-1), middles, out_int32=True).to(torch.uint8), scales


def dequantise(codes: Tensor, scales: Tensor, meanings: Tensor) -> Tensor:
    """The values of codes [n] with scales [n/256], float32 [n]."""
    shares = meanings.index_select(0, codes.int())
    return shares.view(-1, BLOCK).mul_(scales[:, None]).view(-1)
