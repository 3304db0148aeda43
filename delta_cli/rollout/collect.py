"""The graded batch of each step, sampled on demand or, with ``engine.async_steps``, some steps ahead.

Ahead of training, one thread draws the batches in order and others wait for their verdicts, so that neither waits for
the other. The batch of step s is drawn from the weights that were the newest when the batch of step s − async_steps was
taken, or from newer ones: its staleness is bounded, and it does not depend on how fast anything is.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path

from backends.arrays import Doubles
from backends.collective import from_first, most
from backends.interface import BackendError, Learner, Proxy, PublishedWeights, Sampling
from delta_cli.data import pass_rates
from delta_cli.data.pass_rates import read_measured, write_pass_rates
from delta_cli.data.problem import Problem
from delta_cli.data.prompt_order import PromptOrder
from delta_cli.errors import StopRequested, UserError
from delta_cli.recipe import Recipe
from delta_cli.recipe.models import RolloutSection
from delta_cli.rollout import unused_batches as unused
from delta_cli.rollout.batch import RolloutBatch, join
from delta_cli.rollout.worker import PendingRollout, RolloutWorker, on_all_ranks
from delta_cli.runs.observer import Observer, PhaseClock
from delta_cli.seeds import derive

CLOSE_SECONDS = 5.0  # in which the threads of several ranks abandon a batch together


@dataclass(frozen=True)
class AheadBatch:
    """A batch that is drawn ahead of training, with the time spent on it."""

    step: int
    drawn: Future[PendingRollout | RolloutBatch]  # a batch if it is graded as it is drawn
    graded: Future[tuple[RolloutBatch, PhaseClock]]


class BatchCollector:
    """Collects the batch of each step, at most ``engine.async_steps`` of them ahead of training.

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
        self._order = PromptOrder(problems, recipe.run.seed, recipe.data.weights, recipe.data.exploration)
        self._measures = recipe.data.curriculum != "none"
        self._places = {id(problem): place for place, problem in enumerate(problems)}
        self._observer, self._interrupt, self._check_stop = observer, interrupt, check_stop
        self.most_ahead = recipe.engine.async_steps
        self._drawing = ThreadPoolExecutor(1, "async rollout") if self.most_ahead else None
        self._grading = ThreadPoolExecutor(self.most_ahead, "async rewards") if self.most_ahead else None
        self._in_flight = ThreadPoolExecutor(1, "in-flight weights") if recipe.engine.in_flight else None
        self._loading: Future[None] | None = None  # the last load of weights in flight
        self._ahead: deque[AheadBatch] = deque()
        self._taken: tuple[int, RolloutBatch] | None = None  # the last batch that was taken, and its step
        self._draws = 0  # batches of prompts used by what was drawn so far; only the drawing thread uses it
        self._closed = False

    def take(self, step: int, draws: int, clock: PhaseClock) -> tuple[RolloutBatch, float | None]:
        """The batch of ``step``, before which ``draws`` batches of prompts were used.

        Also the seconds spent waiting for it if it was sampled ahead, else None. Raises BackendError if it came from
        other weights than the present ones and the recipe does not correct for that.
        """
        if not self._ahead:
            batch = self._collect(step, draws, self._order, clock, self._observer, self._interrupt, self._check_stop)
            waited, self._draws = None, draws + batch.draws
        else:
            self._observer.phase("rollout")
            start = time.perf_counter()
            assert self._ahead[0].step == step
            batch, spent = self._ahead[0].graded.result()
            self._ahead.popleft()
            waited = time.perf_counter() - start
            clock.add(spent)
        self._taken = (step, batch) if self.most_ahead else None
        self._check_version(batch)
        return batch, waited

    @property
    def pass_rates(self) -> Doubles:
        """The latest pass rate of each problem in the batches that were used, [P]; NaN: not measured."""
        return self._order.pass_rates

    def used(self, batch: RolloutBatch) -> None:
        """Choose later prompts by the pass rates in a batch that was trained on."""
        self._order = self._order.after(batch.pass_rates)

    def missing(self, step: int, steps: int) -> range:
        """The steps whose batches should be started ahead while ``step`` of ``steps`` trains."""
        first = self._ahead[-1].step + 1 if self._ahead else step + 1
        return range(first, min(step + self.most_ahead + 1, steps))

    def start(self, step: int, weights: PublishedWeights | None) -> None:
        """Start to sample the batch of ``step`` in a thread, after loading ``weights`` if the sampler lacks them."""
        assert self._drawing is not None
        assert self._grading is not None
        clock = PhaseClock()
        drawn = self._drawing.submit(self._draw_ahead, step, weights, clock, self._order)
        self._ahead.append(AheadBatch(step, drawn, self._grading.submit(self._grade_ahead, drawn, clock)))

    def load_in_flight(self, publish: Callable[[], PublishedWeights | None]) -> None:
        """Give the sampler new weights while it draws, if the recipe says so. Those before them are loaded first."""
        if self._in_flight is None:
            return
        if self._loading is not None:
            self._loading.result()
        if (weights := publish()) is not None:
            self._loading = self._in_flight.submit(self._worker.sampler.load_weights, weights)

    def wait_until_idle(self) -> None:
        """Wait until nothing is being drawn ahead, and no weights are being loaded."""
        if self._loading is not None:
            self._loading.result()
        wait([each.drawn for each in self._ahead])

    def close(self) -> None:
        """Abandon what is being sampled ahead.

        Several ranks have begun it together, so none may cancel it. Their threads agree to stop, unless another rank
        has failed or goes on.
        """
        self._closed = True
        alone = self._worker.ranks.size == 1
        if not alone:
            wait([each.graded for each in self._ahead], CLOSE_SECONDS)
        for pool in (self._drawing, self._grading, self._in_flight):
            if pool is not None:
                pool.shutdown(wait=alone, cancel_futures=alone)

    def save(self, folder: Path, step: int, stopping: bool = False) -> None:
        """Write the batches that are drawn and unused after ``step`` steps into a checkpoint.

        Waits for those still being drawn or graded, unless the run is ``stopping``: then the first one that is
        unfinished is drawn again on resume, and so are those after it.
        """
        batches = [self._taken[1]] if self._taken is not None and self._taken[0] == step else []
        for ahead in self._ahead:
            if stopping and not (ahead.graded.done() and ahead.graded.exception() is None):
                break
            if isinstance(ahead.graded.exception(), StopRequested):  # another rank was asked to stop
                break
            batches.append(ahead.graded.result()[0])
        if batches:
            unused.save(folder, batches, self._problems, self._learner.version)
        if self._measures:
            write_pass_rates(folder / pass_rates.FILE, self._problems, self.pass_rates)

    def load(self, folder: Path, step: int, draws: int) -> None:
        """Take up the unused batches of a checkpoint that was saved after ``step`` steps and ``draws`` batches."""
        self._draws = draws
        if self._measures:
            ranks = self._worker.ranks
            self._order = self._order.after(
                from_first(ranks, read_measured(folder / pass_rates.FILE) if ranks.rank == 0 else [])
            )
        batches = unused.load(folder, self._problems, self._learner.version)[: self.most_ahead]
        batches = batches[: -most(self._worker.ranks, -len(batches))]  # a rank that finds fewer samples with the others
        for number, batch in enumerate(batches):
            graded: Future[tuple[RolloutBatch, PhaseClock]] = Future()
            drawn: Future[PendingRollout | RolloutBatch] = Future()
            drawn.set_result(batch)
            graded.set_result((batch, PhaseClock()))
            self._ahead.append(AheadBatch(step + number, drawn, graded))
            self._draws += batch.draws

    def _draw_ahead(
        self, step: int, weights: PublishedWeights | None, clock: PhaseClock, order: PromptOrder
    ) -> PendingRollout | RolloutBatch:
        """Sample a batch; grade it too if that decides what is sampled next, or if several ranks must agree."""

        def interrupt() -> None:
            if self._closed:
                raise StopRequested
            self._interrupt()

        def goes_on() -> bool:
            interrupt()
            return True

        def check_stop() -> None:
            on_all_ranks(self._worker.ranks, goes_on)

        check_stop()
        if self._loading is not None:
            with clock.phase("rollout"):
                self._loading.result()
        if weights is not None:
            with clock.phase("rollout"):
                self._worker.sampler.load_weights(weights)
        if self._recipe.rollout.dynamic_sampling or self._worker.ranks.size > 1:
            batch = self._collect(step, self._draws, order, clock, Observer(), interrupt, check_stop)
            self._draws += batch.draws
            return batch
        problems = order.batch(self._draws, self._recipe.rollout.prompts)
        pending = self._sample(step, problems, 0, clock, Observer(), interrupt)
        self._draws += 1
        return pending

    def _grade_ahead(
        self, drawn: Future[PendingRollout | RolloutBatch], clock: PhaseClock
    ) -> tuple[RolloutBatch, PhaseClock]:
        found = drawn.result()
        if isinstance(found, PendingRollout):
            with clock.phase("reward"):
                found = self._graded(found)
        return found, clock

    def _collect(
        self,
        step: int,
        draws: int,
        order: PromptOrder,
        clock: PhaseClock,
        observer: Observer,
        interrupt: Callable[[], None],
        check_stop: Callable[[], None],
    ) -> RolloutBatch:
        """Sample and grade one batch, the one after ``draws`` batches of prompts; with dynamic sampling, until enough
        groups have rewards that differ.
        """
        rollout = self._recipe.rollout
        kept: list[RolloutBatch] = []
        for attempt in range(rollout.dynamic_sampling_limit if rollout.dynamic_sampling else 1):
            problems = order.batch(draws + attempt, rollout.prompts)
            pending = self._sample(step, problems, attempt, clock, observer, interrupt)
            with clock.phase("reward"):
                observer.phase("reward")
                batch = self._graded(pending)
            check_stop()
            if not rollout.dynamic_sampling:
                return batch
            kept.append(batch)
            order = order.after((place, 1.0) for place, _ in batch.pass_rates)  # so that no second group is drawn
            if sum(len(each.mixed_groups) for each in kept) >= rollout.prompts:
                break
        joined = join(kept)
        groups = joined.mixed_groups[: rollout.prompts]
        # If no group is mixed, keep the first draw as it is, so that the step's metrics show why nothing was learned.
        if len(groups):
            return joined.select(groups)
        return replace(kept[0], draws=len(kept), pass_rates=joined.pass_rates)

    def _sample(
        self,
        step: int,
        problems: Sequence[Problem],
        attempt: int,
        clock: PhaseClock,
        observer: Observer,
        interrupt: Callable[[], None],
    ) -> PendingRollout:
        """Sample responses to one batch of prompts, the step's first or a later ``attempt`` at it."""
        rollout, seed = self._recipe.rollout, self._recipe.run.seed
        with clock.phase("rollout"):
            sampling_seed = derive(seed, step, f"rollout {attempt}")
            return sample_batch(self._worker, problems, rollout, sampling_seed, observer, interrupt, self._proxy)

    def _graded(self, pending: PendingRollout) -> RolloutBatch:
        """The batch with its verdicts, of which a share is flipped if the recipe says so."""
        batch = pending.result()
        check_verdicts(batch, max(reward.max_failed for reward in self._recipe.rewards))
        if flip := self._recipe.rewards[0].flip:  # allowed with a single reward only
            batch = batch.with_flipped_rewards(flip, pending.sampling.seed)
        if not self._measures:
            return batch
        rates = zip(batch.problems, batch.group_pass_rates.tolist(), strict=True)
        measured = ((self._places[id(problem)], rate) for problem, rate in rates if not math.isnan(rate))
        return replace(batch, pass_rates=tuple(measured))

    def _check_version(self, batch: RolloutBatch) -> None:
        present = self._learner.version
        if batch.version != present and not self._recipe.correction.resolve().active:
            raise BackendError(
                f"responses came from version {batch.version} of the weights, but the policy is at {present}; the "
                "sampling engine did not take the last update. Set correction.preset to correct for it"
            )


def check_verdicts(batch: RolloutBatch, most: float) -> None:
    """Raise UserError if a larger share than ``most`` of the responses has no verdict."""
    failures = [str(verdict.failure) for verdict in batch.verdicts if verdict.void]
    if len(failures) > most * len(batch.verdicts):
        raise UserError(
            f"{len(failures)} of {len(batch.verdicts)} responses have no verdict, more than reward.max_failed = "
            f"{most:g} allows; the first failure was: {failures[0]}. See to the judge or reward model, then go on with "
            "--resume; verdicts that a judge gave are kept"
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
