"""Generate responses in a batch that is refilled: finished responses leave it and waiting ones enter."""

from __future__ import annotations

from collections import Counter

import numpy as np
import torch
from torch import Tensor

from backends.batching import uniforms
from backends.interface import Bools, Completions, Floats, Ids, OnFinished, RolloutRequest, starts_of
from backends.regions import ResponseRegions
from backends.torch.cache import KeyValueCache, Prefix
from backends.torch.cache_size import CacheBudget, new_cache
from backends.torch.cuda_graphs import GraphRunner
from backends.torch.decoder import Decoder, prefill_all
from backends.torch.device import on_device, out_of_memory
from backends.torch.features import DrawnFeatures, TorchFeatureCollector
from backends.torch.model import TorchPolicy
from backends.torch.recurrent import CarriedState
from backends.torch.sampling import TokenDrawer

# Tokens drawn between two checks for finished responses. On CUDA each check waits for the device, and a few
# tokens drawn past the end cost less; on a CPU checking is free.
CHECK_EVERY = {"cpu": 1, "cuda": 8}

# A response enters only if every response could then grow by this many tokens: one that has to leave again must be
# computed anew.
GROWTH = 512


class TorchRollout:
    """One call of ``rollout``. Active responses occupy rows 0 … n−1 of the cache, in no particular order.

    Where the cache has no room for the next tokens, the response with the fewest tokens leaves it. It keeps its tokens
    and waits; when it enters again, their keys and values are computed anew. Its noise depends on nothing else, so it
    goes on as it would have.

    In an episode, a response whose turn has ended is parked: it stays in its row of the cache until its environment
    answers, and only the answer is computed then. What is drawn for its row meanwhile is dropped, and its keys and
    values are overwritten. Recurrent layers cannot undo that, so the row's states are copied when it is parked; they
    must not have passed the end of the turn by then.
    """

    def __init__(
        self,
        policy: TorchPolicy,
        request: RolloutRequest,
        on_finished: OnFinished | None,
        budget: CacheBudget,
        *,
        prefill_tokens: int,
        head_chunk: int,
        version: int,
        collector: TorchFeatureCollector | None = None,
    ) -> None:
        self._policy = policy
        self._prompts = request.prompts
        self._sampling = sampling = request.sampling
        self._seeds = request.global_rows  # [R] rows in the whole batch; they determine the noise
        self._interrupt, self._turns = request.interrupt, request.turns
        self._version = version
        self._proxy, self._collector = request.proxy, collector
        self._on_finished = on_finished
        self._prefill_tokens = prefill_tokens
        exact_states = request.turns is not None and policy.carries_state is not None
        self._every = 1 if exact_states else CHECK_EVERY[policy.device.type]
        self._budget = budget  # shrinks if memory runs out

        count = len(request)
        self.graphs = GraphRunner(policy.device)
        exact = collector is not None and request.proxy is not None and request.proxy.kind != "output_row"
        most = min(budget.slots, request.at_once)
        self._draw = TokenDrawer(policy.head(head_chunk), request, most, self.graphs, exact)
        self._prompt_sizes = np.array([len(prompt) for prompt in self._prompts], dtype=np.int64)
        self._longest = int(self._prompt_sizes.max(initial=0)) + sampling.max_tokens + self._every
        self._queue, self._at_once = request.queue, request.at_once  # the queue is None once it is empty
        self._waiting = [] if self._queue else list(range(count))  # waiting responses, admitted in order
        self._row = np.empty(0, dtype=np.int64)  # [n] response in each row of the cache
        self.preemptions = 0  # responses that left the cache before their end
        self._allocate(count, sampling.max_tokens, 1 + request.entropies)
        self._vacate()

    def _allocate(self, count: int, most: int, numbers: int) -> None:
        """Memory for responses of at most ``most`` tokens. The system commits it only as far as they reach."""
        self._tokens = np.zeros((count, most), dtype=np.int64)
        self._numbers = np.zeros((numbers, count, most), dtype=np.float32)
        self._drawn = np.zeros(count, dtype=np.int64)  # tokens of each response region so far
        self._own = np.ones((count, most), dtype=bool)  # which of them the model wrote
        self._written = np.zeros(count, dtype=np.int64)  # how many of them
        self._turn = np.zeros(count, dtype=np.int64)  # where the present turn begins
        self._parked = np.zeros(count, dtype=bool)  # whose environment is at work
        self._truncated = np.zeros(count, dtype=bool)
        self._finished: list[int] = []  # finished responses that have not been reported

    def _vacate(self) -> None:
        """Put every active response back in the queue and make an empty cache."""
        self._waiting = sorted([*self._row[~self._parked[self._row]].tolist(), *self._waiting])
        self._prefixes: dict[int, Prefix] = {}  # of prompts with waiting responses
        self.graphs.forget()
        self.__dict__.pop("_cache", None)  # its memory is counted as free for the next one
        self.__dict__.pop("_decoder", None)
        wanted = self._at_once if self._queue else len(self._waiting)
        self._cache: KeyValueCache = new_cache(self._policy, self._budget, wanted, self._longest)
        self._decoder = Decoder(self._policy, self._cache, self.graphs)
        self._row = np.empty(0, dtype=np.int64)
        self._length = np.empty(0, dtype=np.int64)  # [n] tokens of each in the cache
        self._states: dict[int, dict[int, CarriedState]] = {}  # of recurrent layers, by parked response and layer
        self._noise = np.empty((self._cache.slots, self._sampling.max_tokens + self._every))  # of each row's response
        # [n, H] hidden states that predict the next tokens
        self._hidden = self._policy.head_weight.new_empty(0, self._policy.head_weight.shape[1])
        self._last = self._hidden.new_empty(0)  # [n] the last drawn token

    @torch.no_grad()
    def run(self) -> Completions:
        """Generate every response. If memory runs out, those under way leave, and half as many enter again."""
        with self._policy.compute():
            while self._queue or self._waiting or len(self._row) or self._parked.any():
                self._interrupt()
                self._advance_within_memory()
                finished, self._finished = self._finished, []
                if self._on_finished:
                    for row in finished:
                        self._on_finished(row, self._tokens[row, : self._drawn[row]].copy())
        mine = np.flatnonzero(self._drawn)  # with a queue, other ranks draw the others
        whole = np.arange(self._sampling.max_tokens) < self._drawn[:, None]
        kept, starts = whole & self._own, starts_of(self._written)
        regions = (
            ResponseRegions(self._tokens[whole], self._own[whole], starts_of(self._drawn)) if self._turns else None
        )
        logprobs, *entropies = (numbers[kept] for numbers in self._numbers)
        return Completions(
            self._tokens[kept],
            starts_of(self._written[mine]),
            logprobs,
            self._truncated[mine],
            self._version,
            entropies[0] if entropies else None,
            self._features(starts, logprobs),
            regions,
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
            if not out_of_memory(error) or not self._budget.halve(self._cache, self._longest):
                raise
        # Not inside the handler: the exception would keep the failed attempt's tensors alive.
        if self._collector is not None:
            self._collector.discard(self._row, self._written[self._row])
        self.preemptions += len(self._row)
        self._vacate()

    def _advance(self) -> None:
        """Admit waiting responses and draw a few tokens for each active one."""
        self._resume(wait=False)
        if len(self._row):
            self._forward(self._last)
        self._admit()
        if self._parked[self._row].all():  # also if there are none
            self._settle()
            self._resume(wait=True)
            return
        self._make_room()
        ids, numbers, rows = self._draw_block()
        finished = self._harvest(ids.cpu().numpy(), numbers.cpu().numpy(), rows)
        self._finished += self._row[finished].tolist()
        self._last = self._release(finished, ids[-1])
        self._settle()

    # ------------------------------------------------------------------------------ episodes

    def _settle(self) -> None:
        """Forget what was computed for parked responses: the cache holds all their tokens but the last."""
        rows = self._row
        self._length = np.where(self._parked[rows], self._prompt_and_drawn(rows) - 1, self._length)

    def _resume(self, wait: bool) -> None:
        """Append the answers that have arrived; responses that are over leave the cache.

        Called where the cache holds all tokens of each response but the last.
        """
        if self._turns is None or not self._parked.any():
            return
        answers = dict(self._turns.answers(wait))
        over = [row for row, ids in answers.items() if ids is None]
        more = {row: ids for row, ids in answers.items() if ids is not None}
        self._parked[[*answers]] = False
        states = {row: self._states.pop(row, {}) for row in answers}
        self._finished += over
        for row, ids in more.items():
            first, last = int(self._drawn[row]), int(self._drawn[row]) + len(ids)
            self._tokens[row, first:last], self._own[row, first:last] = ids, False
            self._drawn[row] = self._turn[row] = last
        there = np.isin(self._row, list(more))
        grown = self._length + self._every + np.where(there, self._prompt_and_drawn(self._row) - self._length, 0)
        leaving = np.isin(self._row, over) | (there & (not self._cache.fits(grown)))
        self._waiting = sorted([*self._waiting, *(row for row in more if row not in self._row[~leaving])])
        if len(self._row):
            self._last = self._release(leaving, self._last)
        slots = np.flatnonzero(np.isin(self._row, list(more)))
        if len(slots):
            rows = self._row[slots]
            for slot, row in zip(slots.tolist(), rows.tolist(), strict=True):
                self._cache.restore(slot, states[row])
            chunks = [self._tokens[row, self._turn[row] - len(more[row]) - 1 : self._turn[row] - 1] for row in rows]
            self._append(slots, chunks)
            self._cache.grow(self._length + 1)  # for the last token of the answer, which the next forward appends
            newest = self._tokens[rows, self._drawn[rows] - 1]
            self._last[on_device(slots, self._last.device)] = on_device(newest, self._last.device)

    def _prompt_and_drawn(self, rows: Ids) -> Ids:
        """Tokens of the responses ``rows`` and their prompts."""
        return np.asarray(self._prompt_sizes[rows // self._sampling.samples] + self._drawn[rows])

    # ------------------------------------------------------------------------------ decoding

    def _draw_block(self) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Draw ``every`` tokens for each active response without copying them to the host.

        Returns ids [every, n], numbers [every, k, n] and, if features are kept, their rows [n, H] for each draw.
        """
        drawn = self._drawn[self._row]
        columns = drawn[:, None] + np.arange(self._every)
        known = np.take_along_axis(self._noise[: len(self._row)], columns, axis=1)
        noise = on_device(known.T.copy(), self._hidden.device)
        block = [self._draw(self._hidden, noise[0])]
        for step in range(1, self._every):
            self._forward(block[-1][0])
            block.append(self._draw(self._hidden, noise[step]))
        ids, numbers, rows = zip(*block, strict=True)
        return torch.stack(ids), torch.stack(numbers), list(rows)

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
            going = ~(finished | self._parked[self._row])
            rows = self._row[going]
            at = self._drawn[rows]
            self._tokens[rows, at] = ids[step, going]
            self._numbers[:, rows, at] = numbers[step][:, going]
            if self._collector is not None:
                kept = features[step] if going.all() else features[step][torch.from_numpy(going)]
                self._collector.put(rows, self._written[rows], kept)
            self._drawn[rows] = at + 1
            self._written[rows] += 1
            full, ended = at + 1 == self._sampling.max_tokens, self._ended(rows, ids[step, going])
            self._truncated[rows] = full & ~ended
            if self._turns is None:
                finished[going] = full | ended
            else:
                finished[going] = full & ~ended
                self._parked[rows[ended]] = True
                for slot, row in zip(np.flatnonzero(going)[ended].tolist(), rows[ended].tolist(), strict=True):
                    self._states[row] = self._cache.states_of(slot)
                    self._turns.turn_ended(row, self._tokens[row, : self._drawn[row]].copy())
        return finished

    def _ended(self, rows: Ids, last: Ids) -> Bools:
        """Which responses end with their ``last`` token."""
        ended: Bools = np.isin(last, self._sampling.stop_ids)
        if (stop := self._sampling.stop) is not None:
            texts = [stop.completed_by(self._tokens[row, self._turn[row] : self._drawn[row]]) for row in rows]
            ended |= np.array(texts, dtype=bool)  # an empty list would become floats
        return ended

    def _release(self, finished: Bools, last: Tensor) -> Tensor:
        """Move responses from the end into the rows of finished ones; reorders ``last`` [n] in the same way."""
        if not finished.any():
            return last
        order = self._without(finished)
        self._arrange(order)
        return last[on_device(order, last.device)]

    @staticmethod
    def _without(leaving: Bools) -> Ids:
        """The order of rows that drops those ``leaving`` and moves as few others as possible."""
        used = int((~leaving).sum())
        order = np.arange(used)
        order[np.flatnonzero(leaving[:used])] = used + np.flatnonzero(~leaving[used:])
        return order

    def _arrange(self, order: Ids) -> None:
        """Keep the rows ``order`` of the cache, in that order. Their hidden states stay where they are."""
        moved = np.flatnonzero(order != np.arange(len(order)))
        self._row, self._length, self._hidden = self._row[order], self._length[order], self._hidden[: len(order)]
        self._noise[moved] = self._noise[order[moved]]
        self._cache.arrange(order)

    def _make_room(self) -> None:
        """Let responses leave until the others can grow by the next tokens."""
        while not self._cache.fits(needed := self._length + self._every):
            if len(self._row) == 1:
                raise torch.OutOfMemoryError("out of memory: a single response fills the cache of keys and values")
            leaving = np.zeros(len(self._row), dtype=bool)
            leaving[self._drawn[self._row].argmin()] = True
            order = self._without(leaving)
            self._waiting = sorted([*self._row[leaving & ~self._parked[self._row]].tolist(), *self._waiting])
            hidden = self._hidden[on_device(order, self._hidden.device)]
            self._arrange(order)
            self._hidden = hidden
            self.preemptions += 1
        self._cache.grow(needed)

    def _admit(self) -> None:
        """Admit waiting responses once an eighth of the rows is free; a prefill for each one would cost more."""
        free = self._cache.slots - len(self._row)
        if free == 0 or (len(self._row) and free * 8 < self._cache.slots):
            return
        self._take_prompts(free)
        if not self._waiting:
            return
        count = self._admissible(min(free, len(self._waiting)))
        if count == 0:
            return
        rows = np.array(self._waiting[:count])
        prompts = (rows // self._sampling.samples).tolist()
        copies = Counter(prompts)
        new = [prompt for prompt in copies if prompt not in self._prefixes]
        found = prefill_all(self._policy, [self._prompts[prompt] for prompt in new], self._prefill_tokens)
        self._prefixes.update(zip(new, found, strict=True))
        for prompt, number in copies.items():
            self._cache.admit(self._prefixes[prompt], number)
        prefixes = [self._prefixes[prompt] for prompt in prompts]
        for slot, row in enumerate(rows.tolist(), start=len(self._row)):
            self._noise[slot] = uniforms(self._sampling.seed, int(self._seeds[row]), self._noise.shape[1])
        self._hidden = torch.cat([self._hidden, torch.stack([prefix.hidden for prefix in prefixes]).to(self._hidden)])
        self._row = np.concatenate([self._row, rows])
        self._length = np.concatenate([self._length, [prefix.length for prefix in prefixes]])
        self._waiting = self._waiting[count:]
        next_prompt = self._waiting[0] // self._sampling.samples if self._waiting else None
        self._prefixes = {prompt: prefix.clone() for prompt, prefix in self._prefixes.items() if prompt == next_prompt}
        again = np.flatnonzero((self._drawn[self._row] > 0) & (np.arange(len(self._row)) >= len(self._row) - count))
        if len(again):
            self._append(again, [self._tokens[row, : self._drawn[row]] for row in self._row[again]])

    def _take_prompts(self, free: int) -> None:
        """Take prompts from the queue while there is room for their responses, and others can take their share."""
        samples = self._sampling.samples
        while self._queue and len(self._waiting) < free:
            waiting = len(self._waiting)
            if waiting + len(self._row) + samples > self._at_once:
                return
            if waiting and self._admissible(waiting) < waiting:
                return
            prompt = self._queue.take()
            if prompt is None:
                self._queue = None
            else:
                self._waiting += range(prompt * samples, (prompt + 1) * samples)

    def _admissible(self, most: int) -> int:
        """How many of the first ``most`` waiting responses the cache has room for, with room for all to grow.

        0 if few of those that wait could enter, unless there are no active ones: a prefill for each would cost more.
        """
        rows = np.concatenate([self._row, self._waiting[:most]]).astype(np.int64)
        held = self._prompt_and_drawn(rows)
        ahead = np.minimum(GROWTH, self._sampling.max_tokens - self._drawn[rows]) + self._every
        count, active = most, len(self._row)
        while count and not self._cache.fits((held + ahead)[: active + count]):
            count -= 1
        if not active:
            return max(1, count)  # at least one, and it may find more room than that
        return count if count == most or 8 * count >= active + count else 0

    def _append(self, rows: Ids, chunks: list[Ids]) -> None:
        """Append given tokens to the responses at ``rows`` of the cache, after the tokens that it holds of them."""
        lengths = self._length.copy()
        lengths[rows] += [len(chunk) for chunk in chunks]
        self._cache.grow(lengths)
        hidden = self._decoder.append(rows, self._length[rows], chunks, self._prefill_tokens)
        self._hidden[on_device(rows, self._hidden.device)] = hidden.to(self._hidden)
        self._length = lengths
