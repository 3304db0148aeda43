"""The training loop, read top to bottom: sample, grade, score, assign credit, update, record, save."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import numpy as np

from backends.collective import SOLO, any_of, from_first
from backends.interface import BackendError, Collective, Learner, PublishedWeights
from delta_cli.credit import TokenCoefficients
from delta_cli.data.problem import Problem
from delta_cli.errors import Interrupted, StopRequested, UserError
from delta_cli.evaluation.evaluate import Benchmark, run_benchmark
from delta_cli.evaluation.results import BenchmarkResult, EvaluationSettings, average
from delta_cli.recipe import Recipe, to_toml
from delta_cli.rollout.batch import RolloutBatch
from delta_cli.rollout.collect import BatchCollector
from delta_cli.rollout.worker import RolloutWorker
from delta_cli.runs import checkpoint, export_stamp
from delta_cli.runs.checkpoint import State
from delta_cli.runs.fingerprint import Fingerprint, changes, problems_digest
from delta_cli.runs.folder import BACKEND_WRITES, JsonObject, RunFolder, missing_steps, read_lines, writing
from delta_cli.runs.observer import Notice, Observer, PhaseClock
from delta_cli.training import tripwires
from delta_cli.training.checkpoint_writer import CheckpointWriter
from delta_cli.training.metrics import (
    describe_batch,
    describe_coefficients,
    describe_curriculum,
    describe_judges,
    describe_learner,
    describe_process,
    describe_ranks,
    describe_scores,
    describe_staleness,
    first_examples,
)
from delta_cli.training.rollout_records import RolloutRecorder
from delta_cli.training.update import ScoredBatch, Updater

NONFINITE_STEPS = 3  # consecutive steps without a finite update before a run stops


@dataclass
class Trainer:
    """A run: its parts and its counters."""

    recipe: Recipe
    learner: Learner
    worker: RolloutWorker  # samples from the weights that the learner publishes
    problems: Sequence[Problem]
    benchmarks: Sequence[Benchmark]  # to evaluate on
    evaluation: EvaluationSettings
    folder: RunFolder
    observer: Observer
    stop_asked: Callable[[], bool] = lambda: False
    inputs: Fingerprint = field(default_factory=dict)
    ranks: Collective = SOLO
    state: State = field(default_factory=lambda: State(0, 0))
    clock: PhaseClock = field(default_factory=PhaseClock)

    def __post_init__(self) -> None:
        self.updater = Updater(self.recipe, self.learner, self.ranks)
        self.collector = BatchCollector(
            self.recipe,
            self.learner,
            self.worker,
            self.problems,
            self.observer,
            self._interrupt,
            self._check_stop,
            self.updater.sampler_proxy,
        )
        self.recorder = RolloutRecorder(self.folder, self.worker.tokenizer, self.ranks)
        self.checkpoints = CheckpointWriter(
            self.folder,
            self.recipe.checkpoint,
            self.learner,
            self.recorder,
            self._write_unused,
            self.ranks,
            lambda line: self._notice(Notice("checkpoint_copy", line)),
        )
        self._first: JsonObject | None = None  # metrics of the first step, which tripwires compare against
        self._noticed: set[str] = set()
        self._nonfinite = 0
        self._saved = 0  # step of the last checkpoint; nothing to save before the first step
        self._published = self.learner.version
        self._sent: int | None = None  # the version of the weights that the sampler was last given, or soon will be
        if self.ranks.size == 1:  # with several ranks, the others would wait forever inside a forward pass
            self.learner.interrupt = self._interrupt_forward
        self.state = replace(self.state, data=problems_digest(self.problems), inputs=self.inputs)

    def run(self, resume: bool = False) -> None:
        """Train until the recipe's last step, then export the model.

        Raises Interrupted if ``stop_asked`` returns True: between two steps, or before the updates of a step, which is
        then dropped and sampled again on resume. Finished steps are saved first.
        """
        found = self._restore() if resume else None
        self.folder.begin(to_toml(self.recipe), found)
        self._recall()
        self.observer.begin(
            str(self.folder.path), self.recipe.run.steps, self.state.step, describe_learner(self.learner)
        )
        try:
            self._train()
            self.checkpoints.finish()
        except StopRequested:
            if self.state.step != self._saved:
                self._save()
            self.checkpoints.finish()
            raise Interrupted(self.state.step, self.clock.dropped) from None
        finally:
            self.collector.close()
            self.checkpoints.close()
            self.recorder.close()
        self.observer.phase("save")
        with writing(self.folder.model, *BACKEND_WRITES):
            self.learner.export(self.folder.emptied_model())
            if self.ranks.rank == 0:
                export_stamp.write_step(self.folder.model, self.state.step)

    def _train(self) -> None:
        self._notice_slower_path()
        self._publish()
        if self.state.step == 0 and self.recipe.evaluation.at_start and self.recipe.evaluation.every != "never":
            self._evaluate(0)
        elif self.state.step:
            self._make_up_evaluation()
        while self.state.step < self.recipe.run.steps:
            self._check_stop()
            self._step()

    def _notice_slower_path(self) -> None:
        """Say once if a fast kernel of the device is not used, which may only show when it is first needed."""
        if self.learner.slower_path and "slower_path" not in self._noticed:
            self._noticed.add("slower_path")
            self._notice(Notice("slower_path", self.learner.slower_path))

    def _step(self) -> None:
        """Collect one batch, update on it, and record the step."""
        number = self.state.step  # steps done before this one
        batch, waited = self._collect(number)
        self._notice_slower_path()
        staleness = describe_staleness(batch, self.learner.version)
        with self.clock.phase("score"):
            self.observer.phase("score")
            scored = self.updater.score(batch)
        with self.clock.phase("credit"):
            coefficients = self.updater.credit(scored, number)
        self._check_stop()
        with self.clock.phase("update"):
            self.observer.phase("update")
            updates = self.updater.update(scored, coefficients, number)
            if not self.recipe.engine.async_steps:
                self._publish()
            self.collector.load_in_flight(lambda: self._new_weights(slot=number + 1))
        self.state = replace(self.state, step=number + 1, draws=self.state.draws + batch.draws)
        self.collector.used(batch)
        record: JsonObject = {"step": number + 1} | describe_batch(batch, self.recipe.rollout.prompts)
        record |= describe_curriculum(batch, self.collector.pass_rates)
        record |= describe_judges(self.worker.grader.used(), self.ranks)
        record |= describe_scores(scored, self.updater.correction)
        if self.updater.weighs_tokens:
            advantages = np.repeat(scored.advantages, batch.sequences.lengths)
            record |= describe_coefficients(coefficients, advantages, self.updater.method.credit == "delta")
        record |= staleness | ({} if waited is None else {"seconds_waited": waited})
        record |= updates.record() | self.updater.entropy.record()
        record |= {"learning_rate": self.recipe.update.rate(number, self.recipe.run.steps)}
        stopped = False
        if self._due(self.recipe.evaluation.every):
            try:
                record["eval_accuracy"] = self._evaluate(number + 1)
            except StopRequested:
                stopped = True  # the step itself is done; resume runs the missing evaluation
        self._keep(record, scored, coefficients)
        if self.recipe.checkpoint.async_save:
            self.checkpoints.poll()
        self._guard(updates.nonfinite > 0 and not updates.norms)
        if stopped:
            raise StopRequested
        if self._due(self.recipe.checkpoint.every) or self._is_best(record):
            self._save(record)

    def _collect(self, number: int) -> tuple[RolloutBatch, float | None]:
        """The step's batch and the seconds waited for it; starts the next one with engine.async_steps."""
        batch, waited = self.collector.take(number, self.state.draws, self.clock)
        self._check_stop()
        if ahead := self.collector.missing(number, self.recipe.run.steps):
            weights = self._new_weights(slot=number)
            for step in ahead:
                self.collector.start(step, weights)
                weights = None  # the sampler has them then
        return batch, waited

    def _publish(self) -> None:
        """Make the sampler use the present weights."""
        if (weights := self._new_weights()) is not None:
            self.worker.sampler.load_weights(weights)

    def _new_weights(self, slot: int = 0) -> PublishedWeights | None:
        """Publish the present weights; None if they are published already.

        With batches drawn ahead, up to ``async_steps`` versions wait to be loaded, so each has a folder of its own,
        which ``slot`` chooses.
        """
        self._published = self.learner.version
        inbox, ahead = self.worker.sampler.inbox, self.collector.most_ahead + self.recipe.engine.in_flight
        if (self._sent if ahead else self.worker.sampler.version) == self.learner.version:
            return None
        self._sent = self.learner.version
        return self.learner.publish(inbox / str(slot % ahead) if inbox is not None and ahead > 1 else inbox)

    def _keep(self, record: JsonObject, batch: ScoredBatch, coefficients: TokenCoefficients) -> None:
        """Write the step's metrics, rollouts and notices, and inform the observer."""
        every = self.recipe.checkpoint.rollouts_every
        with self.clock.phase("save"):
            if every and record["step"] % every == 0:
                staleness = record["staleness"] if self.recipe.engine.async_steps else None
                self.recorder.record(record["step"], batch, coefficients, staleness)
        record |= describe_process(self.learner) | self.clock.record()
        record |= describe_ranks(self.ranks.gather(record)) if self.ranks.size > 1 else {}
        record["tokens_per_second"] = record["tokens"] / record["seconds"]
        record["rollout_tokens_per_second"] = record["tokens"] / max(record["seconds_rollout"], 1e-9)
        # JSON has neither infinity nor NaN.
        record |= {k: None for k, v in record.items() if isinstance(v, float) and not math.isfinite(v)}
        self.folder.append(self.folder.metrics, record)
        self._first = self._first or record
        self.observer.step(record, first_examples(batch.rollout))
        for notice in tripwires.fired(record, self._first, self._noticed, half=self.recipe.model.dtype != "float32"):
            self._notice(notice)

    def _notice(self, notice: Notice) -> None:
        self.folder.append(self.folder.notices, {"step": self.state.step, "name": notice.name, "text": notice.text})
        self.observer.notice(notice)

    def _evaluate(self, step: int) -> float:
        """Run and record an evaluation; returns the accuracy over the problems of all benchmarks."""
        settings = self.evaluation
        with self.clock.phase("evaluate"):
            self.collector.wait_until_idle()
            self._publish()
            total = sum(len(benchmark.problems) for benchmark in self.benchmarks)
            self.observer.phase("evaluate", total * settings.samples)
            results = [self._run_benchmark(benchmark) for benchmark in self.benchmarks]
        overall = average(results, settings.samples).avg
        record: JsonObject = {
            "step": step,
            "accuracy": overall.mean,
            "low": overall.low,
            "high": overall.high,
            "problems": total,
            "samples": settings.samples,
        } | ({result.name: result.avg.mean for result in results} if len(results) > 1 else {})
        if kinds := {kind: each.accuracy for result in results for kind, each in result.kinds.items()}:
            record["kinds"] = kinds
        self.folder.append(self.folder.evaluations, record)
        self.observer.evaluation(record)
        return overall.mean

    def _make_up_evaluation(self) -> None:
        """Run the evaluation of the last step if a stop request interrupted it."""
        lines = list(read_lines(self.folder.evaluations)) if self.folder.evaluations.exists() else []
        missing = self._due(self.recipe.evaluation.every) and self.state.step not in {
            line.get("step") for line in lines
        }
        if from_first(self.ranks, missing):
            changes = {"eval_accuracy": self._evaluate(self.state.step)}
            record = self.folder.amend_metrics(self.state.step, changes)
            if self._is_best(record):
                self._save(record)

    def _run_benchmark(self, benchmark: Benchmark) -> BenchmarkResult:
        return run_benchmark(
            replace(self.worker, grader=self.worker.grader.verifying),
            benchmark,
            self.evaluation,
            progress=lambda name, done, total: self.observer.advance(done, 0),
            interrupt=self._interrupt,
        )

    def _due(self, every: int | Literal["never"]) -> bool:
        """Whether an action with the interval ``every`` is due after the step just done."""
        if every == "never":
            return False
        return self.state.step == self.recipe.run.steps or bool(every and self.state.step % every == 0)

    def _is_best(self, record: JsonObject) -> bool:
        """Whether the step has the best value so far of the metric checkpoint.keep_best."""
        value = record.get(self.recipe.checkpoint.keep_best or "")
        return value is not None and (self.state.best is None or value > self.state.best)

    def _save(self, record: JsonObject | None = None) -> None:
        """Save a checkpoint, then delete older ones."""
        settings = self.recipe.checkpoint
        self._check_drift()
        with self.clock.phase("save"):
            self.observer.phase("save")
            if record and settings.keep_best and self._is_best(record):
                self.state = replace(self.state, best=record[settings.keep_best], best_step=self.state.step)
            self.checkpoints.save(self.state, to_toml(self.recipe))
            self._saved = self.state.step

    def _write_unused(self, folder: Path) -> None:
        """Write the batches that are drawn and not yet used into a checkpoint."""
        self.collector.save(folder, self.state.step, stopping=self.stop_asked())

    def _check_drift(self) -> None:
        """Raise BackendError if a rank's weights differ from rank 0's, so that no checkpoint of them is saved."""
        if drifted := self._drifted_ranks():
            raise BackendError(
                f"the weights of rank {drifted[0]} differ from those of rank 0 at step {self.state.step}; a GPU or its "
                "memory may be faulty. Resume from the last checkpoint, and check that machine"
            )

    def _drifted_ranks(self) -> list[int]:
        samples = self.ranks.gather(self.learner.sample_weights().tobytes()) if self.ranks.size > 1 else []
        return [rank for rank, sample in enumerate(samples) if sample != samples[0]]

    def _restore(self) -> int | None:
        """Load the newest intact checkpoint and return its step; None if the run has not saved one yet."""
        found, damaged = from_first(self.ranks, self._find())
        for line in damaged:
            self.observer.notice(Notice("damaged_checkpoint", line))
        if found is None:
            if damaged:
                raise UserError(f"{self.folder.checkpoints}: no checkpoint is intact ({damaged[0]}); start a new run")
            return None
        state: checkpoint.State = from_first(self.ranks, checkpoint.read_state(found) if self.ranks.rank == 0 else None)
        if state.data != self.state.data:
            raise UserError(
                f"{found}: the problems of {self.recipe.data.title} are not the ones this run started with; restore "
                "the data, or start a new run"
            )
        if changed := changes(state.inputs, self.inputs):
            text = f"since the last checkpoint these changed: {', '.join(changed)}; the run may not continue exactly"
            self.observer.notice(Notice("inputs_changed", text))
        if state.step > self.recipe.run.steps:
            raise UserError(
                f"{found}: the run already has {state.step} steps, more than run.steps = {self.recipe.run.steps}; "
                f"choose at least {state.step}, or start a new run"
            )
        self.learner.load(found)
        if drifted := self._drifted_ranks():
            raise UserError(
                f"{found}: rank {drifted[0]} has another checkpoint of this name than rank 0; copy rank 0's run folder "
                "to its machine, or use a disk that all machines share"
            )
        self.collector.load(found, state.step, state.draws)
        self.state, self._saved = replace(state, inputs=self.inputs), state.step
        return state.step

    def _find(self) -> tuple[Path | None, list[str]]:
        """The newest intact checkpoint and what is wrong with newer ones; only rank 0 looks."""
        return checkpoint.find(self.folder.checkpoints) if self.ranks.rank == 0 else (None, [])

    def _recall(self) -> None:
        """Read what tripwires need to know about earlier steps."""
        if self.folder.metrics.exists():
            self._first = next(read_lines(self.folder.metrics), None)
            self.updater.recall(read_lines(self.folder.metrics))
        self.updater.temperatures = from_first(self.ranks, self.updater.temperatures)  # only it may have the file
        if self.folder.notices.exists():
            self._noticed = {str(record.get("name")) for record in read_lines(self.folder.notices)}
        missing = missing_steps(self.folder.metrics, self.state.step)
        if missing and "metrics_missing" not in self._noticed:
            text = f"{self.folder.metrics}: no line for {missing}; curves and sums leave them out"
            self._notice(Notice("metrics_missing", text))

    def _check_stop(self) -> None:
        """Stop all ranks if one was asked to stop; every rank must call it."""
        if any_of(self.ranks, self.stop_asked()):
            raise StopRequested

    def _interrupt_forward(self) -> None:
        """Stop between two micro-batches, unless this step has already updated the weights."""
        if self.learner.version == self._published:
            self._interrupt()

    def _interrupt(self) -> None:
        """Stop this rank alone; the ranks agree on it afterwards."""
        if self.stop_asked():
            raise StopRequested

    def _guard(self, nothing_finite: bool) -> None:
        """Stop a run whose updates are no longer finite."""
        self._nonfinite = self._nonfinite + 1 if nothing_finite else 0
        if self._nonfinite >= NONFINITE_STEPS:
            found, _ = checkpoint.find(self.folder.checkpoints)
            raise UserError(
                f"{self.folder.path}: no update was finite in {NONFINITE_STEPS} steps; the last good checkpoint is "
                f"{found or 'none yet'}; resume from it with --resume --set update.learning_rate=… (lower), or "
                'start again with model.dtype = "float32"'
            )
