"""Prompts that wait for the engine. Those with equal sampling settings are drawn as one batch.

The noise of a response depends on its prompt and its request's seed, so its tokens do not depend on what else is being
served, beyond rounding.
"""

from __future__ import annotations

import queue
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from backends.arrays import Floats, Ids
from backends.interface import RolloutRequest, Sampler, Sampling
from delta_cli.seeds import derive

GATHER_SECONDS = 0.005  # after a request arrives at an idle engine, for others that were sent at the same time
IDLE_SECONDS = 0.5  # between two checks whether the queue's user wants to stop
ENGINE_SEED = 0  # of every batch: the seeds of requests are in the rows


class QueueFullError(Exception):
    """As many prompts are waiting as the queue holds."""


class QueueClosedError(Exception):
    """The server is stopping."""


class _BatchAbandoned(Exception):
    """Nobody waits for the batch any more."""


@dataclass(frozen=True)
class FinishedResponse:
    """One response to a prompt."""

    tokens: Ids  # [n], the token that ended it included
    truncated: bool  # it reached max_tokens without an end
    logprobs: Floats | None  # [n], at the sampling temperature; None if they were not requested


@dataclass(frozen=True, eq=False)
class QueuedPrompt:
    """A prompt with its sampling settings; ``responses`` gets ``sampling.samples`` of them, or an error.

    Cancel ``responses`` if no client waits for them any more.
    """

    prompt: Ids
    sampling: Sampling  # its seed is not used
    seed: int
    logprobs: bool = False
    responses: Future[list[FinishedResponse]] = field(default_factory=Future)

    @property
    def batch_key(self) -> tuple[object, ...]:
        """Prompts with equal keys can be drawn in one batch."""
        stop = self.sampling.stop
        settings = {name: value for name, value in vars(self.sampling).items() if name not in ("seed", "stop")}
        return (*settings.values(), None if stop is None else stop.strings)

    @property
    def rows(self) -> list[int]:
        """The rows that determine the noise of its responses: a function of its seed and its ids.

        The turns of an episode may share a seed. Their prompts differ, and so does their noise.
        """
        seed = derive(self.seed % 2**64, zlib.crc32(self.prompt.tobytes()), "prompt")
        return [derive(seed, sample, "serve") for sample in range(self.sampling.samples)]


class RequestQueue:
    """Prompts are submitted from any thread; the thread that calls ``run`` draws their responses."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity  # of responses
        self._arrived: queue.SimpleQueue[QueuedPrompt | None] = queue.SimpleQueue()  # None: closed
        self.pending = 0  # responses that are waiting or under way
        self.idle = 0.0  # seconds in which ``run`` had nothing to draw
        self._lock = threading.Lock()
        self._closed = False

    def submit(self, prompts: Sequence[QueuedPrompt]) -> None:
        """Queue all of these prompts, or none.

        Raises QueueFullError if there is no room for all their responses, QueueClosedError after ``close``.
        """
        count = sum(prompt.sampling.samples for prompt in prompts)
        with self._lock:
            if self._closed:
                raise QueueClosedError
            if self.pending + count > self.capacity:
                raise QueueFullError
            self.pending += count
            for prompt in prompts:
                self._arrived.put(prompt)
        for prompt in prompts:
            prompt.responses.add_done_callback(partial(self._leave, prompt.sampling.samples))

    def _leave(self, samples: int, _: Future[list[FinishedResponse]]) -> None:
        with self._lock:
            self.pending -= samples

    def close(self) -> None:
        """End ``run`` soon. May be called from a signal handler; prompts without an answer get QueueClosedError."""
        self._closed = True
        self._arrived.put(None)

    def wake(self) -> None:
        """Let ``run`` look at once whether it is done."""
        self._arrived.put(None)

    def run(
        self,
        sampler: Sampler,
        done: Callable[[], bool] = lambda: False,
        interrupt: Callable[[], None] = lambda: None,
    ) -> None:
        """Draw responses until ``done()``, or until ``close`` is called, which answers all that still wait.

        What the engine raises is the answer of the prompts it was raised for. ``interrupt`` is called every few tokens
        and twice a second while nothing waits; an exception that it raises ends the call.
        """
        waiting: list[QueuedPrompt] = []
        while not self._closed and not done():
            interrupt()
            waiting += self._gather(block=not waiting)
            waiting = [prompt for prompt in waiting if not prompt.responses.done()]
            batches: dict[object, list[QueuedPrompt]] = {}  # in order of arrival
            for prompt in waiting:
                batches.setdefault(prompt.batch_key, []).append(prompt)
            if batches and not self._closed:
                self._draw(sampler, next(iter(batches.values())), interrupt)
        if not self._closed:
            return
        with self._lock:
            waiting += self._gather(block=False)
        for prompt in waiting:
            _fail(prompt, QueueClosedError())

    def _gather(self, block: bool) -> list[QueuedPrompt]:
        """What has arrived. With ``block``, waits a while for the first prompt, then a moment for others."""
        found, start = [], time.perf_counter()
        if block:
            try:
                found.append(self._arrived.get(timeout=IDLE_SECONDS))
                time.sleep(GATHER_SECONDS)
            except queue.Empty:
                return []
            finally:
                self.idle += time.perf_counter() - start
        while not self._arrived.empty():
            found.append(self._arrived.get())
        return [prompt for prompt in found if prompt is not None]

    def _draw(self, sampler: Sampler, prompts: list[QueuedPrompt], interrupt: Callable[[], None]) -> None:
        """Answer a batch. If it fails, each prompt is tried alone, so that one does not fail with another."""
        batch = _Batch(sampler, prompts, lambda: self._closed, interrupt)
        try:
            batch.draw()
        except _BatchAbandoned:
            return
        except Exception as error:  # whatever the engine raises is the answer, and the server goes on
            if error is batch.interruption:
                raise
            if len(prompts) == 1:
                _fail(prompts[0], error)
                return
            for prompt in prompts:
                if not prompt.responses.done() and not self._closed:
                    self._draw(sampler, [prompt], interrupt)


class _Batch:
    """One rollout. A prompt whose log-probabilities are not requested is answered as soon as its responses end."""

    def __init__(
        self,
        sampler: Sampler,
        prompts: list[QueuedPrompt],
        closed: Callable[[], bool],
        interrupt: Callable[[], None],
    ) -> None:
        self._sampler, self._prompts, self._closed, self._stop = sampler, prompts, closed, interrupt
        self.interruption: BaseException | None = None  # that ended the batch from outside
        self._sampling = prompts[0].sampling
        self._finished: dict[int, FinishedResponse] = {}  # by its place in the batch

    def draw(self) -> None:
        """Draw and answer. Raises _BatchAbandoned if no client waits any more."""
        rows = np.array([row for prompt in self._prompts for row in prompt.rows], dtype=np.int64)
        drawn = self._sampler.rollout(
            RolloutRequest(
                tuple(prompt.prompt for prompt in self._prompts),
                replace(self._sampling, seed=ENGINE_SEED),
                rows,
                interrupt=self._interrupt,
            ),
            self._on_finished,
        )
        for place, (first, last) in enumerate(zip(drawn.starts[:-1], drawn.starts[1:], strict=True)):
            self._finished[place] = FinishedResponse(
                drawn.tokens[first:last], bool(drawn.truncated[place]), drawn.logprobs[first:last]
            )
        for index in range(len(self._prompts)):
            self._answer(index)

    def _interrupt(self) -> None:
        try:
            self._stop()
        except BaseException as error:
            self.interruption = error
            raise
        if self._closed() or all(prompt.responses.done() for prompt in self._prompts):
            raise _BatchAbandoned

    def _on_finished(self, place: int, tokens: Ids) -> None:
        self._finished[place] = FinishedResponse(tokens.copy(), not self._sampling.ends(tokens), None)
        index = place // self._sampling.samples
        if not self._prompts[index].logprobs:
            self._answer(index)

    def _answer(self, index: int) -> None:
        """Hand over the responses to a prompt once all of them are there."""
        samples, prompt = self._sampling.samples, self._prompts[index]
        places = range(index * samples, (index + 1) * samples)
        if all(place in self._finished for place in places) and _claim(prompt):
            prompt.responses.set_result([self._finished[place] for place in places])


def _claim(prompt: QueuedPrompt) -> bool:
    """Whether the prompt still waits for an answer; it cannot be cancelled afterwards."""
    return not prompt.responses.done() and prompt.responses.set_running_or_notify_cancel()


def _fail(prompt: QueuedPrompt, error: Exception) -> None:
    if _claim(prompt):
        prompt.responses.set_exception(error)
