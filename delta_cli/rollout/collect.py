"""The graded batch of each step, sampled on demand or, with ``engine.async_steps``, one step ahead."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

from backends.interface import BackendError, Learner, Proxy, PublishedWeights
from delta_cli.data import prompt_order
from delta_cli.data.problem import Problem
from delta_cli.errors import StopRequested
from delta_cli.recipe import Recipe
from delta_cli.rollout.batch import RolloutBatch, join, roll
from delta_cli.rollout.clock import Clock
from delta_cli.rollout.worker import RolloutWorker
from delta_cli.runs.observer import Observer
from delta_cli.seeds import derive


@dataclass(frozen=True)
class Batch:
    """A step's graded batch, how many batches of prompts were drawn for it, and how old it is."""

    batch: RolloutBatch
    draws: int
    lag: int = 0  # updates of the weights since it was drawn
    waited: float | None = None  # seconds, of a batch that was drawn ahead

    def record(self) -> dict[str, Any]:
        """The numbers for metrics.jsonl."""
        return {"staleness": self.lag} | ({} if self.waited is None else {"seconds_waited": self.waited})


class Batches:
    """Draws batches, at most one of them ahead.

    ``interrupt`` raises StopRequested where this rank is on its own, ``check_stop`` where all ranks pass. A batch
    is a function of its step and of the weights; one that is lost is drawn again.
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
        self._proxy = proxy  # of the features that the engine is to keep
        self._recipe, self._learner, self._worker, self._problems = recipe, learner, worker, problems
        self._observer, self._interrupt, self._check_stop = observer, interrupt, check_stop
        self._pool = ThreadPoolExecutor(1, "drawing ahead") if recipe.engine.async_steps else None
        self._ahead: Future[tuple[Batch, Clock]] | None = None
        self._closed = False

    def take(self, number: int, draws: int, clock: Clock) -> Batch:
        """The batch of step ``number``, before which ``draws`` batches of prompts were drawn."""
        if self._ahead is None:
            found, waited = self._collect(number, draws, clock, self._observer, self._interrupt, self._check_stop), None
        else:
            self._observer.phase("rollout")
            start = time.perf_counter()
            ahead, self._ahead = self._ahead, None
            found, spent = ahead.result()
            waited = time.perf_counter() - start
            for phase, seconds in spent.seconds.items():
                clock.seconds[phase] += seconds
        return Batch(self._checked(found.batch), found.draws, self._learner.version - found.batch.version, waited)

    def begin(self, number: int, draws: int, weights: PublishedWeights | None) -> None:
        """Draw the batch of step ``number`` from now on, in a thread, from ``weights`` where the sampler lacks them."""
        assert self._pool is not None
        self._ahead = self._pool.submit(self._collect_ahead, number, draws, weights)

    def settle(self) -> None:
        """Wait until nothing is being drawn."""
        if self._ahead is not None:
            wait([self._ahead])

    def close(self) -> None:
        """Give up what is being drawn."""
        self._closed = True
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def _collect_ahead(self, number: int, draws: int, weights: PublishedWeights | None) -> tuple[Batch, Clock]:
        def interrupt() -> None:
            if self._closed:
                raise StopRequested
            self._interrupt()

        clock = Clock()
        if weights is not None:
            with clock.phase("rollout"):
                self._worker.sampler.load_weights(weights)
        return self._collect(number, draws, clock, Observer(), interrupt, interrupt), clock

    def _collect(
        self,
        number: int,
        draws: int,
        clock: Clock,
        observer: Observer,
        interrupt: Callable[[], None],
        check_stop: Callable[[], None],
    ) -> Batch:
        """With dynamic sampling, draws until enough groups have rewards that differ."""
        rollout, seed = self._recipe.rollout, self._recipe.run.seed
        kept: list[RolloutBatch] = []
        for attempt in range(rollout.dynamic_sampling_limit if rollout.dynamic_sampling else 1):
            with clock.phase("rollout"):
                drawn = prompt_order.batch(self._problems, draws + attempt, rollout.prompts, seed)
                waiting = roll(
                    self._worker,
                    drawn,
                    rollout,
                    derive(seed, number, f"rollout {attempt}"),
                    self._recipe.rewards[0].flip,  # which is for a single one
                    observer,
                    interrupt,
                    self._proxy,
                )
            with clock.phase("reward"):
                observer.phase("reward")
                batch = waiting.result()
            check_stop()
            if not rollout.dynamic_sampling:
                return Batch(batch, 1)
            kept.append(batch)
            mixed = sum(len(each.mixed_groups()) for each in kept)
            if mixed >= rollout.prompts:
                break
        joined = join(kept)
        groups = joined.mixed_groups()[: rollout.prompts]
        # A draw without any mixed group teaches nothing; it is kept as it is, so that the step says so.
        return Batch(joined.select(groups) if len(groups) else kept[0], len(kept))

    def _checked(self, batch: RolloutBatch) -> RolloutBatch:
        """The batch, which must come from the weights that are about to be updated, or be corrected for that."""
        present = self._learner.version
        if batch.version != present and self._recipe.update.importance_cap is None:
            raise BackendError(
                f"responses came from version {batch.version} of the weights, but the policy is at {present}; the "
                "sampling engine did not take the last update. Set update.importance_cap to correct for it"
            )
        return batch
