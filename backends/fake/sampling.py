"""Sample responses token by token with a key-value cache; finished ones leave the batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from backends.arrays import Doubles
from backends.batching import uniforms
from backends.fake.qwen3 import KeyValueCache, Qwen3
from backends.interface import Floats, Ids, OnFinished, Proxy, RolloutRequest, Sampling

MakeFeatures = Callable[
    [Proxy, Doubles, Doubles, Ids], Doubles
]  # of states [n, H], log-probabilities [n, V] and tokens [n]


def log_softmax(logits: Doubles) -> Doubles:
    """Log-softmax over the last axis."""
    shifted: Doubles = logits - logits.max(-1, keepdims=True)
    total: Doubles = np.log(np.exp(shifted).sum(-1, keepdims=True))
    return shifted - total


def draw(logprobs: Doubles, noise: Doubles, sampling: Sampling) -> Ids:
    """One token of each distribution [B, V]: the inverse of its cumulative sum at ``noise`` [B].

    Only tokens that ``sampling`` allows; a token of probability zero is never drawn.
    """
    p = np.exp(logprobs)
    p[p < sampling.min_p * p.max(axis=-1, keepdims=True)] = 0
    if 0 < sampling.top_k < p.shape[-1]:
        p[p < np.sort(p, axis=-1)[:, -sampling.top_k, None]] = 0
    if sampling.top_p < 1:
        order = np.argsort(-p, axis=-1, kind="stable")
        ranked = np.take_along_axis(p, order, axis=-1)
        ranked[np.cumsum(ranked, axis=-1) - ranked >= sampling.top_p * p.sum(axis=-1, keepdims=True)] = 0
        np.put_along_axis(p, order, ranked, axis=-1)
    cumulative = np.cumsum(p, axis=-1)
    total = cumulative[:, -1]
    point = np.minimum(noise * total, np.nextafter(total, 0))  # because noise·total may round up to total
    drawn: Ids = (cumulative <= point[:, None]).sum(-1)
    return drawn


@dataclass(frozen=True)
class DrawnResponse:
    """A response of n tokens."""

    tokens: Ids  # [n]
    logprobs: Floats  # [n]
    entropies: Floats  # [n]
    vectors: Floats  # [n, H] features, or [n, 0]


def generate(
    model: Qwen3, request: RolloutRequest, rows: Ids, on_finished: OnFinished | None, features: MakeFeatures
) -> dict[int, DrawnResponse]:
    """The responses ``rows``; row r answers prompt r // samples. ``features`` computes their features."""
    sampling, seeds = request.sampling, request.global_rows[rows]
    noise = np.stack([uniforms(sampling.seed, int(row), sampling.max_tokens) for row in seeds])  # [B, max_tokens]
    tokens = np.zeros((len(rows), sampling.max_tokens), dtype=np.int64)
    logprobs, entropies = np.zeros((2, len(rows), sampling.max_tokens))
    vectors = np.zeros((*tokens.shape, model.config.hidden if request.proxy else 0))
    finished: dict[int, DrawnResponse] = {}
    hidden, cache, positions = _prefill(model, request.prompts, rows // sampling.samples, sampling.max_tokens)
    active = np.arange(len(rows))  # the remaining batch, as indices into rows
    for count in range(1, sampling.max_tokens + 1):
        request.interrupt()
        logits = hidden @ model.weights[model.head].T  # [B, V]
        logp = log_softmax(logits / sampling.softmax_temperature)
        token = draw(logp, noise[active, count - 1], sampling) if sampling.temperature else logits.argmax(-1)
        tokens[active, count - 1] = token
        logprobs[active, count - 1] = logp[np.arange(len(token)), token]
        entropies[active, count - 1] = -(np.exp(logp) * logp).sum(1)
        if request.proxy:
            vectors[active, count - 1] = features(request.proxy, hidden, logp, token)
        ended = np.array([sampling.ends(tokens[i, :count]) for i in active], dtype=bool)
        stopped = ended | (count == sampling.max_tokens)
        for i in active[stopped]:
            finished[int(rows[i])] = DrawnResponse(
                tokens[i, :count], logprobs[i, :count], entropies[i, :count], vectors[i, :count]
            )
            if on_finished is not None:
                on_finished(int(rows[i]), tokens[i, :count])
        if stopped.all():
            break
        if stopped.any():
            keep = np.flatnonzero(~stopped)
            active, token, positions, cache = active[keep], token[keep], positions[keep], cache.select(keep)
        states, _ = model.trunk(token[:, None], positions[:, None], cache)
        hidden, positions = states[:, 0], positions + 1
    return finished


def _prefill(model: Qwen3, prompts: Sequence[Ids], of_row: Ids, slots: int) -> tuple[Doubles, KeyValueCache, Ids]:
    """One forward pass per distinct prompt, with its result repeated for the rows that answer it.

    Returns the state that predicts the first token [B, H], the cache, and the next position [B].
    """
    used, index = np.unique(of_row, return_inverse=True)
    lengths = np.array([len(prompts[i]) for i in used])
    ids = np.zeros((len(used), lengths.max()), dtype=np.int64)
    for row, i in enumerate(used):
        ids[row, : lengths[row]] = prompts[i]
    cache = KeyValueCache.empty(model.config, len(used), int(lengths.max()) + slots)
    states, _ = model.trunk(ids, np.broadcast_to(np.arange(ids.shape[1]), ids.shape), cache)
    last = states[np.arange(len(used)), lengths - 1]
    # Slots past a short prompt hold padding, which is overwritten before any token attends to it.
    return last[index], cache.select(index), lengths[index]
