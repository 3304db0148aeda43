"""Does the credit find the mistake? How well token weights single out the first wrong token of a response.

On the embedded task the solver knows every step, so the first token at which a response departs
from the derivation is known exactly. A weight that finds it is larger there than on the other
tokens of the same response.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from backends.interface import Ids, Proxy, ProxyKind
from delta_cli.credit import group_advantages, method, token_coefficients
from delta_cli.credit.surrogate import future_kl_weights
from delta_cli.data import tasks
from delta_cli.data.tasks import TaskSpec
from delta_cli.data.tokenizer import Tokenizer
from delta_cli.training.rollouts import RolloutBatch
from delta_cli.training.trainer import Trainer

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Variant:
    """A row of the table: DelTA with a proxy, a scope, and settings of the coefficients."""

    name: str
    proxy: ProxyKind = "output_row"
    by_group: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)


VARIANTS = (
    Variant("delta (output_row)"),
    Variant("delta (hidden_topk)", "hidden_topk"),
    Variant("delta (hidden_exact)", "hidden_exact"),
    Variant("delta by group", by_group=True),
    Variant("delta (hidden_exact) by group", "hidden_exact", by_group=True),
    Variant("delta, K = 0", settings={"refinements": 0}),
    Variant("delta, K = 2", settings={"refinements": 2}),
    Variant("delta, hard scores", settings={"score": "hard"}),
    Variant("delta, fixed temperature", settings={"temperature": 1.0}),
    Variant("delta, within side", settings={"contrast": "within"}),
    Variant("delta, random", settings={"score": "random"}),
)


@dataclass(frozen=True)
class Separation:
    """How a weight treats the first wrong token against the other tokens of the same wrong responses."""

    weight: str
    there: float  # mean weight of the first wrong token
    elsewhere: float  # mean weight of the other tokens
    auc: float  # chance that the first wrong token outweighs another of its response; 0.5 is chance
    responses: int


def first_wrong_tokens(batch: RolloutBatch, task: TaskSpec, tokenizer: Tokenizer) -> Ids:
    """Flat index of each wrong response's first wrong token, [R]; -1 for responses graded correct."""
    found = np.full(len(batch.texts), -1, dtype=np.int64)
    for row in np.flatnonzero(~batch.correct):
        tokens = batch.sequences.response(int(row))
        character = tasks.first_error(batch.problems[row // batch.samples], batch.texts[row], task)
        if character is None or not len(tokens):
            continue
        found[row] = batch.sequences.starts[row] + tasks.token_at(tokenizer.pieces(tokens), character)
    return found


def separation(name: str, weights: Array, mistakes: Ids, starts: Ids) -> Separation:
    """Summarise weights [N] over the responses with a mistake; ``starts`` [R+1]."""
    there, elsewhere, wins = [], [], []
    for row in np.flatnonzero(mistakes >= 0):
        own = weights[starts[row] : starts[row + 1]]
        place = mistakes[row] - starts[row]
        others = np.delete(own, place)
        if not len(others):
            continue
        there.append(own[place])
        elsewhere.append(others.mean())
        wins.append(np.mean((own[place] > others) + 0.5 * (own[place] == others)))
    if not wins:
        return Separation(name, np.nan, np.nan, np.nan, 0)
    return Separation(name, float(np.mean(there)), float(np.mean(elsewhere)), float(np.mean(wins)), len(wins))


def measure(trainer: Trainer, batch: RolloutBatch, task: TaskSpec) -> list[Separation]:
    """Every weight on one batch, under the trainer's current policy.

    The updates that FIPO's weights need move the policy, so this comes last on a policy.
    """
    mistakes = first_wrong_tokens(batch, task, trainer.roller.tokenizer)
    starts = batch.sequences.starts
    return [separation(name, weights, mistakes, starts) for name, weights in _weights(trainer, batch)]


def _weights(trainer: Trainer, batch: RolloutBatch) -> Iterator[tuple[str, Array]]:
    advantages = group_advantages(batch.rewards, batch.groups)
    for variant in VARIANTS:
        scores = trainer.backend.score(batch.sequences, Proxy(variant.proxy))
        assert scores.features is not None
        coefficients = token_coefficients(
            scores.features,
            advantages,
            batch.sequences.starts,
            groups=batch.groups if variant.by_group else None,
            rng=np.random.default_rng(trainer.state.step),
            **variant.settings,
        )
        scores.features.close()
        yield variant.name, coefficients.weights
    yield "entropy (forking tokens)", np.asarray(scores.entropies, np.float64)
    yield "fipo, after the updates", _future_kl(trainer, batch)


def _future_kl(trainer: Trainer, batch: RolloutBatch) -> Array:
    """FIPO's weights once the step's updates have moved the policy."""
    updater = trainer.updater
    scored = updater.score(batch)
    credit = updater.credit(batch, scored, trainer.state.step)
    updater.update(batch, credit, trainer.state.step)
    moved = np.asarray(trainer.backend.score(batch.sequences).logprobs, np.float64)
    delta = np.clip(moved - scored.scores.logprobs, -20, 20)
    lengths = batch.sequences.lengths
    weights, _ = future_kl_weights(delta, np.repeat(credit.advantages, lengths), lengths, method("fipo"))
    return weights
