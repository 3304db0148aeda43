"""The units of work of the bench: each answers one question for one task, arm and seed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import numpy as np
from scipy import stats

from backends.arrays import Bools, Doubles, Ids
from delta_cli.bench.arms import DAPO, SOLVER_CREDITS, BenchArm
from delta_cli.bench.tasks import Task
from delta_cli.credit import TokenCoefficients
from delta_cli.data import prompt_order
from delta_cli.recipe import Recipe
from delta_cli.rollout.batch import RolloutBatch
from delta_cli.rollout.collect import sample_batch
from delta_cli.runs.folder import JsonObject, RunFolder, read_lines
from delta_cli.runs.observer import Observer
from delta_cli.seeds import derive
from delta_cli.training.setup import open_trainer
from delta_cli.training.trainer import Trainer
from delta_cli.training.update import ScoredBatch, Updater

Question = Literal["finding", "gradient", "learning", "adapters"]
ADAPTERS: dict[str, tuple[str, ...]] = {
    "full": (),
    "lora": ("model.lora.rank=8",),
    "dora": ("model.lora.rank=8", "model.lora.dora=true"),
    "lora, 4-bit base": ("model.lora.rank=8", "model.load_in_4bit=true"),
}
ADAPTER_RATE = 10  # learning rate of adapters over that of full weights
ADAPTER_CREDITS: dict[str, tuple[str, ...]] = {
    "delta": ("method.preset=delta",),
    "delta, hidden_topk": ("method.preset=delta", "delta.proxy=hidden_topk"),
    "delta, hidden_exact": ("method.preset=delta", "delta.proxy=hidden_exact"),
    "surprisal": ("method.credit=surprisal",),
    "entropy": ("method.credit=entropy_weight",),
    "arca": ("method.credit=arca", "method.hidden_residuals=true"),
}
MEASURED_STEPS = (0, 8)  # updates with DAPO before the weights are compared with the solver's mark
REFERENCE, MINI_BATCHES, MINI_BATCH = 32, 4, 4  # prompts of the reference gradient; mini-batches; prompts of each


@dataclass(frozen=True)
class Unit:
    """One answer to compute."""

    question: Question
    task: Task
    arm: BenchArm
    seed: int
    backend: str = "cpu"
    changes: tuple[str, ...] = ()  # of the recipe, in every arm

    @property
    def key(self) -> tuple[str, ...]:
        """What tells the unit from others."""
        return (self.question, self.task.name, self.arm.name, str(self.seed), "full", *self.changes)

    def recipe(self, *changes: str) -> Recipe:
        """The recipe of the unit's runs."""
        return self.task.recipe(*self.changes, f"run.seed={self.seed}", *changes)


def measure(unit: Unit) -> JsonObject:
    """Compute the unit; the record says what it is, how long it took, and the answer."""
    begun = time.perf_counter()
    measures = {"finding": finding, "gradient": gradient, "learning": learning, "adapters": adapters}
    answer = measures[unit.question](unit)
    about = {"task": unit.task.name, "arm": unit.arm.name, "seed": unit.seed}
    return {"key": unit.key, "question": unit.question, **about, **answer, "seconds": time.perf_counter() - begun}


def learning(unit: Unit) -> JsonObject:
    """A run: the area under its learning curve, the final accuracy, and what the credit cost."""
    recipe = unit.recipe(*unit.arm.changes)
    with TemporaryDirectory() as scratch:
        with open_trainer(recipe, unit.backend, Path(scratch) / "run", Observer()) as trainer:
            trainer.run()
        folder = RunFolder(Path(scratch) / "run")
        steps, evaluations = list(read_lines(folder.metrics)), list(read_lines(folder.evaluations))
    curve = [record["accuracy"] for record in steps]
    return {
        "area": float(np.mean(curve)),
        "final": evaluations[-1]["accuracy"],
        "curve": [round(value, 4) for value in curve],
        "forwards": 1 + bool(recipe.method.hint) + 2 * recipe.method.hidden_residuals,
        "length": steps[-1]["response_length_mean"],
        "entropy": steps[-1]["entropy_mean"],
        "seconds_credit": sum(record["seconds_score"] + record["seconds_credit"] for record in steps) / len(steps),
        "seconds_step": sum(record["seconds"] for record in steps) / len(steps),
        "peak_memory": max(record["peak_memory"] for record in steps),
    }


def finding(unit: Unit) -> JsonObject:
    """How often the first wrong token of a wrong response outweighs the others, by updates done before."""
    found: dict[str, Any] = {}
    with _trainer(unit) as trainer:
        for step in range(max(MEASURED_STEPS) + 1):
            batch = _batch(trainer, step, trainer.recipe.rollout.prompts)
            if step in MEASURED_STEPS:
                aucs = _aucs(batch, _weights(unit, trainer, batch, *unit.arm.changes), _marks(unit, trainer, batch))
                found[f"auc_{step}"] = float(np.mean(aucs)) if aucs else None
                found[f"responses_{step}"] = len(aucs)
            _update(trainer, batch, step)
    return found


def adapters(unit: Unit) -> JsonObject:
    """AUC of credits, and their rank correlation with those of full weights, by adapter.

    All weigh the same responses, which the base sampled, each under a policy after eight updates with DAPO. Adapters
    learn at ten times the rate of full weights.
    """
    table: dict[str, dict[str, Any]] = {}
    full: dict[str, Doubles] = {}
    with _trainer(unit) as base:
        batch = _batch(base, 0, base.recipe.rollout.prompts)
        marks = _marks(unit, base, batch)
    kept = np.repeat(batch.advantages("group_normalised") != 0, batch.sequences.lengths)
    rate = unit.recipe().update.learning_rate * ADAPTER_RATE
    for name, adapter in ADAPTERS.items():
        changes = (*adapter, *((f"update.learning_rate={rate}",) if adapter else ()))
        with _trainer(unit, *changes, "method.hidden_residuals=true") as trainer:
            for step in range(max(MEASURED_STEPS)):
                _update(trainer, _batch(trainer, step, trainer.recipe.rollout.prompts), step)
            for credit, chosen in ADAPTER_CREDITS.items():
                weights = _weights(unit, trainer, batch, *chosen, "update.old_logprobs=recompute")
                aucs = _aucs(batch, weights, marks)
                rank = _rank_correlation(full.setdefault(credit, weights)[kept], weights[kept])
                table.setdefault(credit, {})[name] = {"auc": float(np.mean(aucs)) if aucs else None, "rank": rank}
    return {"table": table}


def _rank_correlation(first: Doubles, second: Doubles) -> float | None:
    """Spearman's; None if either is constant."""
    if not (np.ptp(first) and np.ptp(second)):
        return None
    return float(stats.spearmanr(first, second).statistic)


def _aucs(batch: RolloutBatch, weights: Doubles, marks: Bools) -> list[float]:
    """The AUCs of the wrong responses whose group has a right one too; the others teach nothing and have no weights."""
    compared = ~batch.correct & (batch.advantages("group_normalised") != 0)
    return list(mistake_aucs(weights, marks, batch.sequences.starts, compared))


def mistake_aucs(weights: Doubles, marks: Bools, starts: Ids, compared: Bools) -> Iterator[float]:
    """Of each response to compare with a marked token, the share of its other tokens that the mark outweighs.

    Ties count half: 0.5 is chance.
    """
    for row in np.flatnonzero(compared):
        own = np.arange(starts[row], starts[row + 1])
        marked, others = own[marks[own]], own[~marks[own]]
        if len(marked) and len(others):
            weight = weights[marked[0]]
            yield float(np.mean((weight > weights[others]) + 0.5 * (weight == weights[others])))


def gradient(unit: Unit) -> JsonObject:
    """The noise of the arm's gradient over mini-batches, and its cosine with DAPO's gradient of other prompts.

    ``cosine`` is the mean over mini-batches, ``cosine_batch`` that of all of them together; ``ratio`` is noise over
    signal: the trace of the mini-batches' covariance over the squared norm of their mean.
    """
    prompts = REFERENCE + MINI_BATCHES * MINI_BATCH
    with _trainer(unit) as trainer:
        batch = _batch(trainer, 0, prompts)
        reference = _Gradients(Updater(unit.recipe(*DAPO.changes), trainer.learner), batch)
        arm = _Gradients(Updater(unit.recipe(*unit.arm.changes), trainer.learner), batch)
        far, near = np.arange(REFERENCE), np.arange(REFERENCE, prompts)
        far_square, near_square = reference.square(far), arm.square(near)
        parts = np.array_split(near, MINI_BATCHES)
        squares = [arm.square(part) for part in parts]
        cosines = [
            _cosine(square, far_square, arm.square(part, reference, far))
            for square, part in zip(squares, parts, strict=True)
        ]
        together = _cosine(near_square, far_square, arm.square(near, reference, far))
    mean = float(np.mean(squares))
    return {
        "ratio": (mean - near_square) / near_square if near_square else None,
        "cosine": float(np.mean(cosines)),
        "cosine_batch": together,
        "norm": near_square**0.5,
    }


class _Gradients:
    """Squared norms of an arm's gradients on a batch; a step at the rate 0 returns the norm and moves nothing."""

    def __init__(self, updater: Updater, batch: RolloutBatch) -> None:
        self.updater = updater
        self.scored: ScoredBatch = updater.score(batch)
        self.coefficients: TokenCoefficients = updater.credit(self.scored, 0)

    def square(self, groups: Ids, other: _Gradients | None = None, others: Ids | None = None) -> float:
        """The squared norm of the gradient of these prompts, plus that of ``other`` on the prompts ``others``."""
        self.add(groups)
        if other is not None and others is not None:
            other.add(others)
        return self.updater.learner.step(0.0, 1.0) ** 2

    def add(self, groups: Ids) -> None:
        """Accumulate the gradient of these prompts."""
        surrogate = self.updater.surrogate(self.scored, self.coefficients, groups)
        self.updater.accumulate(self.scored.rollout, groups, surrogate)


def _cosine(first: float, second: float, both: float) -> float:
    """The cosine of two vectors by the squared norms of each and of their sum; 0 if one of them is 0."""
    scale = (first * second) ** 0.5
    return (both - first - second) / (2 * scale) if scale else 0.0


@contextmanager
def _trainer(unit: Unit, *changes: str) -> Iterator[Trainer]:
    """A trainer with DAPO's recipe, which saves nothing; it can score what the unit's credit reads."""
    reads = [change for change in unit.arm.changes if change.startswith("method.hidden_residuals")]
    with TemporaryDirectory() as scratch:
        recipe = unit.recipe(*DAPO.changes, "evaluation.every=never", *reads, *changes)
        with open_trainer(recipe, unit.backend, Path(scratch) / "run", Observer()) as trainer:
            yield trainer


def _batch(trainer: Trainer, step: int, prompts: int) -> RolloutBatch:
    """The graded responses of a step's prompts, drawn by the present weights."""
    seed = trainer.recipe.run.seed
    problems = prompt_order.batch(trainer.problems, step, prompts, seed)
    rollout = trainer.recipe.rollout
    return sample_batch(trainer.worker, problems, rollout, derive(seed, step, "rollout 0")).result()


def _update(trainer: Trainer, batch: RolloutBatch, step: int) -> None:
    scored = trainer.updater.score(batch)
    trainer.updater.update(scored, trainer.updater.credit(scored, step), step)


def _marks(unit: Unit, trainer: Trainer, batch: RolloutBatch) -> Bools:
    """The first wrong token of each response, [N]."""
    return _weights(unit, trainer, batch, f"method.credit={SOLVER_CREDITS}:first_mistake") > 0


def _weights(unit: Unit, trainer: Trainer, batch: RolloutBatch, *changes: str) -> Doubles:
    """The weights that a recipe's credit gives the tokens of a batch under the present policy."""
    updater = Updater(unit.recipe("method.preset=dapo", *changes), trainer.learner)
    return updater.credit(updater.score(batch), 0).weights
