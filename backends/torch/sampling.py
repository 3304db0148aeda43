"""The next token of each response, drawn from its hidden state with noise that is fixed beforehand."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from backends.interface import RolloutRequest, Sampling
from backends.torch.cuda_graphs import GraphRunner
from backends.torch.head import TorchHead

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


class TokenDrawer:
    """Draws tokens for at most ``most`` responses at a time.

    ``exact`` asks for the feature rows of a hidden_* proxy; otherwise the hidden states are the feature rows.
    """

    def __init__(self, head: TorchHead, request: RolloutRequest, most: int, graphs: GraphRunner, exact: bool) -> None:
        self._head, self._graphs, self._most = head, graphs, most
        self._sampling = request.sampling
        self._proxy = request.proxy if exact else None
        self._kinds = 1 + request.entropies  # numbers of a token
        self._buffers = head.buffers(most, 2)

    def __call__(self, hidden: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The next tokens [n] for hidden states [n, H] and noise [n], their numbers [1 or 2, n] and rows [n, H].

        The numbers are a token's log-probability and, if requested, the entropy of its distribution.
        """
        count = len(hidden)
        rows = self._graphs.rows(count, self._most)
        if rows > count:
            hidden, noise = pad(hidden, (0, 0, 0, rows - count)), pad(noise, (0, rows - count))
        ids, numbers, features = self._graphs.run("draw", self._draw, hidden, noise)
        if not self._graphs.records:
            return ids, numbers, features
        return ids[:count].clone(), numbers[:, :count].clone(), features[:count].clone()

    def _draw(self, hidden: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        count = len(hidden)
        ids = torch.empty(count, dtype=torch.int64, device=noise.device)
        numbers = torch.empty(self._kinds, count, device=noise.device)
        rows = torch.empty(count, hidden.shape[1], device=hidden.device) if self._proxy else None
        with torch.autocast(hidden.device.type, enabled=False):
            for first in range(0, count, self._head.chunk):
                part = slice(first, first + self._head.chunk)
                wanted = None if rows is None else rows[part]
                self._draw_chunk(hidden[part], noise[part], ids[part], numbers[:, part], wanted)
        return ids, numbers, hidden if rows is None else rows

    def _draw_chunk(self, hidden: Tensor, noise: Tensor, ids: Tensor, numbers: Tensor, rows: Tensor | None) -> None:
        """Fill in ids [c], numbers [k, c] and, for hidden_* features, the gradients [c, H]."""
        sampling = self._sampling
        logits, weights = (buffer[: len(hidden)] for buffer in self._buffers)
        self._head.logits(hidden, sampling.softmax_temperature, logits)
        chosen, total = draw(logits, noise, sampling, weights)
        ids.copy_(chosen)
        numbers[0] = logits.gather(1, ids[:, None])[:, 0] - total.log()
        if rows is not None and self._proxy is not None:
            rows.copy_(self._head.gradients(hidden, logits, weights, total, ids, self._proxy))
        if len(numbers) > 1:
            numbers[1] = total.log() - logits.mul_(weights).sum(1) / total
