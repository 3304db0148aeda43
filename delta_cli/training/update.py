"""From a graded batch to moved weights: advantages, scores, credit, and the mini-batch updates."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from backends.arrays import Bools, Doubles
from backends.collective import SOLO, deal
from backends.interface import (
    Collective,
    Features,
    Floats,
    Ids,
    Learner,
    Proxy,
    Scores,
    Sequences,
    starts_of,
    token_index,
)
from delta_cli.assets import model_path
from delta_cli.credit import MiniBatch, Surrogate, TokenCoefficients, group_advantages, token_coefficients
from delta_cli.credit.blame import blame_weights
from delta_cli.credit.shared import SharedFeatures, whole
from delta_cli.credit.surrogate import Totals
from delta_cli.data.tokenizer import Tokenizer
from delta_cli.errors import UserError
from delta_cli.recipe.models import Recipe
from delta_cli.rollout.batch import RolloutBatch
from delta_cli.seeds import generator
from delta_cli.training.blame import blamed_tokens


@dataclass(frozen=True)
class Scored:
    """A batch under the policy that is about to be updated.

    Tokens that were not scored, because nothing is learned from them, have the numbers of the engine that drew
    them; where that tells no entropies, −log-probability, whose mean is theirs.
    """

    scores: Scores
    reference_logp: Floats | None  # [N], with a KL term
    tokens: Bools  # [N] that were scored


@dataclass(frozen=True)
class Credit:
    """What a batch is updated with, fixed for every mini-batch and epoch on it."""

    advantages: Doubles  # [R]
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
    probe_logprob_change: float = 0.0  # nats, see metrics

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
            "probe_logprob_change": self.probe_logprob_change,
        }


class Updater:
    """The algorithm of a recipe on a learner. Every rank knows the whole batch and computes its own groups of it."""

    def __init__(self, recipe: Recipe, learner: Learner, collective: Collective = SOLO) -> None:
        self.recipe = recipe
        self.learner = learner
        self.collective = collective
        self.method = recipe.method.resolve()
        self.temperatures: tuple[float, float] | None = None  # with delta.temperature = first: that step's
        self.unscored = True
        self._tokenizer: Tokenizer | None = None  # loaded where the credit reads texts
        self.proxy = Proxy(recipe.delta.proxy, recipe.delta.topk) if self.method.credit == "delta" else None

    def recall(self, records: Iterable[Mapping[str, Any]]) -> None:
        """What a run that goes on needs to know of the metrics of its steps before."""
        if self.recipe.delta.temperature == "first":
            pairs = ((record.get("gamma_positive"), record.get("gamma_negative")) for record in records)
            self.temperatures = next(((float(a), float(b)) for a, b in pairs if a and b), None)

    @property
    def drawn_proxy(self) -> Proxy | None:
        """The proxy whose features are to be kept as responses are drawn."""
        return self.proxy if self.recipe.scores_as_drawn else None

    def score(self, batch: RolloutBatch, every: bool = False) -> Scored:
        """Log-probabilities, entropies and, where the method needs them, features.

        Where the recipe scores as drawn, those that the engine had in hand when it drew, unless it has not kept all
        that are needed. Else of one forward over the responses that have an advantage: no other adds to a centroid, to
        the loss or to its gradient, unless the method itself looks at all of them, or ``every`` one is asked for.
        """
        taken = self.recipe.scores_as_drawn and not every and self._drawn(batch)
        wanted = np.full(len(batch.sequences), every) | self._needed(batch)
        groups = self._share(batch.tokens_of_groups(wanted))
        rows = batch.rows(groups)
        rows = rows[wanted[rows]]
        index = token_index(batch.sequences.starts, rows)
        reference = None
        if self.recipe.update.kl_coefficient:
            reference = self._whole(self.learner.reference(batch.sequences.select(rows)), index, batch)
        if taken:
            scored = Scored(self._as_drawn(batch), reference, np.zeros(len(batch.sequences.tokens), dtype=bool))
        else:
            scores = self._fresh(batch, rows, index)
            scored = Scored(scores, reference, np.repeat(wanted, batch.sequences.lengths))
        if self.unscored and not np.isfinite(scored.scores.logprobs).all():  # the same on all ranks
            raise UserError(
                f"{self.recipe.model.path}: the first log-probabilities are no numbers, so neither are the weights or "
                'what is computed with them; get the model again, or set model.dtype = "float32"'
            )
        self.unscored = False
        return scored

    def _drawn(self, batch: RolloutBatch) -> bool:
        """Whether all that scoring would tell was kept when the batch was drawn."""
        return batch.engine_entropies is not None and (self.proxy is None or batch.features is not None)

    def _as_drawn(self, batch: RolloutBatch) -> Scores:
        features: Features | None = None
        if batch.features is not None:
            index = token_index(batch.sequences.starts, batch.features.rows)
            features = SharedFeatures(batch.features.features, index, len(batch.sequences.tokens), self.collective)
        assert batch.engine_entropies is not None
        return Scores(batch.engine_logprobs, batch.engine_entropies, features)

    def _fresh(self, batch: RolloutBatch, rows: Ids, index: Ids) -> Scores:
        """One forward, on this rank over ``rows``, with tokens at ``index``; of the others the engine's numbers."""
        if batch.features is not None:
            batch.features.features.close()
        own = self.learner.score(batch.sequences.select(rows), self.proxy)
        known = whole(np.ones(len(index)), index, len(batch.sequences.tokens), self.collective) > 0
        features: Features | None = own.features
        if own.features is not None and not (self.collective.size == 1 and known.all()):
            features = SharedFeatures(own.features, index, len(known), self.collective)
        surprise = -batch.engine_logprobs if batch.engine_entropies is None else batch.engine_entropies
        return Scores(
            np.where(known, self._whole(own.logprobs, index, batch), batch.engine_logprobs),
            np.where(known, self._whole(own.entropies, index, batch), surprise),
            features,
        )

    def _needed(self, batch: RolloutBatch) -> Bools:
        """Which responses must be scored, [R]."""
        method = self.method
        if self.recipe.update.kl_coefficient or method.credit == "entropy" or method.aggregation == "micro_batch_mean":
            return np.ones(len(batch.sequences), dtype=bool)
        found: Bools = group_advantages(batch.rewards, batch.groups, method.advantage) != 0
        return found

    def credit(self, batch: RolloutBatch, scored: Scored, step: int) -> Credit:
        """Advantages and token weights; the features are closed afterwards."""
        scores = scored.scores
        advantages = group_advantages(batch.rewards, batch.groups, self.method.advantage)
        if scores.features is None:
            ones, zeros = np.ones(len(scores.logprobs)), np.zeros(len(scores.logprobs))
            return Credit(advantages, scored, self._blamed(batch, advantages, TokenCoefficients(ones, zeros, zeros)))
        fixed = {} if self.temperatures is None else {"temperature": self.temperatures}
        try:
            coefficients = token_coefficients(
                scores.features,
                advantages,
                batch.sequences.starts,
                groups=batch.groups if self.recipe.delta.scope == "group" else None,
                rng=generator(self.recipe.run.seed, step, "coefficients"),
                **asdict(self.recipe.delta.resolve()) | fixed,
            )
        finally:
            scores.features.close()
        if self.recipe.delta.temperature == "first" and coefficients.degenerate is None:
            self.temperatures = self.temperatures or coefficients.temperatures
        return Credit(advantages, scored, self._blamed(batch, advantages, coefficients))

    def _blamed(self, batch: RolloutBatch, advantages: Doubles, coefficients: TokenCoefficients) -> TokenCoefficients:
        """With method.blame the coefficients times those of blame, with mean 1 again."""
        if self.recipe.method.blame == "none":
            return coefficients
        if self._tokenizer is None:
            self._tokenizer = Tokenizer.load(model_path(self.recipe.model.path))
        marks = blamed_tokens(batch, advantages, self._tokenizer)
        weights = coefficients.weights * blame_weights(marks, batch.sequences.starts)
        return replace(coefficients, weights=weights / weights.mean() if weights.any() else weights)

    def update(self, batch: RolloutBatch, credit: Credit, step: int) -> Updates:
        """Every mini-batch of every epoch; a mini-batch holds whole groups."""
        settings, done = self.recipe.update, Updates()
        probe = _shortest(batch)
        before: Floats = np.zeros(0)
        for groups in self._mini_batches(len(batch.problems), step):
            surrogate = self.surrogate(batch, credit, groups)
            if not surrogate.has_gradient:
                done.skipped += 1  # an optimizer step on a zero gradient would still decay and drift
                continue
            if not done.totals:
                before = self.learner.score(probe).logprobs
            self._update_on(batch, groups, surrogate, settings.rate(step, self.recipe.run.steps), done)
        if done.norms:
            done.probe_logprob_change = float(np.abs(self.learner.score(probe).logprobs - before).max(initial=0.0))
        return done

    def _mini_batches(self, groups: int, step: int) -> Iterator[Ids]:
        """The groups of each mini-batch of each epoch."""
        for epoch in range(self.recipe.update.epochs):
            order = np.arange(groups)
            if epoch:
                generator(self.recipe.run.seed, step, f"mini-batches {epoch}").shuffle(order)
            yield from (part for part in np.array_split(order, self.recipe.update.mini_batches) if len(part))

    def _update_on(self, batch: RolloutBatch, groups: Ids, surrogate: Surrogate, rate: float, done: Updates) -> None:
        loss = self.accumulate(batch, groups, surrogate)
        # A gradient that is not finite updates nothing, and neither does one of a loss that is not.
        norm = self.learner.step(rate, surrogate.scale if np.isfinite(loss) else np.nan)
        if np.isfinite(norm):
            done.losses.append(loss * surrogate.scale)
            done.norms.append(norm)
        else:
            done.nonfinite += 1
            done.skipped += 1
        done.totals.append(surrogate.totals)

    def accumulate(self, batch: RolloutBatch, groups: Ids, surrogate: Surrogate) -> float:
        """Add the gradient of the mini-batch of these prompts; its loss, and in the surrogate its totals.

        Responses that add nothing to it are left out of the forward.
        """
        rows = batch.rows(groups)
        wanted = np.zeros(len(batch.sequences), dtype=bool)
        wanted[rows] = surrogate.learned_from
        share = self._share(batch.tokens_of_groups(wanted)[groups])
        places = (share[:, None] * batch.samples + np.arange(batch.samples)).ravel()  # of own rows in the mini-batch
        places = places[wanted[rows[places]]]
        sequences = batch.sequences.select(rows[places])
        loss = self.learner.accumulate(sequences, _OwnRows(surrogate, places))
        if self.collective.size == 1:
            return loss
        losses, totals = zip(*self.collective.gather((loss, surrogate.totals)), strict=True)
        surrogate.totals = sum(totals, Totals())
        return float(sum(losses))

    def surrogate(self, batch: RolloutBatch, credit: Credit, groups: Ids) -> Surrogate:
        """The objective of the mini-batch of these prompts, for the sequences of ``batch.select(groups)``."""
        return Surrogate(self.method, self._mini_batch(batch, credit, groups))

    def _mini_batch(self, batch: RolloutBatch, credit: Credit, groups: Ids) -> MiniBatch:
        rows, settings = batch.rows(groups), self.recipe.update
        index = token_index(batch.sequences.starts, rows)
        scores, reference = credit.scored.scores, credit.scored.reference_logp
        engine = None if settings.importance_cap is None else batch.engine_logprobs
        return MiniBatch(
            logp_old=np.asarray(scores.logprobs, np.float64)[index],
            advantages=credit.advantages[rows],
            starts=starts_of(batch.sequences.lengths[rows]),
            weights=credit.coefficients.weights[index],
            entropies=np.asarray(scores.entropies, np.float64)[index],
            kept=~batch.truncated[rows] if settings.drop_truncated else None,
            max_length=self.recipe.rollout.max_tokens,
            reference_logp=None if reference is None else np.asarray(reference, np.float64)[index],
            kl_coefficient=settings.kl_coefficient,
            engine_logp=None if engine is None else np.asarray(engine, np.float64)[index],
            importance_cap=settings.importance_cap,
        )

    def _share(self, tokens: Ids) -> Ids:
        """Which of the groups with so many tokens this rank computes, ascending."""
        return deal(tokens, self.collective.size)[self.collective.rank]

    def _whole(self, values: Floats, index: Ids, batch: RolloutBatch) -> Floats:
        """A vector [N], float32, of which this rank has the values at ``index``; 0 where no rank has one."""
        return whole(values, index, len(batch.sequences.tokens), self.collective).astype(np.float32)


@dataclass(frozen=True)
class _OwnRows:
    """The objective of a mini-batch, for a learner that has its responses at ``places`` only."""

    surrogate: Surrogate
    places: Ids

    def __call__(self, logp: Floats, rows: Ids) -> tuple[float, Floats]:
        return self.surrogate(logp, self.places[rows])

    @property
    def needs_whole_micro_batch(self) -> bool:
        return self.surrogate.method.aggregation == "micro_batch_mean"

    def restart(self) -> None:
        self.surrogate.restart()


def _shortest(batch: RolloutBatch) -> Sequences:
    """The batch's shortest response, to see the policy move: two forwards of it cost next to nothing."""
    return batch.sequences.select(np.argsort(batch.sequences.lengths, kind="stable")[:1])
