"""From a graded batch to moved weights: advantages, scores, credit, and the mini-batch updates."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from backends.interface import Backend, Floats, Ids, Proxy, Scores, Sequences, token_index
from delta_cli.credit import MiniBatch, Surrogate, TokenCoefficients, group_advantages, token_coefficients
from delta_cli.credit.surrogate import Totals
from delta_cli.recipe.models import Recipe
from delta_cli.training.rollouts import RolloutBatch
from delta_cli.training.seeds import generator

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Scored:
    """A batch under the policy that is about to be updated."""

    scores: Scores
    reference_logp: Floats | None  # [N], with a KL term


@dataclass(frozen=True)
class Credit:
    """What a batch is updated with, fixed for every mini-batch and epoch on it."""

    advantages: Array  # [R]
    scored: Scored
    coefficients: TokenCoefficients  # weights 1 where the method gives none


@dataclass
class Updates:
    """What happened in the updates of one batch."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)  # of updates that moved the weights
    skipped: int = 0
    nonfinite: int = 0
    totals: list[Totals] = field(default_factory=list)  # of every update that had a forward
    policy_shift: float = 0.0  # nats, see metrics

    def record(self) -> dict[str, Any]:
        """The numbers for metrics.jsonl."""
        tokens = max(sum(total.tokens for total in self.totals), 1)
        return {
            "loss": float(np.mean(self.losses)) if self.losses else 0.0,
            "grad_norm": float(np.mean(self.norms)) if self.norms else 0.0,
            "updates": len(self.norms),
            "updates_skipped": self.skipped,
            "nonfinite_updates": self.nonfinite,
            "clip_fraction": sum(total.closed for total in self.totals) / tokens,
            "kl_old": sum(total.kl_old for total in self.totals) / tokens,
            "kl_reference": sum(total.kl_reference for total in self.totals) / tokens,
            "ratio_gap_first": self.totals[0].ratio_gap if self.totals else None,
            "ratio_gap": max((total.ratio_gap for total in self.totals), default=0.0),
            "policy_shift": self.policy_shift,
        }


class Updater:
    """The algorithm of a recipe on a backend."""

    def __init__(self, recipe: Recipe, backend: Backend) -> None:
        self.recipe = recipe
        self.backend = backend
        self.method = recipe.method.resolve()
        self.proxy = Proxy(recipe.delta.proxy, recipe.delta.topk) if self.method.credit == "delta" else None

    def score(self, batch: RolloutBatch) -> Scored:
        """One forward gives log-probabilities, entropies and, where the method needs them, features."""
        scores = self.backend.score(batch.sequences, self.proxy)
        reference = self.backend.reference(batch.sequences) if self.recipe.update.kl_coefficient else None
        return Scored(scores, reference)

    def credit(self, batch: RolloutBatch, scored: Scored, step: int) -> Credit:
        """Advantages and token weights; the features are closed afterwards."""
        scores = scored.scores
        advantages = group_advantages(batch.rewards, batch.groups, self.method.advantage)
        if scores.features is None:
            ones, zeros = np.ones(len(scores.logprobs)), np.zeros(len(scores.logprobs))
            return Credit(advantages, scored, TokenCoefficients(ones, zeros, zeros))
        try:
            coefficients = token_coefficients(
                scores.features,
                advantages,
                batch.sequences.starts,
                groups=batch.groups if self.recipe.delta.scope == "group" else None,
                rng=generator(self.recipe.run.seed, step, "coefficients"),
                all_sum=self.backend.all_sum,
                **asdict(self.recipe.delta.resolve()),
            )
        finally:
            scores.features.close()
        return Credit(advantages, scored, coefficients)

    def update(self, batch: RolloutBatch, credit: Credit, step: int) -> Updates:
        """Every mini-batch of every epoch; a mini-batch holds whole groups."""
        settings, done = self.recipe.update, Updates()
        probe = _shortest(batch)
        before = self.backend.score(probe).logprobs
        for epoch in range(settings.epochs):
            order = np.arange(len(batch.problems))
            if epoch:
                generator(self.recipe.run.seed, step, f"mini-batches {epoch}").shuffle(order)
            for groups in np.array_split(order, settings.mini_batches):
                if len(groups):
                    self._update_on(batch, credit, groups, settings.rate(step, self.recipe.run.steps), done)
        if done.norms:
            done.policy_shift = float(np.abs(self.backend.score(probe).logprobs - before).max(initial=0.0))
        return done

    def _update_on(self, batch: RolloutBatch, credit: Credit, groups: Ids, rate: float, done: Updates) -> None:
        mini = batch.select(groups)
        surrogate = self.surrogate(batch, credit, groups)
        if not surrogate.has_gradient:
            done.skipped += 1  # an optimizer step on a zero gradient would still decay and drift
            return
        loss = self.backend.accumulate(mini.sequences, surrogate)
        # A gradient that is not finite updates nothing, and neither does one of a loss that is not.
        norm = self.backend.step(rate, surrogate.scale if np.isfinite(loss) else np.nan)
        if np.isfinite(norm):
            done.losses.append(loss * surrogate.scale)
            done.norms.append(norm)
        else:
            done.nonfinite += 1
            done.skipped += 1
        done.totals.append(surrogate.totals)

    def surrogate(self, batch: RolloutBatch, credit: Credit, groups: Ids) -> Surrogate:
        """The objective of the mini-batch of these prompts, for the sequences of ``batch.select(groups)``."""
        return Surrogate(self.method, self._mini_batch(batch, credit, groups), self.backend.all_sum)

    def _mini_batch(self, batch: RolloutBatch, credit: Credit, groups: Ids) -> MiniBatch:
        samples, settings = batch.samples, self.recipe.update
        rows = (groups[:, None] * samples + np.arange(samples)).ravel()
        index = token_index(batch.sequences.starts, rows)
        lengths = batch.sequences.lengths[rows]
        scores, reference = credit.scored.scores, credit.scored.reference_logp
        engine = None if settings.importance_cap is None else batch.engine_logprobs
        return MiniBatch(
            logp_old=np.asarray(scores.logprobs, np.float64)[index],
            advantages=credit.advantages[rows],
            starts=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
            weights=credit.coefficients.weights[index],
            entropies=np.asarray(scores.entropies, np.float64)[index],
            kept=~batch.truncated[rows] if settings.drop_truncated else None,
            max_length=self.recipe.rollout.max_tokens,
            reference_logp=None if reference is None else np.asarray(reference, np.float64)[index],
            kl_coefficient=settings.kl_coefficient,
            engine_logp=None if engine is None else np.asarray(engine, np.float64)[index],
            importance_cap=settings.importance_cap,
        )


def _shortest(batch: RolloutBatch) -> Sequences:
    """The batch's shortest response, to see the policy move: two forwards of it cost next to nothing."""
    return batch.sequences.select(np.argsort(batch.sequences.lengths, kind="stable")[:1])
