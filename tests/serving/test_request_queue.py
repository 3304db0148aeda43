"""The queue of a run, which draws until its episodes are over and stops when the run does."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from backends.interface import Completions, Engine, OnFinished, RolloutRequest, Sampling
from delta_cli.data.tokenizer import Tokenizer
from delta_cli.errors import StopRequested
from delta_cli.serving.request_queue import QueuedPrompt, RequestQueue


def queued(tokenizer: Tokenizer, text: str = "1+1=?\n", seed: int = 0, **settings: Any) -> QueuedPrompt:
    sampling = replace(Sampling(12, tokenizer.eos_ids), **settings)
    return QueuedPrompt(tokenizer.encode(text), sampling, seed, logprobs=True)


def test_it_ends_when_it_is_done_and_can_go_on(engine: Engine, tokenizer: Tokenizer) -> None:
    queue = RequestQueue(8)
    for _ in range(2):
        prompts = [queued(tokenizer, seed=seed) for seed in range(3)]
        queue.submit(prompts)
        queue.run(engine, lambda: all(prompt.responses.done() for prompt in prompts))  # noqa: B023
        assert queue.pending == 0
    woken = threading.Event()
    timer = threading.Timer(0.05, lambda: (woken.set(), queue.wake()))
    timer.start()
    queue.run(engine, woken.is_set)
    timer.join()


def test_what_the_run_raises_ends_it_while_drawing_and_while_idle(engine: Engine, tokenizer: Tokenizer) -> None:
    class Stopped:
        """A sampler in whose rollout the run is asked to stop."""

        version, inbox = 0, None
        drawing = False

        def rollout(self, request: RolloutRequest, on_finished: OnFinished | None = None) -> Completions:
            self.drawing = True
            return engine.rollout(request, on_finished)

        def load_weights(self, weights: object) -> None:
            raise NotImplementedError

    def stop(only: bool) -> None:
        if only:
            raise StopRequested

    sampler, queue = Stopped(), RequestQueue(8)
    prompts = [queued(tokenizer, seed=seed) for seed in range(3)]
    queue.submit(prompts)
    with pytest.raises(StopRequested):
        queue.run(sampler, interrupt=lambda: stop(sampler.drawing))
    assert not any(prompt.responses.done() for prompt in prompts)
    with pytest.raises(StopRequested):
        RequestQueue(8).run(sampler, interrupt=lambda: stop(True))


def test_turns_that_share_a_seed_have_noise_of_their_own(engine: Engine, tokenizer: Tokenizer) -> None:
    """Uniforms that repeat from turn to turn would tie an episode's turns together."""
    first, second, again = queued(tokenizer, "1"), queued(tokenizer, "12"), queued(tokenizer, "1")
    assert first.rows == again.rows
    assert not set(first.rows) & set(second.rows)
    rows = np.array([row for seed in range(50) for row in queued(tokenizer, seed=seed, samples=4).rows])
    assert len(set(rows.tolist())) == len(rows)
    assert rows.min() >= 0
