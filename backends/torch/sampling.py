"""Drawing tokens by weights with noise that was fixed beforehand."""

from __future__ import annotations

import torch
from torch import Tensor

from backends.interface import Sampling

_BLOCK = 256  # tokens that are looked at one by one


def draw(logits: Tensor, noise: Tensor, sampling: Sampling, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Token ids [n] by logits [n, V] at the sampling temperature, and the sums [n] of their exponentials.

    From the logits their largest is taken, in place, before their exponentials come to lie in ``weights`` [n, V]:
    a token's log-probability is its logit then, less the logarithm of the sum. At temperature 0 the likeliest is taken.
    """
    logits.sub_(logits.amax(1, keepdim=True))
    total = torch.exp(logits, out=weights).sum(1)
    return logits.argmax(1) if sampling.temperature == 0 else choose(weights, noise, sampling), total


def choose(weights: Tensor, noise: Tensor, sampling: Sampling) -> Tensor:
    """Token ids [n] by weights [n, V], which are probabilities times any factor, of those that ``sampling`` leaves.

    The token is the inverse of the cumulative distribution at ``noise`` [n], float64 in [0, 1): the first
    whose cumulative weight exceeds that share of the sum, so one of weight zero is never drawn. What is
    cumulated are the sums of blocks of tokens, and then the weights of one block: all weights in float64
    took as long as half the product with the output matrix.
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
    first = (block * _BLOCK).clamp(max=size - _BLOCK)  # of the last block's window, which others' tokens fill up
    inside = weights.unfold(1, _BLOCK, 1)[torch.arange(len(block), device=block.device), first[:, 0]].double()
    if whole < size:
        inside.masked_fill_(torch.arange(_BLOCK, device=block.device) < block * _BLOCK - first, 0)
    token, _ = _first_above(inside.cumsum(1), at)
    return (first + token)[:, 0]


def _first_above(ends: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
    """The first of ``ends`` [n, k], ascending, above ``at`` [n, 1], and how far ``at`` lies above the one before.

    Where rounding leaves none above, the first that equals the last: before it something was added.
    """
    at = torch.minimum(at, torch.nextafter(ends[:, -1:], torch.zeros_like(at)))
    found = torch.searchsorted(ends, at, right=True)
    before = ends.gather(1, (found - 1).clamp(min=0))
    return found, at - before.where(found > 0, 0.0)


def truncate(weights: Tensor, sampling: Sampling) -> Tensor:
    """The weights [n, V], 0 where min-p, top-k or top-p take a token away."""
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
    """The likeliest tokens whose weights [n, V] reach ``level`` [n, 1] together; the others become 0."""
    ordered = weights.sort(1, descending=True).values
    before = ordered.cumsum(1) - ordered
    least = ordered.masked_fill(before >= level, torch.inf).amin(1, keepdim=True)
    return weights.masked_fill(weights < least, 0)
