"""From a graded batch to updated weights: advantages, scores, credit, and mini-batch updates."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from backends.arrays import Bools, Doubles
from backends.collective import SOLO, deal
from backends.interface import (
    Collective,
    Floats,
    Ids,
    Learner,
    Proxy,
    starts_of,
    token_index,
)
from delta_cli.assets import model_path
from delta_cli.credit import MiniBatch, Surrogate, TokenCoefficients
from delta_cli.credit.blame import with_blame
from delta_cli.credit.coefficients import batch_coefficients
from delta_cli.credit.distributed import HeldFeatures
from delta_cli.credit.surrogate import Totals
from delta_cli.credit.weight_functions import CreditInput, normalised
from delta_cli.data.tokenizer import Tokenizer
from delta_cli.errors import UserError
from delta_cli.recipe.models import Recipe
from delta_cli.rollout.batch import LocalFeatures, RolloutBatch
from delta_cli.seeds import derive, generator
from delta_cli.training.blame import blamed_tokens
from delta_cli.training.credit_file import open_weight_function
from delta_cli.training.entropy_bonus import EntropyBonus
from delta_cli.training.hints import hinted_prompts
from delta_cli.training.metrics import Updates


@dataclass(frozen=True)
class ScoredBatch:
    """A rollout batch with advantages, and what the policy before the update says about its tokens.

    Tokens outside ``scored`` keep the sampler's numbers, because nothing is learned from them. If the sampler
    returned no entropies, their entropy is −log-probability, which has the same mean.
    """

    rollout: RolloutBatch
    advantages: Doubles  # [R]
    old_logprobs: Floats  # [N] float32, under the policy before the update
    entropies: Floats  # [N] float32, nats
    features: HeldFeatures | None  # of the tokens that this rank holds
    reference_logprobs: Floats | None  # [N], only with a KL term
    scored: Bools  # [N] True: a forward pass computed the scores
    hinted_logprobs: Floats | None = None  # [N], only with method.hint
    hidden_residuals: Floats | None = None  # [N], only with method.hidden_residuals


class Updater:
    """The algorithm of a recipe on a learner.

    Every rank knows the whole batch; it computes forward and backward passes for its own share of the groups.
    """

    def __init__(self, recipe: Recipe, learner: Learner, ranks: Collective = SOLO) -> None:
        self.recipe = recipe
        self.learner = learner
        self.ranks = ranks
        self.method = recipe.method.resolve()
        self.correction = recipe.correction.resolve()
        self.delta = recipe.delta.resolve()
        self.scores_as_drawn = recipe.scores_as_drawn
        self.scales_weights = recipe.method.changes_weights
        self.entropy = EntropyBonus(recipe.update)
        self.temperatures: tuple[float, float] | None = None  # of the first step, with delta.temperature = "first"
        self.weight_function = open_weight_function(self.method)
        reads_features = self.weight_function is not None and self.weight_function.reads_features
        wants_features = self.method.credit == "delta" or reads_features
        self.proxy = Proxy(recipe.delta.proxy, recipe.delta.topk) if wants_features else None
        self._checked = False  # whether log-probabilities have been checked for NaN
        self._tokenizer: Tokenizer | None = None  # loaded on first use

    def recall(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Restore what a resumed run needs from the metrics of its earlier steps."""
        records = list(records)
        if self.recipe.delta.temperature == "first":
            pairs = ((record.get("gamma_positive"), record.get("gamma_negative")) for record in records)
            self.temperatures = next(((float(a), float(b)) for a, b in pairs if a and b), None)
        self.entropy.recall(records)

    @property
    def weighs_tokens(self) -> bool:
        """Whether weights differ between tokens before any update; their statistics are then recorded."""
        function = self.weight_function is not None
        return self.method.credit == "delta" or function or self.scales_weights

    @property
    def sampler_proxy(self) -> Proxy | None:
        """The proxy whose features the sampler should keep while it samples."""
        return self.proxy if self.scores_as_drawn else None

    # ------------------------------------------------------------------------------- scoring

    def score(self, batch: RolloutBatch, every: bool = False) -> ScoredBatch:
        """Advantages, old log-probs, entropies and, if the method needs them, features.

        Reuses the sampler's numbers if the recipe asks for that and all of them were kept; otherwise runs one forward
        pass over the responses that have an advantage. No other response adds to a centroid, the loss or its gradient,
        unless the method itself reads all of them or ``every`` is set.
        """
        advantages = batch.advantages(self.method.advantage)
        wanted = np.full(len(batch.sequences), every or self._reads_all_responses) | (advantages != 0)
        rows = batch.rows(self._own_groups(batch.tokens_of_groups(wanted)))
        rows = rows[wanted[rows]]
        reference = None
        if self.recipe.update.kl_coefficient:
            own_reference = self.learner.reference(batch.sequences.select(rows))
            reference = self._from_all_ranks(own_reference, rows, wanted, batch)
        if self.scores_as_drawn and not every and self._kept_by_sampler(batch):
            assert batch.engine_entropies is not None
            scored = np.zeros(len(batch.sequences.tokens), dtype=bool)
            logprobs, entropies, local = batch.engine_logprobs, batch.engine_entropies, batch.features
        else:
            scored = np.repeat(wanted, batch.sequences.lengths)
            logprobs, entropies, local = self._forward(batch, rows, wanted)
        self._check_finite(logprobs)
        hinted = residuals = None
        if self.recipe.method.hint:
            prompts = hinted_prompts(batch, self.recipe, self._known_tokenizer())
            own_hinted = self.learner.score(replace(batch.sequences, prompts=prompts).select(rows)).logprobs
            hinted = self._from_all_ranks(own_hinted, rows, wanted, batch)
        if self.recipe.method.hidden_residuals:
            own_residuals = self.learner.hidden_residuals(batch.sequences.select(rows))
            residuals = self._from_all_ranks(own_residuals, rows, wanted, batch)
        held = None
        if local is not None:
            held = HeldFeatures(
                local.features,
                token_index(batch.sequences.starts, local.rows),
                len(batch.sequences.tokens),
                self.ranks,
            )
        return ScoredBatch(batch, advantages, logprobs, entropies, held, reference, scored, hinted, residuals)

    @property
    def _reads_all_responses(self) -> bool:
        """Whether responses without an advantage matter too."""
        method, settings = self.method, self.recipe.update
        return (
            method.credit == "entropy"
            or method.aggregation == "micro_batch_mean"
            or method.covariance != "none"
            or self.correction.reject != "none"  # what is rejected leaves the denominators too
            or settings.kl_coefficient > 0
            or self.entropy.active
        )

    def _kept_by_sampler(self, batch: RolloutBatch) -> bool:
        return batch.engine_entropies is not None and (self.proxy is None or batch.features is not None)

    def _forward(self, batch: RolloutBatch, rows: Ids, wanted: Bools) -> tuple[Floats, Floats, LocalFeatures | None]:
        """Log-probs, entropies and features from one forward pass, of which this rank runs ``rows``.

        Together the ranks run all ``wanted`` [R] responses. The tokens of the others keep the sampler's numbers.
        """
        if batch.features is not None:
            batch.features.features.close()
        own = self.learner.score(batch.sequences.select(rows), self.proxy)
        known = np.repeat(wanted, batch.sequences.lengths)
        surprisal = -batch.engine_logprobs if batch.engine_entropies is None else batch.engine_entropies
        return (
            np.where(known, self._from_all_ranks(own.logprobs, rows, wanted, batch), batch.engine_logprobs),
            np.where(known, self._from_all_ranks(own.entropies, rows, wanted, batch), surprisal),
            None if own.features is None else LocalFeatures(rows, own.features),
        )

    def _check_finite(self, logprobs: Floats) -> None:
        """Raise UserError if the first log-probabilities are not finite; every rank sees the same ones."""
        if not self._checked and not np.isfinite(logprobs).all():
            raise UserError(
                f"{self.recipe.model.path}: the first log-probabilities are not finite, so the weights are damaged or "
                'the compute overflows; download the model again, or set model.dtype = "float32"'
            )
        self._checked = True

    # -------------------------------------------------------------------------------- credit

    def credit(self, batch: ScoredBatch, step: int) -> TokenCoefficients:
        """The weight of every token, fixed for all updates on the batch. Closes the features."""
        found = self._coefficients(batch, step)
        if self.recipe.method.blame != "none":
            marks = blamed_tokens(batch.rollout, batch.advantages, self._known_tokenizer())
            found = with_blame(found, marks, batch.rollout.sequences.starts)
        if not self.scales_weights:
            return found
        section = self.recipe.method
        logprobs = np.asarray(batch.old_logprobs, np.float64)
        advantages = np.repeat(batch.advantages, batch.rollout.sequences.lengths)
        weights = normalised(found.weights, logprobs, advantages, section.normalise, section.weight_negative)
        return replace(found, weights=weights)

    def _coefficients(self, batch: ScoredBatch, step: int) -> TokenCoefficients:
        """The weights as the method's credit gives them."""
        held, rollout = batch.features, batch.rollout
        rng = generator(self.recipe.run.seed, step, "coefficients")
        if self.weight_function is not None:
            return self._by_function(batch, step, rng)
        if held is None:
            ones, zeros = np.ones(len(batch.old_logprobs)), np.zeros(len(batch.old_logprobs))
            return TokenCoefficients(ones, zeros, zeros)
        settings = self.delta if self.temperatures is None else replace(self.delta, temperature=self.temperatures)
        groups = rollout.groups if self.recipe.delta.scope == "group" else None
        try:
            coefficients = batch_coefficients(held, batch.advantages, rollout.sequences.starts, settings, groups, rng)
        finally:
            held.features.close()  # type: ignore[attr-defined]  # a backend's can be closed
        if self.recipe.delta.temperature == "first" and coefficients.degenerate is None:
            self.temperatures = self.temperatures or coefficients.temperatures
        return coefficients

    def _by_function(self, batch: ScoredBatch, step: int, rng: np.random.Generator) -> TokenCoefficients:
        """The weights of the method's weight function, which sees the whole batch on every rank."""
        assert self.weight_function is not None
        rollout, held = batch.rollout, batch.features
        sequences = rollout.sequences
        given = CreditInput(
            np.asarray(batch.old_logprobs, np.float64),
            np.asarray(batch.entropies, np.float64),
            batch.advantages,
            rollout.groups,
            sequences.starts,
            sequences.tokens,
            step,
            rng,
            [rollout.problems[group].question for group in rollout.groups],
            [str(rollout.problems[group].answer) for group in rollout.groups],
            lambda row: self._known_tokenizer().pieces(sequences.response(row)),
            None if batch.hinted_logprobs is None else np.asarray(batch.hinted_logprobs, np.float64),
            None if batch.hidden_residuals is None else np.asarray(batch.hidden_residuals, np.float64),
        )
        try:
            return self.weight_function.coefficients(given, held)
        except ValueError as error:
            raise UserError(f"method.credit: {error}") from None
        finally:
            if held is not None:
                held.features.close()  # type: ignore[attr-defined]  # a backend's can be closed

    def _known_tokenizer(self) -> Tokenizer:
        """The model's tokenizer, loaded on first use."""
        if self._tokenizer is None:
            self._tokenizer = Tokenizer.load(model_path(self.recipe.model.path))
        return self._tokenizer

    # ------------------------------------------------------------------------------- updates

    def update(self, batch: ScoredBatch, coefficients: TokenCoefficients, step: int) -> Updates:
        """Every mini-batch of every epoch; a mini-batch holds whole groups."""
        settings, done = self.recipe.update, Updates()
        self.entropy.adapt(batch.entropies)
        probe = batch.rollout.shortest_response  # shows cheaply whether the policy moved
        before: Floats = np.zeros(0)
        for number, groups in enumerate(self._mini_batches(len(batch.rollout.problems), step)):
            seed = derive(self.recipe.run.seed, step, f"covariance {number}")
            surrogate = self.surrogate(batch, coefficients, groups, seed)
            if not surrogate.has_gradient:
                done.skipped += 1  # an optimizer step on a zero gradient would still decay and drift
                continue
            if not done.totals:
                before = self.learner.score(probe).logprobs
            loss = self.accumulate(batch.rollout, groups, surrogate)
            self._step(loss, surrogate, settings.rate(step, self.recipe.run.steps), done)
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

    def _step(self, loss: float, surrogate: Surrogate, rate: float, done: Updates) -> None:
        """Move the weights along the accumulated gradient, unless it or the loss is not finite."""
        norm = self.learner.step(rate, surrogate.scale if np.isfinite(loss) else np.nan)
        if np.isfinite(norm):
            done.losses.append(loss * surrogate.scale)
            done.norms.append(norm)
        else:
            done.nonfinite += 1
            done.skipped += 1
        done.totals.append(surrogate.totals)

    def accumulate(self, batch: RolloutBatch, groups: Ids, surrogate: Surrogate) -> float:
        """Add the gradient of the mini-batch of prompts ``groups`` and return its loss.

        Leaves responses that contribute nothing out of the forward pass. Adds up ``surrogate.totals`` over ranks.
        """
        rows = batch.rows(groups)
        wanted = np.zeros(len(batch.sequences), dtype=bool)
        wanted[rows] = surrogate.learned_from
        own = self._own_groups(batch.tokens_of_groups(wanted)[groups])
        places = (own[:, None] * batch.samples + np.arange(batch.samples)).ravel()  # of own rows in the mini-batch
        places = places[wanted[rows[places]]]
        sequences = batch.sequences.select(rows[places])
        loss = self.learner.accumulate(sequences, _LocalObjective(surrogate, places))
        if self.ranks.size == 1:
            return loss
        losses, totals = zip(*self.ranks.gather((loss, surrogate.totals)), strict=True)
        surrogate.totals = sum(totals, Totals())
        return float(sum(losses))

    def surrogate(self, batch: ScoredBatch, coefficients: TokenCoefficients, groups: Ids, seed: int = 0) -> Surrogate:
        """The objective of the mini-batch of prompts ``groups``; ``seed`` chooses tokens for method.covariance."""
        rollout, settings = batch.rollout, self.recipe.update
        rows = rollout.rows(groups)
        index = token_index(rollout.sequences.starts, rows)

        def chosen(values: Floats | None) -> Doubles | None:
            return None if values is None else np.asarray(values, np.float64)[index]

        mini_batch = MiniBatch(
            logp_old=np.asarray(batch.old_logprobs, np.float64)[index],
            advantages=batch.advantages[rows],
            starts=starts_of(rollout.sequences.lengths[rows]),
            weights=coefficients.weights[index],
            entropies=chosen(batch.entropies),
            kept=self._kept(rollout, rows),
            max_length=self.recipe.rollout.max_tokens,
            reference_logp=chosen(batch.reference_logprobs),
            kl_coefficient=settings.kl_coefficient,
            kl_estimator=settings.kl_estimator,
            entropy_coefficient=self.entropy.applied,
            engine_logp=chosen(rollout.engine_logprobs if self.correction.active else None),
            correction=self.correction,
            seed=seed,
        )
        return Surrogate(self.method, mini_batch)

    def _kept(self, batch: RolloutBatch, rows: Ids) -> Bools | None:
        """Which responses count in the loss and its denominator; None: all of them."""
        dropped = batch.failed | (batch.truncated if self.recipe.update.drop_truncated else False)
        may_drop = self.recipe.update.drop_truncated or batch.episodes is not None or batch.failed.any()
        return ~dropped[rows] if may_drop else None

    def _own_groups(self, tokens: Ids) -> Ids:
        """Which of the groups, of so many tokens each, this rank computes, ascending."""
        return deal(tokens, self.ranks.size)[self.ranks.rank]

    def _from_all_ranks(self, values: Floats, rows: Ids, wanted: Bools, batch: RolloutBatch) -> Floats:
        """A float32 vector [N] from each rank's values of its ``rows``; 0 for responses that are not ``wanted`` [R].

        Only the wanted tokens cross between ranks.
        """
        sequences = batch.sequences
        every = token_index(sequences.starts, np.flatnonzero(wanted))
        own = np.searchsorted(every, token_index(sequences.starts, rows))
        compact = np.zeros(len(every), np.float32)
        compact[own] = values
        found = np.zeros(len(sequences.tokens), np.float32)
        found[every] = self.ranks.sum(compact)
        return found


@dataclass(frozen=True)
class _LocalObjective:
    """A mini-batch's objective for a learner that holds only the responses at ``places``."""

    surrogate: Surrogate
    places: Ids

    def __call__(self, logp: Floats, rows: Ids) -> tuple[float, Floats]:
        return self.surrogate(logp, self.places[rows])

    @property
    def needs_whole_micro_batch(self) -> bool:
        return self.surrogate.method.aggregation == "micro_batch_mean"

    def restart(self) -> None:
        self.surrogate.restart()
