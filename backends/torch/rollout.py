"""Generate responses in a batch that is refilled: finished responses leave it and waiting ones enter."""

from __future__ import annotations

from collections import Counter

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache

from backends.batching import pack, uniforms
from backends.interface import Bools, Completions, Floats, Ids, OnFinished, RolloutRequest, Sequences, starts_of
from backends.torch.cache import Prefix, SlotCache
from backends.torch.cuda_graphs import Decoder
from backends.torch.features import DrawnFeatures, TorchFeatureCollector
from backends.torch.memory import out_of_memory
from backends.torch.model import TorchPolicy
from backends.torch.sampling import draw

# Tokens drawn between two checks for finished responses. On CUDA each check waits for the device, and a few
# tokens drawn past the end cost less; on a CPU checking is free.
CHECK_EVERY = {"cpu": 1, "cuda": 8}


class TorchRollout:
    """One call of ``rollout``. Active responses occupy slots 0 … n−1, in no particular order."""

    def __init__(
        self,
        policy: TorchPolicy,
        request: RolloutRequest,
        on_finished: OnFinished | None,
        *,
        slots: int,
        cache_token_limit: int,
        prefill_tokens: int,
        head_chunk: int,
        version: int,
        collector: TorchFeatureCollector | None = None,
    ) -> None:
        self._policy = policy
        self._head = policy.head(head_chunk)
        self._prompts = prompts = request.prompts
        self._sampling = sampling = request.sampling
        self._seeds = request.global_rows  # [R] rows in the whole batch; they determine the noise
        self._interrupt = request.interrupt
        self._version = version
        self._proxy, self._collector = request.proxy, collector
        self._on_finished = on_finished
        self._prefill_tokens = prefill_tokens
        self._every = CHECK_EVERY[policy.device.type]

        count = len(request)
        self.cache_token_limit = cache_token_limit  # shrinks if memory runs out
        self._slots = slots
        self._buffers = self._head.buffers(min(slots, count), 2)
        self._longest = max((len(prompt) for prompt in prompts), default=0) + sampling.max_tokens + self._every
        self._waiting = list(range(count))  # waiting responses, admitted in order
        self._row = np.empty(0, dtype=np.int64)  # [n] response in each slot
        self._vacate()

        # The system commits memory only as far as responses reach.
        self._tokens = np.zeros((count, sampling.max_tokens), dtype=np.int64)
        self._numbers = np.zeros((1 + request.entropies, count, sampling.max_tokens), dtype=np.float32)
        self._drawn = np.zeros(count, dtype=np.int64)  # tokens of each response so far
        self._truncated = np.zeros(count, dtype=bool)
        self._finished: list[int] = []  # finished responses that have not been reported

    def _vacate(self) -> None:
        """Put every active response back in the queue and empty the slots."""
        self._waiting = [*sorted(self._row.tolist()), *self._waiting]
        slots = min(self._slots, len(self._waiting), max(1, self.cache_token_limit // self._longest))
        self._prefixes: dict[int, Prefix] = {}  # of prompts with waiting responses
        self._cache = SlotCache(slots, self._longest, self._policy.dtype, self._policy.windows)
        self._decoder = Decoder(self._policy, self._cache)
        self._row = np.empty(0, dtype=np.int64)
        self._length = np.empty(0, dtype=np.int64)  # [n] tokens of each in the cache
        self._noise = np.empty((slots, self._sampling.max_tokens + self._every))  # of the response in each slot
        # [n, H] hidden states that predict the next tokens
        self._hidden = self._policy.head_weight.new_empty(0, self._policy.head_weight.shape[1])
        self._last = self._hidden.new_empty(0)  # [n] the last drawn token

    @torch.no_grad()
    def run(self) -> Completions:
        """Generate every response. If memory runs out, the active ones start over, half as many at a time.

        This changes nothing beyond rounding, because a response's noise does not depend on the others in the batch.
        """
        with self._policy.compute():
            while self._waiting or len(self._row):
                self._interrupt()
                self._advance_within_memory()
                finished, self._finished = self._finished, []
                if self._on_finished:
                    for row in finished:
                        self._on_finished(row, self._tokens[row, : self._drawn[row]].copy())
        kept = np.arange(self._sampling.max_tokens) < self._drawn[:, None]
        starts = starts_of(self._drawn)
        logprobs, *entropies = (numbers[kept] for numbers in self._numbers)
        return Completions(
            self._tokens[kept],
            starts,
            logprobs,
            self._truncated,
            self._version,
            entropies[0] if entropies else None,
            self._features(starts, logprobs),
        )

    def _features(self, starts: Ids, logprobs: Floats) -> DrawnFeatures | None:
        if self._collector is None or self._proxy is None:
            return None
        known = torch.from_numpy(logprobs).to(self._policy.device)
        return self._collector.features(
            starts, -torch.expm1(known) if self._proxy.kind == "output_row" else torch.ones_like(known)
        )

    def _advance_within_memory(self) -> None:
        try:
            self._advance()
            return
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error) or self._cache.slots == 1:
                raise
        # Not inside the handler: the exception would keep the failed attempt's tensors alive.
        self.cache_token_limit = self._cache.slots * self._longest // 2
        self._drawn[self._row] = 0
        if self._collector is not None:
            self._collector.discard(self._row)
        self._vacate()

    def _advance(self) -> None:
        """Admit waiting responses and draw a few tokens for each active one."""
        if len(self._row):
            self._forward(self._last)
        self._admit()
        ids, numbers, rows = self._draw_block()
        finished = self._harvest(ids.cpu().numpy(), numbers.cpu().numpy(), rows)
        self._finished += self._row[finished].tolist()
        self._last = self._release(finished, ids[-1])

    # ------------------------------------------------------------------------------ decoding

    def _draw_block(self) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Draw ``every`` tokens for each active response without copying them to the host.

        Returns ids [every, n], numbers [every, k, n] and, if features are kept, their rows [n, H] for each draw.
        """
        drawn = self._drawn[self._row]
        columns = drawn[:, None] + np.arange(self._every)
        known = np.take_along_axis(self._noise[: len(self._row)], columns, axis=1)
        noise = torch.from_numpy(known.T.copy()).to(self._hidden.device)
        block = [self._draw(noise[0])]
        for step in range(1, self._every):
            self._forward(block[-1][0])
            block.append(self._draw(noise[step]))
        ids, numbers, rows = zip(*block, strict=True)
        return torch.stack(ids), torch.stack(numbers), list(rows)

    def _draw(self, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The next token of each active response [n], its numbers [1 or 2, n] and its feature row [n, H].

        The numbers are its log-probability and, if requested, the entropy of its distribution.
        """
        hidden, count = self._hidden, len(self._hidden)
        ids = torch.empty(count, dtype=torch.int64, device=noise.device)
        numbers = torch.empty(len(self._numbers), count, device=noise.device)
        exact = self._collector is not None and self._proxy is not None and self._proxy.kind != "output_row"
        rows = torch.empty(count, hidden.shape[1], device=hidden.device) if exact else hidden
        with torch.autocast(hidden.device.type, enabled=False):
            for first in range(0, count, self._head.chunk):
                part = slice(first, first + self._head.chunk)
                self._draw_chunk(hidden[part], noise[part], ids[part], numbers[:, part], rows[part] if exact else None)
        return ids, numbers, rows

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

    def _forward(self, ids: Tensor) -> None:
        """Append ids [n] to the active responses and compute the hidden states that predict the next tokens."""
        self._hidden = self._decoder(ids, self._length)
        self._length = self._length + 1  # a new array, because the device may still read the old one

    # ------------------------------------------------------------------ finished and waiting

    def _harvest(self, ids: Ids, numbers: Floats, features: list[Tensor]) -> Bools:
        """Record the drawn tokens [every, n] and their numbers up to each response's end.

        ``numbers`` is [every, k, n]; ``features`` holds the rows [n, H] of each draw. Returns which slots have
        finished.
        """
        finished = np.zeros(len(self._row), dtype=bool)
        for step in range(len(ids)):
            going = ~finished
            rows = self._row[going]
            at = self._drawn[rows]
            self._tokens[rows, at] = ids[step, going]
            self._numbers[:, rows, at] = numbers[step][:, going]
            if self._collector is not None:
                kept = features[step] if going.all() else features[step][torch.from_numpy(going)]
                self._collector.put(rows, at, kept)
            self._drawn[rows] = at + 1
            full, ended = at + 1 == self._sampling.max_tokens, self._ended(rows, ids[step, going])
            self._truncated[rows] = full & ~ended
            finished[going] = full | ended
        return finished

    def _ended(self, rows: Ids, last: Ids) -> Bools:
        """Which responses end with their ``last`` token."""
        ended: Bools = np.isin(last, self._sampling.stop_ids)
        if (stop := self._sampling.stop) is not None:
            texts = [stop.completed_by(self._tokens[row, : self._drawn[row]]) for row in rows]
            ended |= np.array(texts, dtype=bool)  # an empty list would become floats
        return ended

    def _release(self, finished: Bools, last: Tensor) -> Tensor:
        """Move responses from the end into the slots of finished ones; reorders ``last`` [n] in the same way."""
        if not finished.any():
            return last
        used = int((~finished).sum())
        targets = np.flatnonzero(finished[:used])
        sources = used + np.flatnonzero(~finished[used:])
        order = np.arange(used)
        order[targets] = sources
        self._row, self._length, self._hidden = self._row[order], self._length[order], self._hidden[:used]
        self._noise[targets] = self._noise[sources]
        device = last.device
        self._cache.move(torch.from_numpy(sources).to(device), torch.from_numpy(targets).to(device), used)
        return last[torch.from_numpy(order).to(device)]

    def _admit(self) -> None:
        """Admit waiting responses once an eighth of the slots is free; a prefill for each one would cost more."""
        free = self._cache.slots - len(self._row)
        count = min(free, len(self._waiting))
        if count == 0 or (len(self._row) and free * 8 < self._cache.slots):
            return
        rows = self._waiting[:count]
        prompts = [row // self._sampling.samples for row in rows]
        copies = Counter(prompts)
        self._prefill([prompt for prompt in copies if prompt not in self._prefixes])
        for prompt, number in copies.items():
            self._cache.admit(self._prefixes[prompt], number)
        prefixes = [self._prefixes[prompt] for prompt in prompts]
        for slot, row in enumerate(rows, start=len(self._row)):
            self._noise[slot] = uniforms(self._sampling.seed, int(self._seeds[row]), self._noise.shape[1])
        self._hidden = torch.cat([self._hidden, torch.stack([prefix.hidden for prefix in prefixes]).to(self._hidden)])
        self._row = np.concatenate([self._row, rows])
        self._length = np.concatenate([self._length, [prefix.length for prefix in prefixes]])
        self._waiting = self._waiting[count:]
        next_prompt = self._waiting[0] // self._sampling.samples if self._waiting else None
        self._prefixes = {prompt: prefix.clone() for prompt, prefix in self._prefixes.items() if prompt == next_prompt}

    def _prefill(self, prompts: list[int]) -> None:
        """Run the trunk over prompts, as many tokens at a time as allowed, and keep their caches and last states."""
        group: list[int] = []
        tokens = 0
        for prompt in prompts:
            tokens += len(self._prompts[prompt])
            if group and tokens > self._prefill_tokens:
                self._prefill_group(group)
                group, tokens = [], len(self._prompts[prompt])
            group.append(prompt)
        if group:
            self._prefill_group(group)

    def _prefill_group(self, prompts: list[int]) -> None:
        starts = np.zeros(len(prompts) + 1, dtype=np.int64)  # no response tokens yet
        sequences = Sequences(tuple(self._prompts[prompt] for prompt in prompts), starts[:0], starts)
        batch = pack(sequences, [[row] for row in range(len(prompts))])
        cache = DynamicCache()
        hidden = self._policy.packed_hidden(batch, cache)
        for prompt, group, last in zip(prompts, batch.groups, batch.predicts, strict=True):
            part = slice(group.start, group.start + group.prompt)
            layers = [(layer.keys[0, :, part], layer.values[0, :, part]) for layer in cache.layers]
            by_token = [(keys.transpose(0, 1), values.transpose(0, 1)) for keys, values in layers]
            self._prefixes[prompt] = Prefix(group.prompt, hidden[last], by_token)
