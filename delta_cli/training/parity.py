"""Replay a recorded rollout batch on two backends and measure how much they differ.

Both start from the same model and run the code of a training step: score, credit, loss, gradient. The gradient is
read from the change of the weights: if epsilon is much larger than the gradient, AdamW's first step follows the
gradient, so backends need no method that returns it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from safetensors import safe_open

from backends import registry
from backends.arrays import Doubles
from backends.interface import Learner, Sequences, starts_of
from backends.regions import ResponseRegions
from backends.settings import Optimizer
from delta_cli.data.problem import Problem
from delta_cli.errors import UserError
from delta_cli.recipe import Recipe
from delta_cli.recipe.backend_settings import backend_settings
from delta_cli.rewards.grader import Verdict
from delta_cli.rollout.batch import RolloutBatch
from delta_cli.runs.folder import read_lines
from delta_cli.training.update import Updater

_EPSILON = 1e8  # of AdamW: much larger than any gradient
_LENGTH = 1e3  # step length in gradients: long enough to show in float32 weights


@dataclass(frozen=True)
class Difference:
    """The largest difference of one quantity between two backends."""

    quantity: str
    value: float
    tolerance: float

    @property
    def within(self) -> bool:
        """Whether it is small enough; NaN and infinity are not."""
        return self.value <= self.tolerance


@dataclass(frozen=True)
class Replay:
    """The results of one backend on the batch."""

    logprobs: Doubles  # [N]
    entropies: Doubles  # [N]
    coefficients: Doubles  # [N]
    loss: float
    gradient: dict[str, Doubles]  # by the name of the weight


def read_batch(file: Path, temperature: float) -> RolloutBatch:
    """Read the batch of a file in ``rollouts/``; raises UserError if it is not one."""
    try:
        records = list(read_lines(file))
        prompts = tuple(np.array(record["prompt_ids"], np.int64) for record in records)
        responses = [np.array(record["tokens"], np.int64) for record in records]
        first_of_group = {record["group"]: record for record in reversed(records)}
        problems = [Problem(str(r["problem"]), "", r["answer"]) for _, r in sorted(first_of_group.items())]
        verdicts = tuple(Verdict(float(r["reward"] or 0), bool(r["correct"]), r["failure"]) for r in records)
        texts = tuple(str(record["response"]) for record in records)
        regions = None
        if records and "region" in records[0]:
            regions = ResponseRegions.of(
                [np.array(record["region"], np.int64) for record in records],
                [np.array(record["own"], bool) for record in records],
            )
        truncated = np.array([bool(record["truncated"]) for record in records])
    except FileNotFoundError:
        raise UserError(f"{file}: no such file; give a run folder or a file of its rollouts/") from None
    except (OSError, EOFError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{file}: not a recorded rollout batch ({type(error).__name__}: {error})") from None
    if not records or len(records) % len(problems):
        raise UserError(f"{file}: {len(records)} responses of {len(problems)} prompts are not a whole batch")
    starts = starts_of([len(response) for response in responses])
    return RolloutBatch(
        problems=tuple(problems),
        sequences=Sequences(prompts, np.concatenate(responses), starts, temperature, regions),
        texts=texts,
        verdicts=verdicts,
        truncated=truncated,
        engine_logprobs=np.zeros(starts[-1]),
    )


def replay(recipe: Recipe, model: str, batch: RolloutBatch, backend_name: str) -> Replay:
    """Scores, coefficients, loss and gradient of the batch under the stored weights of the model."""
    straight = Optimizer(beta1=0.0, weight_decay=0.0, max_grad_norm=0.0).but(epsilon=_EPSILON)
    settings = backend_settings(recipe)
    settings = replace(settings, model=settings.model.but(path=model), optimizer=straight)
    learner = registry.create(backend_name, settings)
    try:
        updater = Updater(recipe, learner)
        scored = updater.score(batch, every=True)
        coefficients = updater.credit(scored, 0)
        everything = np.arange(len(batch.problems))
        surrogate = updater.surrogate(scored, coefficients, everything)
        before = _weights(learner)
        loss = updater.accumulate(batch, everything, surrogate) * surrogate.scale
        learner.step(_EPSILON * _LENGTH, surrogate.scale)
        after = _weights(learner)
    finally:
        learner.close()
    gradient = {name: (before[name] - after[name]) / _LENGTH for name in before}
    return Replay(
        np.asarray(scored.old_logprobs, np.float64),
        np.asarray(scored.entropies, np.float64),
        coefficients.weights,
        loss,
        gradient,
    )


def differences(first: Replay, second: Replay, tolerance: float) -> list[Difference]:
    """The largest differences: absolute for each token, relative to its norm for the gradient."""

    def largest(one: Doubles, other: Doubles) -> float:
        return float(np.abs(one - other).max(initial=0.0))

    norm = np.sqrt(sum(np.square(value).sum() for value in second.gradient.values()))
    gap = np.sqrt(sum(np.square(first.gradient[n] - second.gradient[n]).sum() for n in _shared(first, second)))
    return [
        Difference("log-probability", largest(first.logprobs, second.logprobs), tolerance),
        Difference("entropy", largest(first.entropies, second.entropies), tolerance),
        Difference("coefficient", largest(first.coefficients, second.coefficients), tolerance),
        Difference("loss", abs(first.loss - second.loss), tolerance),
        Difference("gradient (relative)", float(gap / norm) if norm else float(gap), 10 * tolerance),
    ]


def _shared(first: Replay, second: Replay) -> Iterable[str]:
    if first.gradient.keys() != second.gradient.keys():
        odd = sorted(first.gradient.keys() ^ second.gradient.keys())
        raise UserError(f"the backends export different weights: {', '.join(odd[:4])}")
    return first.gradient.keys()


def _weights(learner: Learner) -> dict[str, Doubles]:
    """The model's weights, read from an export."""
    found: dict[str, Doubles] = {}
    with TemporaryDirectory() as scratch:
        learner.export(Path(scratch))
        for file in sorted(Path(scratch).glob("*.safetensors")):
            with safe_open(file, "numpy") as tensors:
                found |= {name: tensors.get_tensor(name).astype(np.float64) for name in tensors.keys()}  # noqa: SIM118
    return found
