"""Sample responses token by token with a key-value cache; finished ones leave the batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from backends.arrays import Doubles
from backends.batching import uniforms
from backends.fake.qwen3 import NumpyCache, Qwen3
from backends.interface import Bools, Floats, Ids, OnFinished, Proxy, RolloutRequest, Sampling

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
    """A response region of m tokens, of which the model wrote n."""

    tokens: Ids  # [m]
    own: Bools  # [m] True: the model wrote it
    logprobs: Floats  # [n]
    entropies: Floats  # [n]
    vectors: Floats  # [n, H] features, or [n, 0]
    truncated: bool


class FakeRollout:
    """The responses ``rows`` of a request; row r answers prompt r // samples. ``features`` computes their features.

    Arrays hold one line for each response; ``active`` are the lines of those in the batch. A response whose turn has
    ended waits outside the batch, with its keys and values, until its environment answers.
    """

    def __init__(
        self, model: Qwen3, request: RolloutRequest, rows: Ids, on_finished: OnFinished | None, features: MakeFeatures
    ) -> None:
        self.model, self.request, self.rows = model, request, rows
        self.on_finished, self.features = on_finished, features
        self.sampling = sampling = request.sampling
        seeds = request.global_rows[rows]
        self.noise: Doubles = np.array(
            [uniforms(sampling.seed, int(row), sampling.max_tokens) for row in seeds], np.float64
        )
        self.tokens = np.zeros((len(rows), sampling.max_tokens), dtype=np.int64)
        self.own = np.ones((len(rows), sampling.max_tokens), dtype=bool)
        self.logprobs, self.entropies = np.zeros((2, len(rows), sampling.max_tokens))
        self.vectors = np.zeros((*self.tokens.shape, model.config.hidden if request.proxy else 0))
        self.length = np.zeros(len(rows), dtype=np.int64)  # tokens of each region so far
        self.turn = np.zeros(len(rows), dtype=np.int64)  # where the present turn begins
        self.finished: dict[int, DrawnResponse] = {}
        self.waiting: dict[int, tuple[NumpyCache, int]] = {}  # caches and next positions of rows, by line
        self.hidden, self.cache, self.positions = _prefill(
            model, request.prompts, rows // sampling.samples, sampling.max_tokens
        )
        self.active = np.arange(len(rows))

    def run(self) -> dict[int, DrawnResponse]:
        """Draw every response to its end."""
        while len(self.active) or self.waiting:
            self.request.interrupt()
            if len(self.active):
                self._advance(self._draw())
            if self.waiting:
                self._resume()
        return self.finished

    def _draw(self) -> Ids:
        """The next token of each active response."""
        active, at = self.active, self.length[self.active]
        logits = self.hidden @ self.model.weights[self.model.head].T  # [B, V]
        logp = log_softmax(logits / self.sampling.softmax_temperature)
        noise = self.noise[active, at]
        token = draw(logp, noise, self.sampling) if self.sampling.temperature else logits.argmax(-1)
        self.tokens[active, at] = token
        self.logprobs[active, at] = logp[np.arange(len(token)), token]
        self.entropies[active, at] = -(np.exp(logp) * logp).sum(1)
        if self.request.proxy:
            self.vectors[active, at] = self.features(self.request.proxy, self.hidden, logp, token)
        self.length[active] = at + 1
        return token

    def _advance(self, token: Ids) -> None:
        """Let responses leave whose turn ends with ``token`` [B], and run the others through the model."""
        regions = [self.tokens[i, self.turn[i] : self.length[i]] for i in self.active]
        ended = np.array([self.sampling.ends(turn) for turn in regions], dtype=bool)
        stopped = ended | (self.length[self.active] == self.sampling.max_tokens)
        for place in np.flatnonzero(stopped):
            i = int(self.active[place])
            if ended[place] and self.request.turns is not None:
                self.waiting[i] = self.cache.select(np.array([place])), int(self.positions[place])
                self.request.turns.turn_ended(int(self.rows[i]), self.tokens[i, : self.length[i]].copy())
            else:
                self._finish(i, truncated=not ended[place])
        if stopped.any():
            keep = np.flatnonzero(~stopped)
            self.active, token, self.positions = self.active[keep], token[keep], self.positions[keep]
            self.cache = self.cache.select(keep)
        if len(self.active):
            states, _ = self.model.trunk(token[:, None], self.positions[:, None], self.cache)
            self.hidden, self.positions = states[:, 0], self.positions + 1
        else:
            self.hidden = self.hidden[:0]

    def _resume(self) -> None:
        """Take responses back into the batch whose environment has answered."""
        assert self.request.turns is not None
        for row, ids in self.request.turns.answers(wait=not len(self.active)):
            i = row - int(self.rows[0])
            cache, position = self.waiting.pop(i)
            if ids is None:
                self._finish(i, truncated=False)
                continue
            first, last = int(self.length[i]), int(self.length[i]) + len(ids)
            self.tokens[i, first:last], self.own[i, first:last] = ids, False
            self.length[i] = self.turn[i] = last
            new = self.tokens[None, i, first - 1 : last]  # the last token of the turn has not been read yet
            positions = position + np.arange(new.shape[1])
            states, _ = self.model.trunk(new, positions[None], cache)
            self.active = np.append(self.active, i)
            self.hidden = np.concatenate([self.hidden, states[:, -1]])
            self.positions = np.append(self.positions, positions[-1] + 1)
            self.cache = self.cache.extended(cache)

    def _finish(self, i: int, truncated: bool) -> None:
        row, part = int(self.rows[i]), slice(int(self.length[i]))
        own = self.own[i, part]
        self.finished[row] = DrawnResponse(
            self.tokens[i, part],
            own,
            self.logprobs[i, part][own],
            self.entropies[i, part][own],
            self.vectors[i, part][own],
            truncated,
        )
        if self.on_finished is not None:
            self.on_finished(row, self.tokens[i, part])


def _prefill(model: Qwen3, prompts: Sequence[Ids], of_row: Ids, slots: int) -> tuple[Doubles, NumpyCache, Ids]:
    """One forward pass per distinct prompt, with its result repeated for the rows that answer it.

    Returns the state that predicts the first token [B, H], the cache, and the next position [B].
    """
    used, index = np.unique(of_row, return_inverse=True)
    lengths = np.array([len(prompts[i]) for i in used])
    ids = np.zeros((len(used), lengths.max()), dtype=np.int64)
    for row, i in enumerate(used):
        ids[row, : lengths[row]] = prompts[i]
    cache = NumpyCache.empty(model.config, len(used), int(lengths.max()) + slots)
    states, _ = model.trunk(ids, np.broadcast_to(np.arange(ids.shape[1]), ids.shape), cache)
    last = states[np.arange(len(used)), lengths - 1]
    # Slots past a short prompt hold padding, which is overwritten before any token attends to it.
    return last[index], cache.select(index), lengths[index]
