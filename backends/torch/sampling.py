"""Sample tokens by weight, with noise that is fixed beforehand."""

from __future__ import annotations

import torch
from torch import Tensor

from backends.interface import Sampling

_BLOCK = 256  # tokens in a block


def draw(logits: Tensor, noise: Tensor, sampling: Sampling, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Token ids [n] for logits [n, V] at the sampling temperature, and the sums [n] of their exponentials.

    Subtracts the largest logit in place and writes the exponentials to ``weights`` [n, V]; a token's log-probability
    is then its logit minus the logarithm of the sum. At temperature 0 it takes the likeliest token.
    """
    logits.sub_(logits.amax(1, keepdim=True))
    total = torch.exp(logits, out=weights).sum(1)
    return logits.argmax(1) if sampling.temperature == 0 else choose(weights, noise, sampling), total


def choose(weights: Tensor, noise: Tensor, sampling: Sampling) -> Tensor:
    """Token ids [n] by weights [n, V], unnormalised probabilities of the tokens that ``sampling`` allows.

    The token is the inverse of the cumulative distribution at ``noise`` [n], float64 in [0, 1): the first whose
    cumulative weight exceeds that share of the sum, so a token of weight zero is never drawn. It accumulates sums of
    blocks of tokens, then the weights of one block; accumulating all weights in float64 took half as long as the
    product with the output matrix.
    """
    weights = truncate(weights, sampling)
    size = weights.shape[1]
    if size <= 2 * _BLOCK:
        ends = weights.double().cumsum(1)
        return _first_above(ends, noise[:, None] * ends[:, -1:])[0][:, 0]
    whole = size // _BLOCK * _BLOCK
    blocks = weights[:, :whole].unflatten(1, (whole // _BLOCK, _BLOCK)).sum(2)
    ends = torch.cat([blocks, weights[:, whole:].sum(1, keepdim=True)], dim=1).double().cumsum(1)
    block, at = _first_above(ends, noise[:, None] * ends[:, -1:])
    first = (block * _BLOCK).clamp(max=size - _BLOCK)  # the last block's window also covers tokens of other blocks
    inside = weights.unfold(1, _BLOCK, 1)[torch.arange(len(block), device=block.device), first[:, 0]].double()
    if whole < size:
        inside.masked_fill_(torch.arange(_BLOCK, device=block.device) < block * _BLOCK - first, 0)
    token, _ = _first_above(inside.cumsum(1), at)
    return (first + token)[:, 0]


def _first_above(ends: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
    """The first of ``ends`` [n, k], ascending, above ``at`` [n, 1], and the distance of ``at`` from the end before it.

    If rounding leaves none above, it takes the first that equals the last one, which is the last with a weight.
    """
    at = torch.minimum(at, torch.nextafter(ends[:, -1:], torch.zeros_like(at)))
    found = torch.searchsorted(ends, at, right=True)
    before = ends.gather(1, (found - 1).clamp(min=0))
    return found, at - before.where(found > 0, 0.0)


def truncate(weights: Tensor, sampling: Sampling) -> Tensor:
    """The weights [n, V], set to 0 for tokens that min-p, top-k or top-p exclude."""
    if sampling.min_p > 0:
        least = sampling.min_p * weights.amax(1, keepdim=True)
        weights = weights.masked_fill(weights < least, 0)
    if 0 < sampling.top_k < weights.shape[1]:
        least = weights.topk(sampling.top_k).values[:, -1:]
        weights = weights.masked_fill(weights < least, 0)
    if sampling.top_p < 1:
        weights = nucleus(weights, sampling.top_p * weights.sum(1, keepdim=True))
    return weights


def nucleus(weights: Tensor, level: Tensor) -> Tensor:
    """The likeliest tokens whose weights [n, V] together reach ``level`` [n, 1]; sets the others to 0."""
    ordered = weights.sort(1, descending=True).values
    before = ordered.cumsum(1) - ordered
    least = ordered.masked_fill(before >= level, torch.inf).amin(1, keepdim=True)
    return weights.masked_fill(weights < least, 0)
