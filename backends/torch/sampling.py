"""Drawing tokens from logits with noise that was fixed beforehand."""

from __future__ import annotations

import torch
from torch import Tensor


def draw(
    logits: Tensor, noise: Tensor, top_p: float, *, greedy: bool, entropies: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Token ids [n] and their log-probabilities [n] from logits [n, V] at the sampling temperature.

    The token is the inverse of the cumulative distribution at ``noise`` [n], float64 in [0, 1): the
    first whose cumulative probability exceeds it, so one of probability zero is never drawn.
    ``greedy`` takes the likeliest token instead. Log-probabilities are those before top-p, and so are the
    entropies that ``entropies`` [n] is filled with.
    """
    logprobs = logits.log_softmax(1)
    probabilities = logprobs if greedy and entropies is None else logprobs.exp()
    if entropies is not None:
        torch.neg(torch.linalg.vecdot(probabilities, logprobs), out=entropies)
    if greedy:
        ids = logprobs.argmax(1)
    else:
        if top_p < 1:
            probabilities = nucleus(probabilities, top_p)
        cumulative = probabilities.cumsum(1, dtype=torch.float64)
        ids = torch.searchsorted(cumulative, noise[:, None] * cumulative[:, -1:], right=True)[:, 0]
    return ids, logprobs.gather(1, ids[:, None])[:, 0]


def nucleus(probabilities: Tensor, top_p: float) -> Tensor:
    """The likeliest tokens whose probabilities [n, V] reach ``top_p`` together; the others become 0."""
    ordered = probabilities.sort(1, descending=True).values
    before = ordered.cumsum(1) - ordered
    least = ordered.masked_fill(before >= top_p, torch.inf).amin(1, keepdim=True)
    return probabilities.masked_fill(probabilities < least, 0)
