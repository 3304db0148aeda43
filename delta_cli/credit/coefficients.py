"""DelTA token coefficients: how typical a token's gradient is of its own side (method, section 2).

Two reductions over the features do all the heavy work: a weighted sum gives the centroids, a
projection on their difference gives the margins. Everything else is vectors of N.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Literal, Protocol, get_args

import numpy as np
from numpy.typing import ArrayLike

from delta_cli.credit.advantages import check_layout
from delta_cli.credit.checks import check_choices
from delta_cli.credit.distributed import HeldFeatures, Ranks, gather_batch
from delta_cli.credit.features import FeatureReductions

if TYPE_CHECKING:  # the core itself needs nothing but numpy
    from backends.arrays import Bools, Doubles, Ids


ScoreKind = Literal["sigmoid", "hard", "random"]
ContrastKind = Literal["between", "within"]
WeightingKind = Literal["range", "alpha", "top", "bottom", "random"]
NormaliseKind = Literal["sum", "count"]
CentroidKind = Literal["mean", "median"]
OneSidedKind = Literal["none", "zero"]

_CHOICES = {
    "score": get_args(ScoreKind),
    "contrast": get_args(ContrastKind),
    "weighting": get_args(WeightingKind),
    "normalise": get_args(NormaliseKind),
    "centroid": get_args(CentroidKind),
    "one_sided": get_args(OneSidedKind),
}

_WEISZFELD = 16  # steps towards the median: its margins to 0.2 % of their deviation
_FLOOR = 1e-8  # of the centroids' denominators and of the margins' variance


class SliceableFeatures(FeatureReductions, Protocol):
    """What ``groups`` and ``contrast = "within"`` ask of features beyond the two reductions."""

    def squared_norms(self) -> Doubles:
        """‖v_t‖² for every token, [N]."""

    def slice(self, start: int, stop: int) -> SliceableFeatures:
        """The features of tokens start:stop."""


@dataclass(frozen=True)
class CoefficientSettings:
    """The choices of DelTA; the defaults are the paper's, the other values its ablations.

    ``temperature``: "lagged" (gamma from the previous pass's margins), or fixed: a number, or a pair
    for the positive and the negative side;
    ``score``: sigmoid(D/gamma), "hard" 1[D > 0], or "random" uniform numbers;
    ``contrast``: "between" the sides, or "within", D = −‖v − mu_own‖²;
    ``weighting``: "range" lambda_min + (lambda_max − lambda_min)·alpha, "alpha" itself, or 1 on the
    "top", "bottom" or a "random" ``share`` of tokens by lambda and 0 elsewhere;
    ``normalise``: weights that sum to N ("sum"), or lambda as it is ("count");
    ``centroid``: the weighted mean, which minimises Σ A·‖v − mu‖², or the weighted geometric "median",
    which minimises Σ A·‖v − mu‖ and heeds far tokens less (sixteen of Weiszfeld's steps from the mean);
    ``one_sided``: no contrast where a side has no tokens ("none"), or against a centroid at zero, as
    the public code has it ("zero");
    ``shards``: parts of the batch's responses, each a batch of its own with centroids, temperatures and
    a mean of its own, as on the data-parallel ranks of the public code.
    """

    refinements: int = 1
    lambda_min: float = 0.8
    lambda_max: float = 1.2
    temperature: float | tuple[float, float] | Literal["lagged"] = "lagged"
    score: ScoreKind = "sigmoid"
    contrast: ContrastKind = "between"
    weighting: WeightingKind = "range"
    share: float = 0.5
    normalise: NormaliseKind = "sum"
    centroid: CentroidKind = "mean"
    one_sided: OneSidedKind = "none"
    shards: int = 1

    def __post_init__(self) -> None:
        check_choices(self, _CHOICES)
        if self.refinements < 0:
            raise ValueError(f"refinements must be 0 or more, not {self.refinements}")
        if not 0 <= self.lambda_min <= self.lambda_max < np.inf or self.lambda_max == 0:
            raise ValueError(
                f"the range needs 0 <= lambda_min <= lambda_max < inf and lambda_max > 0, not "
                f"[{self.lambda_min}, {self.lambda_max}]"
            )
        fixed = self.fixed_temperatures
        if fixed is not None and not (len(fixed) == 2 and all(0 < gamma < np.inf for gamma in fixed)):
            raise ValueError(f'temperature must be "lagged", a positive number or two, not {self.temperature}')
        if self.shards < 1:
            raise ValueError(f"shards must be 1 or more, not {self.shards}")
        if not 0 < self.share <= 1:
            raise ValueError(f"share must lie in (0, 1], not {self.share}")

    @property
    def fixed_temperatures(self) -> tuple[float, ...] | None:
        """Gamma of the positive and of the negative side, where they are fixed."""
        if isinstance(self.temperature, tuple):
            return self.temperature
        if isinstance(self.temperature, str):
            return None if self.temperature == "lagged" else ()
        return (float(self.temperature),) * 2


@dataclass(frozen=True)
class TokenCoefficients:
    """Coefficients of N tokens; ``degenerate`` says why there was no contrast, or is None.

    ``weights`` have mean 1, unless ``normalise`` was "count"; ``alpha`` is the final score in [0, 1], 0
    where the advantage is 0; ``margins`` are D under the final centroids, positive where a token is
    nearer to its own side's centroid, 0 where the advantage is 0. ``temperatures`` are the gammas of the
    final scores, of the positive and the negative side; NaN where there is no one pair of them.
    """

    weights: Doubles  # [N]
    alpha: Doubles  # [N]
    margins: Doubles  # [N]
    degenerate: str | None = None
    temperatures: tuple[float, float] = (np.nan, np.nan)

    def select(self, index: Ids | Bools) -> TokenCoefficients:
        """The coefficients of some tokens."""
        return replace(self, weights=self.weights[index], alpha=self.alpha[index], margins=self.margins[index])


def token_coefficients(
    features: FeatureReductions,
    advantages: ArrayLike,
    starts: ArrayLike,
    *,
    refinements: int = 1,
    lambda_min: float = 0.8,
    lambda_max: float = 1.2,
    groups: ArrayLike | None = None,
    rng: np.random.Generator | None = None,
    ranks: Ranks | None = None,
    rows: ArrayLike | None = None,
    **ablation: object,
) -> TokenCoefficients:
    """The DelTA weight of every response token of one rollout batch (method, section 2.2 to 2.9).

    ``features`` hold the proxies v of N tokens (any object with ``weighted_sum`` and ``project``);
    ``advantages`` [R] are those of the responses; ``starts`` int64 [R+1], first 0, last N, marks
    where each response begins. ``groups`` [R], when given, contrasts the sides inside each run of
    equal numbers instead of over the batch. ``rng`` feeds the random ablations. ``ablation`` takes the
    other fields of :class:`CoefficientSettings`.

    With ``ranks``, features, advantages, starts and groups are those of this rank's part of the batch, and so is
    what is returned; ``rows`` [R] then number its responses, ascending, among those of all ranks, so that groups
    are runs of equal numbers in that order. The result does not depend on who holds which responses.

    Weights are 1 everywhere, and ``degenerate`` says why, where one side has no tokens. Raises
    ValueError where shapes do not fit, an advantage is not finite or a setting is out of range.
    """
    settings = CoefficientSettings(refinements, lambda_min, lambda_max, **ablation)  # type: ignore[arg-type]
    advantages, starts = check_layout(advantages, starts)
    rng = rng or np.random.default_rng(0)
    group_ids = None if groups is None else np.asarray(groups)
    if ranks is None or ranks.size == 1:
        held = HeldFeatures(features, np.arange(starts[-1]), int(starts[-1]))
        return batch_coefficients(held, advantages, starts, settings, group_ids, rng)
    batch = gather_batch(advantages, starts, group_ids, rows, ranks)
    held = HeldFeatures(features, batch.index, int(batch.starts[-1]), ranks)
    found = batch_coefficients(held, batch.advantages, batch.starts, settings, batch.groups, rng)
    return found.select(batch.index)


def batch_coefficients(
    held: HeldFeatures,
    advantages: Doubles,
    starts: Ids,
    settings: CoefficientSettings,
    groups: Ids | None,
    rng: np.random.Generator,
) -> TokenCoefficients:
    """The coefficients [N] of a batch whose advantages [R], starts [R+1] and groups [R] every rank knows.

    Each rank holds the features of some tokens; together they hold every token with an advantage. All ranks return
    the same. Raises ValueError for settings that exclude each other.
    """
    per_token = np.repeat(advantages, np.diff(starts))
    if settings.shards > 1:
        if groups is not None:
            raise ValueError("centroids are either those of groups or those of shards; set one of them")
        parts = np.arange(len(advantages)) * settings.shards // max(len(advantages), 1)  # equal runs in order
        return _contrast_shards(held, per_token, np.repeat(parts, np.diff(starts)), settings, rng)
    if groups is None:
        raw = _contrast(held, per_token, settings, rng).over_all_ranks(held, per_token, settings)
    else:
        raw = _contrast_groups(held, per_token, starts, groups, settings, rng)
    if raw.degenerate:
        return raw
    return replace(raw, weights=_weigh(raw, settings, rng))


@dataclass(frozen=True)
class _Contrast:
    """The scores of the n tokens that this rank holds, under one pair of centroids; or why there is no contrast."""

    alpha: Doubles  # [n]
    margins: Doubles  # [n]
    temperatures: tuple[float, float] = (np.nan, np.nan)
    degenerate: str | None = None

    def over_all_ranks(
        self, held: HeldFeatures, advantages: Doubles, settings: CoefficientSettings
    ) -> TokenCoefficients:
        """The scores of all N tokens, with lambda, not yet normalised, as ``weights``."""
        if self.degenerate:
            zeros = np.zeros_like(advantages)
            return TokenCoefficients(np.ones_like(advantages), zeros, zeros, self.degenerate)
        if held.alone:
            alpha, margins = held.scatter(self.alpha), held.scatter(self.margins)
        else:
            alpha, margins = self._of_all_tokens(held, advantages, settings)
        span = settings.lambda_max - settings.lambda_min
        return TokenCoefficients(settings.lambda_min + span * alpha, alpha, margins, temperatures=self.temperatures)

    def _of_all_tokens(
        self, held: HeldFeatures, advantages: Doubles, settings: CoefficientSettings
    ) -> tuple[Doubles, Doubles]:
        """Scores and margins [N]. Only tokens with an advantage cross; their scores follow from the margins."""
        alpha, margins = np.zeros((2, held.count))
        places = np.flatnonzero(advantages)
        found = held.collect(self.margins, places)
        margins[places] = found
        if settings.score == "random" or np.isnan(self.temperatures).any():
            alpha[places] = held.collect(self.alpha, places)
        else:
            alpha[places] = _score_margins(found, np.where(advantages[places] > 0, *self.temperatures), settings)
        return alpha, margins


def _contrast(
    held: HeldFeatures, advantages: Doubles, settings: CoefficientSettings, rng: np.random.Generator
) -> _Contrast:
    """Compare this rank's tokens with the centroids of the two sides; ``advantages`` [N] are those of all tokens."""
    every_side = np.stack([np.maximum(advantages, 0), np.maximum(-advantages, 0)])  # [2, N] masses
    counts = (every_side > 0).sum(axis=1).astype(np.float64)
    reason = _degenerate(counts)
    if reason and not (settings.one_sided == "zero" and counts.any()):
        empty = np.zeros(len(held.index))
        return _Contrast(empty, empty, degenerate=reason)

    sides = every_side.take(held.index, axis=1)  # [2, n], in C order: sums add in the order of tokens
    members = sides > 0
    centroids = _centroids(held, sides, every_side.sum(axis=1), settings)
    margins = _margins(held.features, centroids, members, settings)
    gamma = _temperatures(held, margins, members, counts, settings)
    for _ in range(settings.refinements):
        alpha = _scores(held, margins, gamma, members, settings, rng)
        gamma = _temperatures(held, margins, members, counts, settings)  # lags the centroids by a pass
        masses = sides * alpha
        centroids = _centroids(held, masses, held.totals(masses), settings)
        margins = _margins(held.features, centroids, members, settings)
    alpha = _scores(held, margins, gamma, members, settings, rng)
    return _Contrast(alpha, margins, (float(gamma[0]), float(gamma[1])))


def _degenerate(counts: Doubles) -> str | None:
    positive, negative = counts
    if positive and negative:
        return None
    if positive:
        return "no response has a negative advantage"
    return "no response has a positive advantage" if negative else "every advantage is zero"


def _centroids(held: HeldFeatures, masses: Doubles, totals: Doubles, settings: CoefficientSettings) -> Doubles:
    """The centroids of the two sides, for masses [2, n] of this rank's tokens that sum to ``totals`` [2] over all."""
    centroids = _means(held, masses, totals)
    if settings.centroid == "median":
        norms = held.features.squared_norms()  # type: ignore[attr-defined]
        for _ in range(_WEISZFELD):
            squares = np.stack([norms - 2 * held.features.project(mu) + np.vdot(mu, mu) for mu in centroids])  # [2, n]
            weights = masses / np.sqrt(np.maximum(squares, _FLOOR))
            centroids = _means(held, weights, held.totals(weights))
    return centroids


def _means(held: HeldFeatures, masses: Doubles, totals: Doubles) -> Doubles:
    directions = held.features.weighted_sum(masses / np.maximum(totals, _FLOOR)[:, None])  # [2, *direction]
    return held.sum(np.asarray(directions, np.float64))


def _margins(features: FeatureReductions, centroids: Doubles, members: Bools, settings: CoefficientSettings) -> Doubles:
    positive, negative = centroids
    if settings.contrast == "within":
        norms = features.squared_norms()  # type: ignore[attr-defined]
        own = [-(norms - 2 * features.project(mu) + np.vdot(mu, mu)) for mu in (positive, negative)]
        return np.select(list(members), own, 0.0)
    # 2(v − mid)·gap rather than a difference of two squared distances: the same number, with
    # rounding that does not grow with the features' common offset.
    gap, mid = positive - negative, (positive + negative) / 2
    margins = 2 * (features.project(gap) - np.vdot(mid, gap))
    return np.select(list(members), [margins, -margins], 0.0)


def _temperatures(
    held: HeldFeatures, margins: Doubles, members: Bools, counts: Doubles, settings: CoefficientSettings
) -> Doubles:
    """The standard deviation of each side's margins over all ranks, [2]."""
    if (fixed := settings.fixed_temperatures) is not None:
        return np.array(fixed)
    counts = np.maximum(counts, 1)  # the gamma of a side without tokens is never used
    means = held.sum(np.array([margins[side].sum() for side in members])) / counts
    squares = [np.square(margins[side] - mean).sum() for side, mean in zip(members, means, strict=True)]
    return np.sqrt(np.maximum(held.sum(np.array(squares)) / counts, _FLOOR))


def _scores(
    held: HeldFeatures,
    margins: Doubles,
    gamma: Doubles,
    members: Bools,
    settings: CoefficientSettings,
    rng: np.random.Generator,
) -> Doubles:
    if settings.score == "random":
        alpha = rng.random(held.count)[held.index]  # the same numbers on any number of ranks
    else:
        alpha = _score_margins(margins, np.select(list(members), list(gamma), 1.0), settings)
    return np.where(members.any(axis=0), alpha, 0.0)


def _score_margins(margins: Doubles, gamma: Doubles, settings: CoefficientSettings) -> Doubles:
    """The scores of margins [n] of tokens of either side, each with its side's temperature [n]."""
    if settings.score == "hard":
        return (margins > 0).astype(np.float64)
    found: Doubles = 0.5 + 0.5 * np.tanh(margins / (2 * gamma))  # sigmoid
    return found


def _contrast_groups(
    held: HeldFeatures,
    advantages: Doubles,
    starts: Ids,
    groups: Ids,
    settings: CoefficientSettings,
    rng: np.random.Generator,
) -> TokenCoefficients:
    """One contrast per run of equal ``groups``; tokens of a group without contrast get lambda 1 (A = 0: lambda_min)."""
    if groups.shape != (len(starts) - 1,):
        raise ValueError(f"groups must be [R] = [{len(starts) - 1}], not {list(groups.shape)}")
    edges = starts[[0, *np.flatnonzero(np.diff(groups)) + 1, len(groups)]]
    neutral = np.zeros(len(advantages), dtype=bool)
    parts = []
    for first, last in pairwise(edges):
        part = _contrast(held.slice(first, last), advantages[first:last], settings, rng)
        neutral[first:last] = part.degenerate is not None
        parts.append(part)
    if neutral.all():
        ones, empty = np.ones_like(advantages), np.zeros_like(advantages)
        return TokenCoefficients(ones, empty, empty, "no group has advantages of both signs")
    alpha, margins = (np.concatenate([getattr(part, name) for part in parts]) for name in ("alpha", "margins"))
    found = _Contrast(alpha, margins).over_all_ranks(held, advantages, settings)
    return replace(found, weights=np.where(neutral & (advantages != 0), 1.0, found.weights))


def _contrast_shards(
    held: HeldFeatures,
    advantages: Doubles,
    shards: Ids,
    settings: CoefficientSettings,
    rng: np.random.Generator,
) -> TokenCoefficients:
    """Every shard as a batch of its own; ``shards`` [N]."""
    weights, alpha, margins = np.ones_like(advantages), np.zeros_like(advantages), np.zeros_like(advantages)
    reasons = []
    for shard in range(settings.shards):
        inside = shards == shard
        own = np.where(inside, advantages, 0.0)
        part = _contrast(held, own, settings, rng).over_all_ranks(held, own, settings)
        reasons.append(part.degenerate)
        if part.degenerate is None:
            weights[inside] = _weigh(part.select(inside), settings, rng)
            alpha[inside], margins[inside] = part.alpha[inside], part.margins[inside]
    return TokenCoefficients(weights, alpha, margins, "no shard has advantages of both signs" if all(reasons) else None)


def _weigh(raw: TokenCoefficients, settings: CoefficientSettings, rng: np.random.Generator) -> Doubles:
    """Weights from lambda: the weighting chosen, then self-normalised to a mean of 1."""
    weights = raw.alpha if settings.weighting == "alpha" else raw.weights
    if settings.weighting in ("top", "bottom", "random"):
        order = {"top": -weights, "bottom": weights, "random": rng.random(len(weights))}[settings.weighting]
        kept = np.argsort(order, kind="stable")[: int(np.ceil(settings.share * len(weights)))]
        weights = np.zeros_like(weights)
        weights[kept] = 1.0
    if settings.normalise == "count":
        return weights
    return weights * (len(weights) / max(float(weights.sum()), _FLOOR))
