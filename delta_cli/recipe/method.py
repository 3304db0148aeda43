"""The sections of the algorithm: ``[method]``, and ``[delta]`` for DelTA's coefficients."""

from __future__ import annotations

from typing import Literal, Self, get_args

from pydantic import model_validator

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
from delta_cli.credit.methods import (
    PRESETS,
    AggregationKind,
    CreditKind,
    GateKind,
    Method,
    method,
)

Preset = Literal[
    "reinforce", "grpo", "dr_grpo", "rloo", "dapo", "dapo_ft", "sapo", "fipo", "gspo", "cispo", "delta", "delta_group"
]
assert set(get_args(Preset)) == set(PRESETS)


class MethodSection(Section):
    """The algorithm: a preset and changes to it. Absent keys take the preset's values."""

    preset: Preset = key("delta", "named method; the table of presets lists what each stands for")
    advantage: AdvantageKind | None = key(None, "how rewards become advantages")
    credit: CreditKind | None = key(None, "what decides the weight of each token")
    blame: Literal["none", "equations"] = key(
        "none",
        "equations: if the advantage A < 0, only the tokens of the first false equation in the response are penalised",
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

    def resolve(self) -> Method:
        """The preset with the changes."""
        changes = {name: value for name, value in self if name not in ("preset", "blame") and value is not None}
        return method(self.preset, **changes)


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
