"""The objective of one mini-batch and its derivative with respect to every log-probability.

Loss = −Σ_t share_t · weight_t · l_t: the aggregation gives the shares, the credit the weights, the gate the terms l.
Shares and weights are known before the first micro-batch, so splitting the mini-batch over micro-batches or processes
changes nothing beyond rounding.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from delta_cli.credit.advantages import check_layout
from delta_cli.credit.corrections import NO_CORRECTION, Correction, accepted_tokens, correction_weights
from delta_cli.credit.corrections import correction as find_correction
from delta_cli.credit.divergences import KL_ESTIMATORS, KlEstimator, direction
from delta_cli.credit.entropy import clip_cov_tokens, covariances, entropy_estimate, kl_cov_tokens
from delta_cli.credit.gates import GATES, MAX_LOG_RATIO, GateInput, dual_clipped
from delta_cli.credit.methods import Method
from delta_cli.credit.methods import method as find_method

if TYPE_CHECKING:  # the core itself needs nothing but numpy
    from backends.arrays import Bools, Doubles, Ids


@dataclass(frozen=True)
class MiniBatch:
    """What is known of a mini-batch before its first forward pass: R responses, N tokens."""

    logp_old: Doubles  # [N] under the policy before the update, recomputed by the trainer
    advantages: Doubles  # [R]
    starts: Ids  # [R+1]
    weights: Doubles | None = None  # [N] token coefficients; None: 1
    entropies: Doubles | None = None  # [N] nats; needed by credit "entropy"
    kept: Bools | None = None  # [R] False: left out of loss and denominator
    max_length: int | None = None  # tokens; needed by aggregation "constant"
    reference_logp: Doubles | None = None  # [N] under the reference policy; needed with kl_coefficient
    kl_coefficient: float = 0.0  # of the estimate of KL(policy ‖ reference)
    kl_estimator: KlEstimator = "k3"
    entropy_coefficient: float = 0.0  # of the entropy bonus; needs entropies
    engine_logp: Doubles | None = None  # [N] under the sampling engine; needed with a correction
    correction: Correction = NO_CORRECTION  # for the gap between logp_old and engine_logp
    seed: int = 0  # of the tokens that covariance "clip" chooses

    def __post_init__(self) -> None:
        check_layout(self.advantages, self.starts)
        tokens = (int(self.starts[-1]),)
        for name in ("logp_old", "weights", "entropies", "reference_logp", "engine_logp"):
            value = getattr(self, name)
            if value is not None and value.shape != tokens:
                raise ValueError(f"{name} must be [N] = {list(tokens)}, not {list(value.shape)}")
        if self.kept is not None and self.kept.shape != self.advantages.shape:
            raise ValueError(f"kept must be [R] = {list(self.advantages.shape)}, not {list(self.kept.shape)}")
        if self.kl_coefficient and self.reference_logp is None:
            raise ValueError("kl_coefficient needs reference_logp")
        if self.entropy_coefficient and self.entropies is None:
            raise ValueError("entropy_coefficient needs entropies")
        if self.correction.active and self.engine_logp is None:
            raise ValueError("a correction needs engine_logp")

    @property
    def ratio_logp(self) -> Doubles:
        """The log-probabilities [N] that the gate's ratio divides by."""
        return self.logp_old if self.engine_logp is None or not self.correction.bypass else self.engine_logp

    @cached_property
    def gap(self) -> Doubles:
        """logp_old − engine_logp, [N]; zeros without a correction."""
        if self.engine_logp is None or not self.correction.active:
            return np.zeros(len(self.logp_old))
        return self.logp_old - self.engine_logp

    @cached_property
    def tokens(self) -> Bools:
        """Which tokens are neither left out with their response nor rejected by the correction, [N]."""
        accepted = accepted_tokens(self.correction, self.gap, self.starts)
        return accepted if self.kept is None else accepted & np.repeat(self.kept, np.diff(self.starts))

    @cached_property
    def responses(self) -> Bools:
        """Which responses count, [R]: those that are kept and were not rejected as a whole."""
        lengths = np.diff(self.starts)
        kept = np.ones(len(lengths), dtype=bool) if self.kept is None else self.kept
        if self.correction.reject == "none":
            return kept
        counts = np.bincount(np.repeat(np.arange(len(lengths)), lengths), self.tokens, len(lengths))
        responses: Bools = kept & ((counts > 0) | (lengths == 0))
        return responses


@dataclass
class Totals:
    """Sums over the tokens of the mini-batch seen so far."""

    tokens: int = 0
    closed: int = 0  # tokens whose gradient the gate cut off
    kl_old: float = 0.0  # Σ of the k3 estimator of KL(old ‖ current)
    kl_reference: float = 0.0
    ratio_gap: float = 0.0  # largest |logp − logp_old|
    left: int = 0  # units of the mean (tokens or responses) that the credit dropped

    def __add__(self, other: Totals) -> Totals:
        """The totals of two parts of a mini-batch together."""
        sums = {name: getattr(self, name) + getattr(other, name) for name in vars(self)}
        return Totals(**sums | {"ratio_gap": max(self.ratio_gap, other.ratio_gap)})


@dataclass
class Surrogate:
    """An objective for a learner: ``(logp [n], rows [r]) -> (loss, dloss/dlogp [n])``, float64.

    ``batch`` is the whole mini-batch, whichever process holds its responses. With several processes, add up ``totals``
    over them before reading ``scale``.
    """

    method: Method
    batch: MiniBatch
    totals: Totals = field(default_factory=Totals)

    def __post_init__(self) -> None:
        kept = token_mask(self.method, self.batch)
        self._shares = _shares(self.method, self.batch, kept)  # [N], 0 where left out
        self._units = _units(self.method, self.batch.starts, self._shares)  # [R]
        self._averaged = averaged_tokens(self.method, self.batch, kept)  # [N]
        self._factors = self._shares if self.batch.weights is None else self._shares * self.batch.weights
        if self.batch.correction.weight != "none":
            weights = correction_weights(self.batch.correction, self.batch.gap, self.batch.starts)
            self._factors = self._factors * weights
        self._chosen = self._by_covariance(kept)  # [N]
        if self.method.covariance == "clip":
            self._factors = np.where(self._chosen, 0.0, self._factors)
        self._bonus = kept * (self.batch.entropy_coefficient / max(int(kept.sum()), 1))  # [N] of the entropy

    def _by_covariance(self, kept: Bools) -> Bools:
        """The tokens whose covariance of advantage and log-probability the method acts on, [N]."""
        method, batch = self.method, self.batch
        if method.covariance == "none":
            return np.zeros(len(kept), dtype=bool)
        advantages = np.repeat(batch.advantages, np.diff(batch.starts))
        covariance, share = covariances(batch.logp_old, advantages, kept), method.covariance_share
        if method.covariance == "kl":
            return kl_cov_tokens(covariance, kept, share)
        low, high = method.covariance_low, method.covariance_high
        return clip_cov_tokens(covariance, kept, share, low, high, np.random.default_rng(batch.seed))

    @property
    def has_gradient(self) -> bool:
        """Whether there is anything to learn from."""
        return bool(self.learned_from.any())

    @property
    def learned_from(self) -> Bools:
        """The responses [R] that the objective must see; no other adds to loss, gradient or ``scale``.

        A response can be skipped if each of its tokens has no advantage or no weight, or is left out, and there is no
        KL term and no entropy bonus. With the mean over micro-batches, it is all responses or none, because that mean
        depends on what shares a micro-batch.
        """
        lengths = np.diff(self.batch.starts)
        tokens = self._factors * np.repeat(self.batch.advantages, lengths) != 0
        if self.batch.kl_coefficient > 0 or self.batch.entropy_coefficient > 0:
            tokens = tokens | (self._shares > 0)
        if self.method.covariance == "kl":
            tokens = tokens | self._chosen
        found = np.bincount(np.repeat(np.arange(len(lengths)), lengths), tokens, len(lengths)) > 0
        if self.method.aggregation == "micro_batch_mean":
            return np.full(len(lengths), found.any())
        return found

    def restart(self) -> None:
        """Reset the totals, for a learner that starts the mini-batch over."""
        self.totals = Totals()

    @property
    def scale(self) -> float:
        """The factor on loss and gradient after the last micro-batch.

        It is 1 unless the credit drops responses because of their ratios. Then the mean runs over the tokens, or the
        responses, that remain, including those that the learner skipped.
        """
        every, left = int(self._units.sum()), self.totals.left
        if not left:
            return 1.0
        return every / (every - left) if every > left else 0.0

    def __call__(self, logp: ArrayLike, rows: ArrayLike) -> tuple[float, Doubles]:
        """Loss and its derivative for the whole responses at ``rows``, flat in that order."""
        logp, rows = np.asarray(logp, np.float64), np.asarray(rows, np.int64)
        firsts, lasts = self.batch.starts[rows], self.batch.starts[rows + 1]
        lengths = lasts - firsts
        index = np.concatenate([np.arange(0), *map(np.arange, firsts, lasts)])  # [n]
        raw = logp - self.batch.ratio_logp[index]
        delta = np.clip(raw, -MAX_LOG_RATIO, MAX_LOG_RATIO)
        advantages = np.repeat(self.batch.advantages[rows], lengths)
        factors = self._factors[index]
        shares = self._shares[index]
        if self.method.aggregation == "micro_batch_mean":
            tokens = max(int(self._averaged[index].sum()), 1)
            packed = int(self.batch.responses[rows].sum()) / tokens
            factors, shares = factors * packed, shares * packed

        gate = GATES[self.method.gate](GateInput(logp, delta, advantages, lengths), self.method)
        if self.method.credit == "future_kl":
            weights, stays = future_kl_weights(delta, advantages, lengths, self.method)
            self.totals.left += int(self._units[rows[~stays]].sum())
            stays = np.repeat(stays, lengths)
            factors, shares = factors * weights * stays, shares * stays
        inside = (np.abs(raw) <= MAX_LOG_RATIO) | (self.method.gate == "stop_gradient")
        loss = -np.dot(factors, gate.value)
        gradient = -factors * gate.slope * inside
        drift = np.clip(logp - self.batch.logp_old[index], -MAX_LOG_RATIO, MAX_LOG_RATIO)
        self._observe(drift, gate.closed | (self._chosen[index] & (self.method.covariance == "clip")), shares)
        if self.batch.kl_coefficient:
            distance = logp - self.batch.reference_logp[index]  # type: ignore[index]
            kl, slope = KL_ESTIMATORS[self.batch.kl_estimator](distance, raw)
            self.totals.kl_reference += float(kl[shares > 0].sum())
            loss += self.batch.kl_coefficient * np.dot(shares, kl)
            gradient += self.batch.kl_coefficient * shares * slope
        if self.method.covariance == "kl":
            penalty = self.method.covariance_kl * shares * self._chosen[index]
            loss += np.dot(penalty, np.abs(delta))
            gradient += penalty * direction(delta) * (np.abs(raw) <= MAX_LOG_RATIO)
        if self.batch.entropy_coefficient:
            entropy, slope = entropy_estimate(logp, delta, self.batch.entropies[index])  # type: ignore[index]
            bonus = self._bonus[index] * (shares > 0)
            loss -= np.dot(bonus, entropy)
            gradient -= bonus * slope * (np.abs(raw) <= MAX_LOG_RATIO)
        return float(loss), gradient

    def _observe(self, delta: Doubles, closed: Bools, shares: Doubles) -> None:
        counted = shares > 0
        self.totals.tokens += int(counted.sum())
        self.totals.closed += int((closed & counted).sum())
        self.totals.kl_old += float((np.exp(delta) - 1 - delta)[counted].sum())
        self.totals.ratio_gap = max(self.totals.ratio_gap, float(np.abs(delta[counted]).max(initial=0.0)))


def policy_loss(
    preset: str,
    logp: ArrayLike,
    logp_old: ArrayLike,
    advantages: ArrayLike,
    starts: ArrayLike,
    *,
    weights: ArrayLike | None = None,
    entropies: ArrayLike | None = None,
    **options: Any,
) -> tuple[float, Doubles]:
    """The loss to minimise over one mini-batch, and its derivative with respect to ``logp`` [N].

    ``preset`` is a row of :data:`delta_cli.credit.PRESETS`; ``logp`` and ``logp_old`` are [N], ``advantages`` [R],
    ``starts`` int64 [R+1], first 0, last N. ``weights`` [N] multiply each token's term in any preset (None: 1); for
    preset "delta" they come from :func:`token_coefficients`. ``entropies`` [N] select the tokens of "dapo_ft".
    ``options`` are fields of :class:`Method` (``eps_low``, ``dual_clip``, ``gate``, …) and of :class:`MiniBatch`
    (``max_length`` for "dr_grpo", ``kept``, ``kl_coefficient`` …); ``correction`` may be a name in
    :data:`delta_cli.credit.CORRECTIONS`.

    Raises ValueError if shapes do not fit or a preset lacks an input, TypeError for an unknown option.
    """
    batch_names = MiniBatch.__dataclass_fields__.keys()
    extras = {name: options.pop(name) for name in list(options) if name in batch_names}
    for name in ("kept", "reference_logp", "engine_logp"):
        if extras.get(name) is not None:
            extras[name] = np.asarray(extras[name], bool if name == "kept" else np.float64)
    if isinstance(extras.get("correction"), str):
        extras["correction"] = find_correction(extras["correction"])
    advantages, starts = check_layout(advantages, starts)
    batch = MiniBatch(
        np.asarray(logp_old, np.float64),
        advantages,
        starts,
        weights=None if weights is None else np.asarray(weights, np.float64),
        entropies=None if entropies is None else np.asarray(entropies, np.float64),
        **extras,
    )
    logp = np.asarray(logp, np.float64)
    if logp.shape != batch.logp_old.shape:
        raise ValueError(f"logp must be [N] = {list(batch.logp_old.shape)}, not {list(logp.shape)}")
    surrogate = Surrogate(find_method(preset, **options), batch)
    loss, gradient = surrogate(logp, np.arange(len(advantages)))
    return loss * surrogate.scale, gradient * surrogate.scale


def token_mask(method: Method, batch: MiniBatch) -> Bools:
    """Which tokens count, in the loss and in its denominator, [N]."""
    kept = batch.tokens
    if method.credit != "entropy" or not kept.any():
        return kept
    if batch.entropies is None:
        raise ValueError('credit "entropy" needs the entropies of the tokens')
    candidates = batch.entropies[kept]
    k = max(1, int(np.ceil(method.entropy_share * len(candidates))))
    threshold = np.partition(candidates, len(candidates) - k)[len(candidates) - k]
    high: Bools = batch.entropies >= threshold
    return kept & high  # ties with the threshold stay


def averaged_tokens(method: Method, batch: MiniBatch, kept: Bools) -> Bools:
    """The tokens of the mean, [N]: those that ``kept`` selects, or all that are not left out or rejected."""
    return kept if method.entropy_mean == "kept" else batch.tokens


def _shares(method: Method, batch: MiniBatch, kept: Bools) -> Doubles:
    """Each token's share of the objective, [N]: the aggregation."""
    lengths = np.diff(batch.starts)
    rows = np.repeat(np.arange(len(lengths)), lengths)
    responses = batch.responses
    averaged = averaged_tokens(method, batch, kept)
    counts = np.bincount(rows, averaged, len(lengths))  # [R] tokens that the mean runs over

    def total(array: NDArray[Any]) -> float:
        return max(float(array.sum()), 1.0)

    shares = kept.astype(np.float64)
    if method.aggregation == "token_mean":
        return shares / total(averaged)
    if method.aggregation == "micro_batch_mean":
        return shares / total(responses)  # multiplied by responses / tokens of each micro-batch in __call__
    if method.aggregation == "response_mean":
        return shares / np.maximum(counts, 1)[rows] / total(responses)
    if method.aggregation == "response_sum":
        return shares / total(responses)
    if batch.max_length is None or batch.max_length < 1:
        raise ValueError('aggregation "constant" needs max_length, the longest response allowed, in tokens')
    return shares / (total(responses) * batch.max_length)


def _units(method: Method, starts: Ids, shares: Doubles) -> Ids:
    """How many units of the mean each response has, [R]: its tokens that count, or 1 if any does."""
    lengths = np.diff(starts)
    units = np.bincount(np.repeat(np.arange(len(lengths)), lengths), shares > 0, len(lengths)).astype(np.int64)
    return units if method.aggregation in ("token_mean", "micro_batch_mean") else np.minimum(units, 1)


def future_kl_weights(delta: Doubles, advantages: Doubles, lengths: Ids, method: Method) -> tuple[Doubles, Bools]:
    """FIPO's token weights [n], constant during the update, and which responses stay in the loss [r].

    F_t = Σ_{k ≥ t} g^(k−t)·delta_k inside the response, over tokens with ratio at most dual_clip, g =
    2^(−1/half-life); the weight is exp(F) clamped to [1, future_high]. It is 1 if A < 0 and the ratio is above
    future_ratio, because the official code clamps the clamped weight again, to [0.8, 1]. A response with more than one
    dual-clipped token leaves the loss.
    """
    ratio = np.exp(delta)
    limit = np.inf if method.dual_clip is None else method.dual_clip
    rows = np.repeat(np.arange(len(lengths)), lengths)
    future = np.where(delta <= np.log(limit), delta, 0.0)
    # Doubling: after the pass with shift s, each token holds the sum over itself and 2s − 1 after it.
    shift, longest = 1, int(lengths.max(initial=0))
    while shift < longest:
        same = rows[shift:] == rows[:-shift]
        ahead = np.where(same, future[shift:], 0.0) * 2 ** (-shift / method.future_half_life)
        future = np.concatenate([future[:-shift] + ahead, future[-shift:]])
        shift *= 2
    boost = np.exp(np.minimum(future, MAX_LOG_RATIO))  # the sum of a long response may overflow the exponential
    weights = np.clip(boost, 1.0, method.future_high)
    weights = np.where((advantages < 0) & (ratio > method.future_ratio), 1.0, weights)
    floored = np.bincount(rows, dual_clipped(ratio, advantages, method), len(lengths))
    return weights, floored <= 1
