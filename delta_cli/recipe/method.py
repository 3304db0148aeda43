"""The sections of the algorithm: ``[method]``, ``[delta]`` for DelTA's coefficients, and ``[correction]``."""

from __future__ import annotations

from typing import Annotated, Literal, Self, get_args

from pydantic import Field, model_validator

from backends.settings import Section, key
from delta_cli.credit.advantages import AdvantageKind
from delta_cli.credit.coefficients import (
    CentroidKind,
    CoefficientSettings,
    ContrastKind,
    NormaliseKind,
    OneSidedKind,
    ScoreKind,
    WeightingKind,
)
from delta_cli.credit.corrections import CORRECTIONS, Correction, RejectKind, WeightBound, WeightKind, correction
from delta_cli.credit.entropy import CovarianceKind
from delta_cli.credit.methods import (
    PRESETS,
    AggregationKind,
    CreditKind,
    GateKind,
    Method,
    method,
)
from delta_cli.credit.weight_functions import FUNCTION_IN_FILE, NormaliseWeights

Preset = Literal[
    "reinforce",
    "grpo",
    "dr_grpo",
    "rloo",
    "dapo",
    "dapo_ft",
    "sapo",
    "fipo",
    "gspo",
    "cispo",
    "clip_cov",
    "kl_cov",
    "delta",
    "delta_group",
    "delta_light",
]
assert set(get_args(Preset)) == set(PRESETS)
CorrectionPreset = Literal[
    "none",
    "token_truncate",
    "token_mask",
    "sequence_truncate",
    "sequence_mask",
    "decoupled_token_is",
    "decoupled_seq_is",
    "decoupled_token_icepop",
    "decoupled_seq_is_rs",
    "decoupled_geo_rs",
    "decoupled_geo_rs_seq_tis",
    "decoupled_geo_rs_token_tis",
    "decoupled_k3_rs",
    "decoupled_k3_rs_seq_tis",
    "decoupled_k3_rs_token_tis",
    "bypass_ppo_clip",
    "bypass_ppo_clip_geo_rs",
    "bypass_ppo_clip_k3_rs",
]
assert set(get_args(CorrectionPreset)) == set(CORRECTIONS)


_NOT_OF_METHOD = ("preset", "blame", "normalise", "weight_negative", "hint", "hidden_residuals")
_NEEDS = {"rlsd": "hint", "cort": "hint", "arca": "hidden_residuals"}


class MethodSection(Section):
    """The algorithm: a preset and changes to it. Absent keys take the preset's values."""

    preset: Preset = key("delta", "named method; the table of presets lists the settings of each")
    advantage: AdvantageKind | None = key(None, "how rewards become advantages")
    credit: CreditKind | Annotated[str, Field(pattern=rf"^{FUNCTION_IN_FILE.pattern}$")] | None = key(
        None, 'what decides the weight of each token; "FILE.py:FUNCTION" is a function of your own'
    )
    normalise: NormaliseWeights | None = key(
        None,
        "scale the weights of any credit. batch: to mean 1; side: to mean 1 on each side (A > 0, A < 0); budget: each "
        "side keeps the sum of weight · |A| · (1 − p) that weights of 1 have; absent: as the credit gives them",
    )
    weight_negative: float = key(1.0, "factor on the weights of responses with A < 0, after normalise", ge=0, le=100)
    blame: Literal["none", "equations"] = key(
        "none",
        "equations: if the advantage A < 0, only the tokens of the first false equation in the response are penalised",
    )
    hint: str | None = key(
        None,
        "the question in a second forward pass, for credits that compare log-probabilities with and without a hint; "
        "{question}, {answer} and the problem's columns are filled in",
    )
    hidden_residuals: bool = key(
        False,
        "two more forward passes: how far training has moved each token's final hidden state, for credit arca",
    )
    gate: GateKind | None = key(None, "how the importance ratio is bounded")
    aggregation: AggregationKind | None = key(None, "how token losses become one loss")
    eps_low: float | None = key(None, "clip: lower bound of the ratio is 1 − eps_low", ge=0, lt=1)
    eps_high: float | None = key(None, "clip: upper bound of the ratio is 1 + eps_high", ge=0)
    dual_clip: float | None = key(None, "upper bound of the ratio if A < 0", gt=1)
    tau_positive: float | None = key(None, "soft: temperature if A > 0", gt=0)
    tau_negative: float | None = key(None, "soft: temperature if A ≤ 0", gt=0)
    bound: float | None = key(None, "stop_gradient: upper bound of the ratio", gt=0)
    bound_low: float | None = key(None, "stop_gradient: lower bound of the ratio", ge=0)
    entropy_share: float | None = key(None, "entropy: share of tokens kept", gt=0, le=1)
    entropy_mean: Literal["kept", "all"] | None = key(None, "entropy: mean over the kept tokens, or over all tokens")
    future_half_life: float | None = key(None, "future_kl: half-life of a later token's influence", "tokens", gt=0)
    future_high: float | None = key(None, "future_kl: largest weight", ge=1)
    future_ratio: float | None = key(None, "future_kl: the weight is 1 above this ratio if A < 0", gt=1)
    covariance: CovarianceKind | None = key(
        None,
        "clip: no gradient for a few tokens whose advantage and log-probability vary together; kl: a penalty on those",
    )
    covariance_share: float | None = key(None, "covariance: share of tokens chosen, at least one", gt=0, le=1)
    covariance_low: float | None = key(None, "covariance clip: only tokens with a covariance above this")
    covariance_high: float | None = key(None, "covariance clip: only tokens with a covariance below this")
    covariance_kl: float | None = key(None, "covariance kl: weight of the penalty |logp − logp_old|", ge=0)

    @property
    def changes_weights(self) -> bool:
        """Whether weights are scaled after the credit."""
        return self.normalise is not None or self.weight_negative != 1

    def resolve(self) -> Method:
        """The preset with the changes."""
        given = {name: getattr(self, name) for name in self.model_fields_set.difference(_NOT_OF_METHOD)}
        changes = {name: value for name, value in given.items() if value is not None}
        return method(self.preset, **changes)

    @model_validator(mode="after")
    def _check(self) -> Self:
        needed = _NEEDS.get(str(self.credit))
        if needed and not getattr(self, needed):
            raise ValueError(f'method.credit = "{self.credit}" needs method.{needed}')
        return self


class CorrectionSection(Section):
    """What makes up for the gap between the sampler's log-probabilities and the trainer's; see docs/off_policy.md."""

    preset: CorrectionPreset = key(
        "none", "named correction of TRL or verl; with vLLM decoupled_token_is. Absent keys take its values"
    )
    weight: WeightKind | None = key(
        None, "ratio trainer / engine that weighs a token: its own, the product or geometric mean of its response"
    )
    bound: WeightBound | None = key(None, "weights outside [low, high]: truncate caps them, mask sets them to 0")
    low: float | None = key(None, "lower bound of the weight", ge=0)
    high: float | None = key(None, "upper bound of the weight", gt=0)
    reject: RejectKind | None = key(
        None,
        "divergence that removes tokens or responses from the loss and its denominators: estimate k1, k2 or k3 of a "
        "token, or its sum, mean or maximum over a response",
    )
    reject_low: float | None = key(None, "k1: smallest ratio engine / trainer that is kept", gt=0)
    reject_high: float | None = key(None, "k1: largest ratio that is kept; k2 and k3: largest divergence", gt=0)
    bypass: bool | None = key(
        None, "the gate's ratio compares with the engine's log-probabilities, not with the trainer's old ones"
    )

    def resolve(self) -> Correction:
        """The preset with the changes."""
        changes = {name: value for name, value in self if name != "preset" and value is not None}
        return correction(self.preset, **changes)

    @model_validator(mode="after")
    def _check(self) -> Self:
        found = self.resolve()
        for kind, bounds in (("weight", ("bound", "low", "high")), ("reject", ("reject_low", "reject_high"))):
            idle = next((name for name in bounds if getattr(self, name) is not None), None)
            if getattr(found, kind) == "none" and idle:
                raise ValueError(f"{idle} has no effect without {kind}; set correction.{kind} or a correction.preset")
        return self


class DeltaSection(Section):
    """DelTA's coefficients; they apply if the method's credit is delta."""

    proxy: Literal["output_row", "hidden_topk", "hidden_exact"] = key(
        "output_row", "token features: output_row, or the hidden-state gradient from the top-k tokens or from all"
    )
    topk: int = key(20, "hidden_topk: how many of the likeliest tokens", "tokens", ge=1, le=4096)
    scope: Literal["batch", "group"] = key("batch", "centroids of the whole batch, or of each group")
    refinements: int = key(1, "times the centroids are refined", ge=0, le=100)
    lambda_min: float = key(0.8, "smallest coefficient", ge=0)
    lambda_max: float = key(1.2, "largest coefficient", gt=0)
    temperature: float | tuple[float, float] | Literal["lagged", "first"] = key(
        "lagged",
        "temperature of the score. lagged: from the batch's margins; first: that of the first step, kept for the run; "
        "or a number, or [A > 0, A < 0]",
    )
    score: ScoreKind = key("sigmoid", "how a margin becomes a score; hard and random are ablations")
    contrast: ContrastKind = key("between", "which centroids a margin compares; within is an ablation")
    weighting: WeightingKind = key("range", "how a score becomes a coefficient; all but range are ablations")
    share: float = key(0.5, "top, bottom, random: share of tokens that are trained on", gt=0, le=1)
    normalise: NormaliseKind = key("sum", "sum: scale coefficients to mean 1; count: leave them as they are")
    centroid: CentroidKind = key("mean", "how a side's centroid is taken; the median is less sensitive to outliers")
    one_sided: OneSidedKind = key(
        "none", "if all advantages have one sign. none: weights 1; zero: contrast with a centroid at zero"
    )
    shards: int = key(1, "split the batch into this many parts, each with its own centroids and mean", ge=1, le=1024)

    def resolve(self) -> CoefficientSettings:
        """The settings of the credit core; temperature "first" is lagged in the first step."""
        values = self.model_dump(exclude={"proxy", "topk", "scope"})
        return CoefficientSettings(**values | ({"temperature": "lagged"} if self.temperature == "first" else {}))

    @model_validator(mode="after")
    def _check(self) -> Self:
        self.resolve()
        if self.shards > 1 and self.scope == "group":
            raise ValueError("delta.shards and delta.scope = group exclude each other; remove one of them")
        if self.temperature == "first" and (self.shards > 1 or self.scope == "group"):
            raise ValueError(
                "delta.temperature = first needs one pair of centroids; set delta.shards = 1 and delta.scope = batch"
            )
        return self
