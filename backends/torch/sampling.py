"""Drawing tokens from logits with noise that was fixed beforehand."""

from __future__ import annotations

import torch
from torch import Tensor


def draw(logits: Tensor, noise: Tensor, top_p: float, *, greedy: bool) -> tuple[Tensor, Tensor]:
    """Token ids [n] and their log-probabilities [n] from logits [n, V] at the sampling temperature.

    ``greedy`` takes the likeliest token. Log-probabilities are those before top-p.
    """
    logprobs = logits.log_softmax(1)
    ids = logprobs.argmax(1) if greedy else choose(logprobs.exp(), noise, top_p)
    return ids, logprobs.gather(1, ids[:, None])[:, 0]


def choose(probabilities: Tensor, noise: Tensor, top_p: float) -> Tensor:
    """Token ids [n] by probabilities [n, V], of those that top-p leaves.

    The token is the inverse of the cumulative distribution at ``noise`` [n], float64 in [0, 1): the
    first whose cumulative probability exceeds it, so one of probability zero is never drawn.
    """
    if top_p < 1:
        probabilities = nucleus(probabilities, top_p)
    cumulative = probabilities.cumsum(1, dtype=torch.float64)
    return torch.searchsorted(cumulative, noise[:, None] * cumulative[:, -1:], right=True)[:, 0]


def nucleus(probabilities: Tensor, top_p: float) -> Tensor:
    """The likeliest tokens whose probabilities [n, V] reach ``top_p`` together; the others become 0."""
    ordered = probabilities.sort(1, descending=True).values
    before = ordered.cumsum(1) - ordered
    least = ordered.masked_fill(before >= top_p, torch.inf).amin(1, keepdim=True)
    return probabilities.masked_fill(probabilities < least, 0)
