"""The graded batch of each step, sampled on demand or, with ``engine.async_steps``, one step ahead."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace

from backends.interface import BackendError, Learner, Proxy, PublishedWeights, Sampling
from delta_cli.data import prompt_order
from delta_cli.data.problem import Problem
from delta_cli.errors import StopRequested
from delta_cli.recipe import Recipe
from delta_cli.recipe.models import RolloutSection
from delta_cli.rollout.batch import RolloutBatch, join
from delta_cli.rollout.worker import PendingRollout, RolloutWorker
from delta_cli.runs.observer import Observer
from delta_cli.runs.phases import PhaseClock
from delta_cli.seeds import derive


class BatchCollector:
    """Collects the batch of each step, at most one of them ahead of training.

    ``interrupt`` raises StopRequested on this rank alone; ``check_stop`` is called where all ranks pass and raises
    it on all. A batch is a function of its step and of the weights, so a lost one can be sampled again.
    """

    def __init__(
        self,
        recipe: Recipe,
        learner: Learner,
        worker: RolloutWorker,
        problems: Sequence[Problem],
        observer: Observer,
        interrupt: Callable[[], None],
        check_stop: Callable[[], None],
        proxy: Proxy | None = None,
    ) -> None:
        self._proxy = proxy  # of the features that the sampler should keep
        self._recipe, self._learner, self._worker, self._problems = recipe, learner, worker, problems
        self._observer, self._interrupt, self._check_stop = observer, interrupt, check_stop
        self._pool = ThreadPoolExecutor(1, "async rollout") if recipe.engine.async_steps else None
        self._next: Future[tuple[RolloutBatch, PhaseClock]] | None = None
        self._closed = False

    def take(self, step: int, draws: int, clock: PhaseClock) -> tuple[RolloutBatch, float | None]:
        """The batch of ``step``, before which ``draws`` batches of prompts were used.

        Also the seconds spent waiting for it if it was sampled ahead, else None. Raises BackendError if it came from
        other weights than the present ones and the recipe does not correct for that.
        """
        if self._next is None:
            batch = self._collect(step, draws, clock, self._observer, self._interrupt, self._check_stop)
            waited = None
        else:
            self._observer.phase("rollout")
            start = time.perf_counter()
            pending, self._next = self._next, None
            batch, spent = pending.result()
            waited = time.perf_counter() - start
            clock.add(spent)
        self._check_version(batch)
        return batch, waited

    def start_next(self, step: int, draws: int, weights: PublishedWeights | None) -> None:
        """Start sampling the batch of ``step`` in a thread, after loading ``weights`` if the sampler lacks them."""
        assert self._pool is not None
        self._next = self._pool.submit(self._collect_ahead, step, draws, weights)

    def wait_until_idle(self) -> None:
        """Wait for the batch that is being sampled ahead, if any."""
        if self._next is not None:
            wait([self._next])

    def close(self) -> None:
        """Abandon the batch that is being sampled ahead."""
        self._closed = True
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def _collect_ahead(
        self, step: int, draws: int, weights: PublishedWeights | None
    ) -> tuple[RolloutBatch, PhaseClock]:
        def interrupt() -> None:
            if self._closed:
                raise StopRequested
            self._interrupt()

        clock = PhaseClock()
        if weights is not None:
            with clock.phase("rollout"):
                self._worker.sampler.load_weights(weights)
        return self._collect(step, draws, clock, Observer(), interrupt, interrupt), clock

    def _collect(
        self,
        step: int,
        draws: int,
        clock: PhaseClock,
        observer: Observer,
        interrupt: Callable[[], None],
        check_stop: Callable[[], None],
    ) -> RolloutBatch:
        """Sample and grade one batch; with dynamic sampling, until enough groups have rewards that differ."""
        rollout, seed = self._recipe.rollout, self._recipe.run.seed
        kept: list[RolloutBatch] = []
        for attempt in range(rollout.dynamic_sampling_limit if rollout.dynamic_sampling else 1):
            with clock.phase("rollout"):
                problems = prompt_order.batch(self._problems, draws + attempt, rollout.prompts, seed)
                sampling_seed = derive(seed, step, f"rollout {attempt}")
                pending = sample_batch(self._worker, problems, rollout, sampling_seed, observer, interrupt, self._proxy)
            with clock.phase("reward"):
                observer.phase("reward")
                batch = pending.result()
            if flip := self._recipe.rewards[0].flip:  # allowed with a single reward only
                batch = batch.with_flipped_rewards(flip, sampling_seed)
            check_stop()
            if not rollout.dynamic_sampling:
                return batch
            kept.append(batch)
            if sum(len(each.mixed_groups) for each in kept) >= rollout.prompts:
                break
        joined = join(kept)
        groups = joined.mixed_groups[: rollout.prompts]
        # If no group is mixed, keep the first draw as it is, so that the step's metrics show why nothing was learned.
        return joined.select(groups) if len(groups) else replace(kept[0], draws=len(kept))

    def _check_version(self, batch: RolloutBatch) -> None:
        present = self._learner.version
        if batch.version != present and not self._recipe.correction.resolve().active:
            raise BackendError(
                f"responses came from version {batch.version} of the weights, but the policy is at {present}; the "
                "sampling engine did not take the last update. Set correction.preset to correct for it"
            )


def sample_batch(
    worker: RolloutWorker,
    problems: Sequence[Problem],
    rollout: RolloutSection,
    seed: int,
    observer: Observer | None = None,
    interrupt: Callable[[], None] = lambda: None,
    proxy: Proxy | None = None,
) -> PendingRollout:
    """Sample ``rollout.responses`` responses to each problem, with entropies and the features of ``proxy``.

    ``interrupt`` may raise StopRequested.
    """
    observer = observer or Observer()
    total = len(problems) * rollout.responses
    observer.phase("rollout", total)
    ranks = worker.ranks.size  # other ranks' progress is unknown here: assume they are as far as this one
    sampling = Sampling(
        max_tokens=rollout.max_tokens,
        stop_ids=worker.tokenizer.eos_ids,
        temperature=rollout.temperature,
        samples=rollout.responses,
        seed=seed,
        stop=worker.tokenizer.stop_text(rollout.stop),
    )

    def on_sampled(responses: int, tokens: int) -> None:
        observer.advance(min(responses * ranks, total), tokens * ranks)

    return worker.sample(problems, sampling, on_sampled, interrupt, entropies=True, proxy=proxy)
