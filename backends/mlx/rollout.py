"""Sampling through mlx-lm's batch generator, which is touched nowhere else."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import chain
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.generate import BatchGenerator, PromptProcessingBatch
from mlx_lm.models.cache import make_prompt_cache

from backends.batching import uniforms
from backends.interface import Completions, Floats, OnFinished, RolloutRequest, Sampling, starts_of
from backends.mlx.features import MlxFeatureCollector
from backends.mlx.head import entropy, pick, proxies
from backends.mlx.model import MlxPolicy
from backends.regions import ResponseRegions

PREFILL = 8  # prompts at a time, as in mlx-lm
CANDIDATES = 128  # likeliest tokens among which top-p is tried first, without sorting the vocabulary
BLOCK = 64  # neighbouring tokens whose maximum is compared to find the candidates
ENDLESS = 2**30  # token limit for the generator, because this module decides when a response ends
REFILL = 8  # new responses enter when 1/REFILL of the batch is free, because each entry copies the whole KV cache


class MlxRollout:
    """One rollout: the place of each response in the batch, and its tokens and log-probabilities so far.

    The generator does not tell the sampler which rows it samples, and returning log-probabilities would be slow. Both
    are inferred from the order of its calls: within one ``next()`` it calls the sampler first for the rows that are
    being decoded, if any, then for the rows that enter, in the order of their insertion. The following ``next()``
    returns the tokens.
    """

    def __init__(
        self,
        policy: MlxPolicy,
        request: RolloutRequest,
        batch: int,
        version: int,
        collector: MlxFeatureCollector | None = None,
    ) -> None:
        self.model = policy.model
        self.trunk, self.head = policy.trunk, policy.head()
        self.request = request
        self.sampling = request.sampling
        self.version = version  # of the model's weights
        self.collector = collector  # collects the features that the request asks for
        self.hidden = mx.zeros((0, 0))  # [B, H] of the last forward pass, which the next call of the sampler uses
        self.batch = batch
        self.entering: deque[int] = deque()  # rows that are inserted but have no token yet
        self.active: list[int] = []  # rows being decoded, in the generator's order
        self.idle: list[int] = []  # the generator's ids of active rows that are finished
        self.decoding: list[int] = []  # the active rows that the sampler has not been called for in this step
        self.inserted: list[int] = []  # row of each generator id, which count from 0
        # rows, numbers [k, B] and features [B, H] of the tokens that the next step returns
        self.drawn: list[tuple[list[int], mx.array, mx.array | None]] = []
        self.noise: dict[int, Floats] = {}
        self.tokens: dict[int, list[int]] = {}  # of each response, including the answers of its environment
        self.own: dict[int, list[bool]] = {}  # whether the model wrote each of these tokens
        self.turn: dict[int, int] = {}  # index of the first token of the present turn
        self.numbers: dict[int, list[list[float]]] = {}  # log-probability and, if requested, entropy of own tokens
        self.truncated: dict[int, bool] = {}  # for finished responses
        self.paused: dict[int, Any] = {}  # caches of responses that wait for their environment
        self.answered: dict[int, Any] = {}  # caches of responses whose environment's answer is not prefilled yet

    def run(self, on_finished: OnFinished | None) -> Completions:
        """Draw every response, in the order of the prompts; a new one starts as soon as there is room.

        After an error it may be called again for the unfinished responses. They start over, except in an episode, where
        they continue after the last token that was returned.
        """
        self.generator = BatchGenerator(
            self._logits,
            max_tokens=ENDLESS,
            sampler=self._sample,
            completion_batch_size=self.batch,
            prefill_batch_size=self.batch,
        )
        self.entering.clear()
        for unfinished in (self.active, self.idle, self.decoding, self.inserted, self.drawn):
            unfinished.clear()
        if self.request.turns is None:
            if self.collector:
                self.collector.discard(self.tokens.keys() - self.truncated.keys())
            self.tokens = {row: tokens for row, tokens in self.tokens.items() if row in self.truncated}
        self.turn |= {row: len(self.tokens[row]) for row in self.answered}
        self.answered.clear()
        self.paused = dict.fromkeys(self.paused)  # drop the caches, because memory ran out; they are computed again
        waiting = self._prefilled()
        rows = len(self.request)
        try:
            while len(self.truncated) < rows:
                self.request.interrupt()
                self._admit(waiting)
                for row in (*self._advance(), *self._resume()):
                    if on_finished:
                        on_finished(row, np.array(self.tokens[row], dtype=np.int64))
        finally:
            self.generator.close()
            del self.generator  # breaks a reference cycle, which would keep the caches until a garbage collection
        return self._completions(rows)

    def _admit(self, waiting: Iterator[tuple[int, int, Any]]) -> None:
        free = self.batch - len(self.active) - len(self.entering)
        if self.active and free < max(1, self.batch // REFILL):
            return
        if self.answered:
            self._release(now=True)  # so that no response is in the batch twice
            free = self.batch - len(self.active) - len(self.entering)
        with mx.stream(self.generator.stream):
            for _, (row, last, cache) in zip(range(free), chain(self._read_answers(free), waiting), strict=False):
                self._insert(row, last, cache)

    def _insert(self, row: int, last: int, cache: Any) -> None:
        """Add a response to the batch. Its cache holds all its tokens except the ``last``."""
        self.generator.insert([[last]], caches=[cache])
        self.inserted.append(row)
        self.entering.append(row)
        if row not in self.tokens:
            self.tokens[row], self.own[row], self.numbers[row], self.turn[row] = [], [], [], 0
        # One more than there are tokens, because the generator samples one token past the last.
        seed = int(self.request.global_rows[row])
        noise = uniforms(self.sampling.seed, seed, self.sampling.max_tokens + 1)
        self.noise[row] = noise.astype(np.float32)

    def _prefilled(self) -> Iterator[tuple[int, int, Any]]:
        """Yield the row, the last prompt id and the cache of the ids before it for every unfinished response.

        All samples of a prompt share one cache; the generator copies it when they enter.
        """
        samples = self.sampling.samples
        missing: dict[int, list[int]] = {}  # rows by prompt
        begun = []
        for row in range(len(self.request)):
            if self.tokens.get(row) and row not in self.truncated and row not in self.paused:
                begun.append(row)
            elif row not in self.truncated and row not in self.paused:
                missing.setdefault(row // samples, []).append(row)
        places = list(missing)
        size = min(PREFILL, self.batch)
        for first in range(0, len(places), size):
            chosen = places[first : first + size]
            wave = [self.request.prompts[place].tolist() for place in chosen]
            caches = self._read(wave, [make_prompt_cache(self.model) for _ in wave])
            for place, prompt, cache in zip(chosen, wave, caches, strict=True):
                for row in missing[place]:
                    yield row, prompt[-1], cache
        for row in begun:
            yield self._read_again(row)

    def _read(self, wave: list[list[int]], caches: list[Any]) -> list[Any]:
        """Prefill all but the last id of each list. Returns the caches."""
        long = [i for i, ids in enumerate(wave) if len(ids) > 1]
        batch = PromptProcessingBatch(self._logits, long, [caches[i] for i in long])
        batch.prompt([wave[i][:-1] for i in long])
        for place, i in enumerate(long):
            caches[i] = batch.extract_cache(place)
        return caches

    def _read_again(self, row: int) -> tuple[int, int, Any]:
        """Return what ``_prefilled`` yields for a response that had started before memory ran out."""
        ids = self.request.prompts[row // self.sampling.samples].tolist() + self.tokens[row]
        return row, ids[-1], self._read([ids], [make_prompt_cache(self.model)])[0]

    def _read_answers(self, most: int) -> Iterator[tuple[int, int, Any]]:
        """Yield the same as ``_prefilled`` for up to ``most`` responses with an answer, and prefill only that."""
        ready = list(self.answered)[:most]
        size = min(PREFILL, self.batch)
        for first in range(0, len(ready), size):
            chosen = ready[first : first + size]
            caches = [self.answered.pop(row) for row in chosen]
            wave = [self.tokens[row][self.turn[row] :] for row in chosen]
            self.turn |= {row: len(self.tokens[row]) for row in chosen}
            lost = [row for row, cache in zip(chosen, caches, strict=True) if cache is None]
            kept = [place for place, cache in enumerate(caches) if cache is not None]
            read = self._read([wave[place] for place in kept], [caches[place] for place in kept])
            for place, cache in zip(kept, read, strict=True):
                yield chosen[place], wave[place][-1], cache
            yield from map(self._read_again, lost)

    def _advance(self) -> list[int]:
        """Draw one token for every active row. Returns the rows that are finished."""
        arriving, self.drawn = self.drawn, []
        self.decoding = list(self.active)
        _, responses = self.generator.next()
        numbers = {
            row: value
            for rows, values, _ in arriving
            for row, value in zip(rows, np.array(values).T.tolist(), strict=True)
        }
        returned = {self.inserted[response.uid] for response in responses if response.uid not in self.idle}
        for rows, _, features in arriving:
            if self.collector and features is not None:
                kept = [place for place, row in enumerate(rows) if row in returned]
                self.collector.put([(rows[place], len(self.numbers[rows[place]])) for place in kept], features, kept)
        finished = []
        for response in responses:
            row = self.inserted[response.uid]
            if response.uid in self.idle:
                continue  # finished earlier, and not removed from the batch yet
            self.tokens[row].append(response.token)
            self.own[row].append(True)
            self.numbers[row].append(numbers[row])
            ended = self.sampling.ends(self.tokens[row][self.turn[row] :])
            if not ended and len(self.tokens[row]) < self.sampling.max_tokens:
                continue
            self.idle.append(response.uid)
            if ended and self.request.turns is not None:
                self._pause(row, response.uid)
            else:
                self.truncated[row] = not ended
                finished.append(row)
        self._release()
        return finished

    def _pause(self, row: int, uid: int) -> None:
        """Keep the KV cache of a response whose turn has ended, and pass its tokens to the environment."""
        assert self.request.turns is not None
        with mx.stream(self.generator.stream):
            self.paused[row], _ = self.generator.extract_cache([uid])[uid]
        self.turn[row] = len(self.tokens[row])
        self.request.turns.turn_ended(row, np.array(self.tokens[row], dtype=np.int64))

    def _resume(self) -> list[int]:
        """Append the answers that have arrived. Returns the rows that are finished."""
        if self.request.turns is None or not self.paused:
            return []
        finished = []
        busy = len(self.active) > len(self.idle) or self.entering or self.answered
        unread = len(self.tokens) < len(self.request)  # some prompts have not entered yet
        for row, ids in self.request.turns.answers(wait=not busy and not unread):
            cache = self.paused.pop(row)
            if ids is None:
                self.truncated[row] = False
                finished.append(row)
                continue
            self.tokens[row] += ids.tolist()
            self.own[row] += [False] * len(ids)
            self.answered[row] = cache
        return finished

    def _release(self, now: bool = False) -> None:
        """Remove finished rows once they are 1/REFILL of the batch, or ``now``.

        Each removal copies the keys and values of all other rows. If the generator knew when responses end, it would
        remove them one by one.
        """
        if not self.idle or (not now and len(self.idle) * REFILL < max(len(self.active), 1)):
            return
        with mx.stream(self.generator.stream):
            self.generator.remove(self.idle)
        gone = {self.inserted[uid] for uid in self.idle}
        self.active = [row for row in self.active if row not in gone]
        self.idle = []
        for row in gone:
            self.noise.pop(row, None)

    def _logits(self, ids: mx.array, cache: Any) -> mx.array:
        """The model as the generator calls it, with the float32 head that scoring uses."""
        hidden = self.trunk(ids, cache=cache)
        self.hidden = hidden[:, -1, :]
        return self.head.logits(hidden)

    def _sample(self, logprobs: mx.array) -> mx.array:
        """Sample one token for every row of log-probabilities [B, V]."""
        rows, self.decoding = self.decoding, []
        offset = 1  # the previous token is drawn, but not returned yet
        if not rows:
            rows, offset = [self.entering.popleft() for _ in range(len(logprobs))], 0
            self.active += rows
        if self.sampling.temperature not in (0, 1):
            logprobs = logprobs / self.sampling.temperature
            logprobs = logprobs - mx.logsumexp(logprobs, axis=-1, keepdims=True)
        if self.sampling.temperature == 0:
            tokens = mx.argmax(logprobs, axis=-1)
        else:
            last = self.sampling.max_tokens  # finished rows may have passed it
            noise = mx.array(np.array([self.noise[row][min(len(self.tokens[row]) + offset, last)] for row in rows]))
            tokens = inverse_cdf(truncate(mx.exp(logprobs), self.sampling), noise)
        numbers = [pick(logprobs, tokens)] + ([entropy(logprobs)] if self.request.entropies else [])
        stacked, features = mx.stack(numbers), None
        if self.collector and self.request.proxy:
            hidden = self.hidden.astype(self.collector.dtype)
            features = proxies(self.head, hidden, tokens, logprobs, self.request.proxy).astype(self.collector.dtype)
            mx.async_eval(features)
        mx.async_eval(stacked)
        self.drawn.append((rows, stacked, features))
        return tokens

    def _completions(self, rows: int) -> Completions:
        lengths = [len(self.numbers[row]) for row in range(rows)]
        regions = ResponseRegions.of(
            [np.array(self.tokens[row], dtype=np.int64) for row in range(rows)],
            [np.array(self.own[row], dtype=bool) for row in range(rows)],
        )
        numbers = np.array([each for row in range(rows) for each in self.numbers[row]], dtype=np.float32)
        columns = numbers.reshape(sum(lengths), 1 + self.request.entropies).T.copy()
        features = None
        if self.collector and self.request.proxy:
            scale = -np.expm1(columns[0]) if self.request.proxy.kind == "output_row" else np.ones(sum(lengths))
            features = self.collector.features(starts_of(lengths), scale.astype(np.float64))
        return Completions(
            tokens=regions.own_tokens,
            starts=regions.own_starts,
            logprobs=columns[0],
            truncated=np.array([self.truncated[row] for row in range(rows)], dtype=bool),
            version=self.version,
            entropies=columns[1] if self.request.entropies else None,
            features=features,
            regions=regions if self.request.turns is not None else None,
        )


def truncate(probabilities: mx.array, sampling: Sampling) -> mx.array:
    """Probabilities [B, V], with zeros for the tokens that min-p, top-k or top-p exclude."""
    if sampling.min_p > 0:
        least = sampling.min_p * probabilities.max(axis=-1, keepdims=True)
        probabilities = mx.where(probabilities < least, 0.0, probabilities)
    if 0 < sampling.top_k < probabilities.shape[-1]:
        least = mx.topk(probabilities, sampling.top_k, axis=-1).min(axis=-1, keepdims=True)
        probabilities = mx.where(probabilities < least, 0.0, probabilities)
    if sampling.top_p < 1:
        probabilities = nucleus(probabilities, sampling.top_p * probabilities.sum(axis=-1, keepdims=True))
    return probabilities


def nucleus(probabilities: mx.array, level: mx.array) -> mx.array:
    """Probabilities [B, V], with zeros outside the smallest set of likeliest tokens that sums to ``level`` [B, 1].

    Ties with the least likely token of that set are kept.
    """
    ranked = likeliest(probabilities) if probabilities.shape[-1] > CANDIDATES * BLOCK else None
    if ranked is None or mx.any(ranked.sum(axis=-1, keepdims=True) < level).item():
        ranked = -mx.sort(-probabilities, axis=-1)
    before = mx.cumsum(ranked, axis=-1, inclusive=False)
    least = mx.min(mx.where(before < level, ranked, mx.inf), axis=-1, keepdims=True)
    return mx.where(probabilities < least, 0.0, probabilities)


def likeliest(probabilities: mx.array) -> mx.array:
    """The CANDIDATES greatest entries of each row of [B, V], in descending order, without sorting the vocabulary.

    They all lie in the CANDIDATES blocks with the greatest maxima: if a number's block were not among them, that many
    blocks would each hold a number at least as great. On Metal, MLX's partition is a full sort.
    """
    rows, size = probabilities.shape
    blocks = mx.pad(probabilities, [(0, 0), (0, -size % BLOCK)]).reshape(rows, -1, BLOCK)
    best = mx.argsort(-mx.max(blocks, axis=-1), axis=-1)[:, :CANDIDATES]
    inside = mx.take_along_axis(blocks, best[:, :, None], axis=1).reshape(rows, -1)
    return -mx.sort(-inside, axis=-1)[:, :CANDIDATES]


def inverse_cdf(probabilities: mx.array, uniform: mx.array) -> mx.array:
    """The first token whose cumulative weight exceeds the fraction ``uniform`` [B] of the row's total: [B, V] → [B]."""
    cumulative = mx.cumsum(probabilities, axis=-1)
    below_one = mx.minimum(uniform, 1 - 2**-23)  # so that the product stays below the total in float32
    level = below_one[:, None] * cumulative[:, -1:]
    # Rounding alone can raise the cumulative sum, so tokens without weight are excluded.
    return mx.argmax((cumulative > level) & (probabilities > 0), axis=-1)
