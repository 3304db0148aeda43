"""Ranks that take prompts from a queue draw what they draw with fixed shares."""

from __future__ import annotations

import itertools
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backends import registry
from backends.collective import SOLO, SharedPrompts
from backends.interface import Completions, Proxy, RolloutRequest, Sampling, token_index
from delta_cli.assets import model_path
from delta_cli.data import arithmetic
from delta_cli.data.arithmetic import Arithmetic
from delta_cli.data.tokenizer import Tokenizer
from delta_cli.errors import StopRequested, UserError
from delta_cli.recipe.backend_settings import backend_settings
from delta_cli.rollout.batch import RolloutBatch
from delta_cli.rollout.worker import RolloutWorker
from delta_cli.training import setup
from tests.credit.ranks import Meeting, ThreadRanks, on_ranks
from tests.harness import make_recipe

pytest.importorskip("torch", reason="only the PyTorch backend takes prompts")

LOADING = threading.Lock()  # transformers loads one model at a time


class Ranks(ThreadRanks):
    """Ranks as threads that add up arrays of any type and count together."""

    def sum(self, array: np.ndarray) -> np.ndarray:
        return np.asarray(np.sum(self.gather(array), axis=0))

    def tickets(self) -> Any:
        return self.gather(itertools.count().__next__)[0]


def queues(size: int, prompts: int) -> list[SharedPrompts]:
    take = itertools.count().__next__
    return [SharedPrompts(take, ThreadRanks(rank, size, Meeting(size)), prompts) for rank in range(size)]


def test_a_rank_that_takes_its_share_at_once_gets_what_a_fixed_share_has() -> None:
    first, second = queues(2, 5)
    for queue in (first, second):
        while len(queue.taken) < queue.share and queue.take() is not None:
            pass
    assert first.taken == [0, 2, 4]
    assert second.taken == [1, 3]
    assert first.take() is None


def test_a_rank_that_stops_leaves_nothing() -> None:
    first, second = queues(2, 6)
    first.take()
    first.close()
    assert second.take() is None
    assert second.taken == []


@pytest.mark.parametrize("slots", [3, 64])
def test_the_engine_draws_the_prompts_that_it_takes(slots: int, model: Path) -> None:
    """The responses of the whole batch, with their features, in the order of the prompts."""
    rng = np.random.default_rng(0)
    sampling = Sampling(max_tokens=12, stop_ids=(0, 3), samples=2, seed=5)
    request = RolloutRequest(
        tuple(rng.integers(4, 12, size) for size in (3, 9, 1, 5, 7)), sampling, entropies=True, proxy=Proxy()
    )
    recipe = make_recipe(model, rollout__batch=slots)
    engine = registry.create("cpu", backend_settings(recipe))
    expected = engine.rollout(request)
    queue, _ = queues(2, 5)
    for other in (2, 4):  # another rank takes some in between
        queue._order.remove(other)
    finished = set[int]()
    found = engine.rollout(replace(request, queue=queue), lambda row, tokens: finished.add(row))
    assert queue.taken == [0, 1, 3]
    rows = np.array([0, 1, 2, 3, 6, 7])
    assert finished == set(rows.tolist())
    index = token_index(expected.starts, rows)
    np.testing.assert_array_equal(found.tokens, expected.tokens[index])
    np.testing.assert_array_equal(np.diff(found.starts), np.diff(expected.starts)[rows])
    np.testing.assert_array_equal(found.truncated, expected.truncated[rows])
    np.testing.assert_allclose(found.logprobs, expected.logprobs[index], atol=1e-5, rtol=0)
    weights = np.random.default_rng(1).normal(size=(2, len(index)))
    whole = np.zeros((2, len(expected.tokens)))
    whole[:, index] = weights
    assert found.features is not None
    assert expected.features is not None
    np.testing.assert_allclose(
        found.features.weighted_sum(weights), expected.features.weighted_sum(whole), atol=1e-4, rtol=0
    )


def drawn(ranks: Any, queue: bool, first_done: threading.Event, stops: bool = False) -> tuple[RolloutBatch, int]:
    """The batch on one rank, and how many prompts it drew. Rank 1 takes some, then waits until rank 0 is done."""
    recipe = make_recipe(Path(model_path("tiny-base")), rollout__batch=4)
    tokenizer = Tokenizer.load(model_path("tiny-base"))
    problems = arithmetic.problems(Arithmetic(operation="add", digits=2), 7, 0)
    sampling = Sampling(max_tokens=12, stop_ids=tokenizer.eos_ids, samples=2, seed=7)
    prompts, passed = list[int](), itertools.count()

    def interrupt() -> None:
        if ranks.rank == 1 and next(passed) == 1:
            if stops:
                raise StopRequested
            assert first_done.wait(20)

    with LOADING:
        engine = registry.create("cpu", backend_settings(recipe))
    engine_rollout = engine.rollout

    def rollout(request: RolloutRequest, on_finished: Any) -> Completions:
        found = engine_rollout(request, on_finished)
        prompts.append((len(found.starts) - 1) // 2)
        first_done.set()
        return found

    engine.rollout = rollout  # type: ignore[method-assign]
    with setup.make_grader(recipe) as grader:
        worker = RolloutWorker(engine, tokenizer, grader, "plain", ranks, prompt_queue=queue)
        return worker.sample(problems, sampling, interrupt=interrupt, entropies=True).result(), prompts[0]


def test_ranks_gather_the_batch_of_fixed_shares() -> None:
    """A fast rank draws more than its share; the batch is that of one process, the same bits on every rank."""
    done = threading.Event()
    alone, _ = drawn(SOLO, False, threading.Event())
    found = on_ranks(2, lambda each: drawn(Ranks(each.rank, 2, each.meeting), True, done))
    (first, most), (second, least) = found
    assert (most, least) == (5, 2)
    for found in (first, second):
        np.testing.assert_array_equal(found.sequences.tokens, alone.sequences.tokens)
        np.testing.assert_array_equal(found.sequences.starts, alone.sequences.starts)
        np.testing.assert_allclose(found.engine_logprobs, alone.engine_logprobs, atol=1e-5)
        assert found.texts == alone.texts
        assert found.verdicts == alone.verdicts
    np.testing.assert_array_equal(first.engine_logprobs, second.engine_logprobs)


def test_a_stop_on_one_rank_stops_all() -> None:
    with pytest.raises(StopRequested):
        on_ranks(2, lambda each: drawn(Ranks(each.rank, 2, each.meeting), True, threading.Event(), stops=True))


@pytest.mark.parametrize(
    ("backend", "changes", "why"),
    [
        ("fake", {}, "the fake backend cannot"),
        ("cpu", {"run__deterministic": True}, "same bits"),
        ("cpu", {"engine__kind": "vllm", "engine__url": ["http://localhost:1"]}, "vLLM servers"),
    ],
)
def test_a_queue_is_refused_where_it_cannot_be(backend: str, changes: dict[str, Any], why: str, model: Path) -> None:
    recipe = make_recipe(model, parallel__prompt_queue=True, **changes)
    engine = registry.create(backend, backend_settings(make_recipe(model)))
    with pytest.raises(UserError, match=why):
        setup.shares_prompts(recipe, engine, ThreadRanks(0, 2, Meeting(2)))
    assert not setup.shares_prompts(recipe, engine, SOLO)
