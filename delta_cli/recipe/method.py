"""The algorithm's keys: ``[method]`` and DelTA's own ``[delta]``."""

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
    """The algorithm: a preset, and what is changed in it. Absent keys are the preset's."""

    preset: Preset = key("delta", "row of the table of methods")
    advantage: AdvantageKind | None = key(None, "how rewards become advantages")
    credit: CreditKind | None = key(None, "where token weights come from")
    blame: Literal["none", "equations"] = key(
        "none", "equations: where A < 0 the tokens of the first written equation that is false carry all of it"
    )
    gate: GateKind | None = key(None, "what bounds the ratio")
    aggregation: AggregationKind | None = key(None, "how token terms become one loss")
    eps_low: float | None = key(None, "clip: ratio at least 1 − eps_low", ge=0, lt=1)
    eps_high: float | None = key(None, "clip: ratio at most 1 + eps_high", ge=0)
    dual_clip: float | None = key(None, "where A < 0, bound of the ratio", gt=1)
    tau_positive: float | None = key(None, "soft: temperature where A > 0", gt=0)
    tau_negative: float | None = key(None, "soft: temperature elsewhere", gt=0)
    bound: float | None = key(None, "stop_gradient: the ratio's bound", gt=0)
    bound_low: float | None = key(None, "stop_gradient: the ratio's lower bound", ge=0)
    entropy_share: float | None = key(None, "entropy: share of tokens kept", gt=0, le=1)
    entropy_mean: Literal["kept", "all"] | None = key(None, "entropy: the mean runs over the tokens kept, or over all")
    future_half_life: float | None = key(None, "future_kl: half-life", "tokens", gt=0)
    future_high: float | None = key(None, "future_kl: largest weight", ge=1)
    future_ratio: float | None = key(None, "future_kl: above this ratio the weight is 1, where A < 0", gt=1)

    def resolve(self) -> Method:
        """The preset's row with the changes."""
        changes = {name: value for name, value in self if name not in ("preset", "blame") and value is not None}
        return method(self.preset, **changes)


class Delta(Section):
    """DelTA's coefficients; read when the method's credit is delta."""

    proxy: Literal["output_row", "hidden_topk", "hidden_exact"] = key("output_row", "token-gradient proxy")
    topk: int = key(20, "hidden_topk: how many tokens", "tokens", ge=1, le=4096)
    scope: Literal["batch", "group"] = key("batch", "centroids over the batch, or inside each prompt's group")
    refinements: int = key(1, "passes that refine the centroids", ge=0, le=100)
    lambda_min: float = key(0.8, "least coefficient", ge=0)
    lambda_max: float = key(1.2, "largest coefficient", gt=0)
    temperature: float | tuple[float, float] | Literal["lagged", "first"] = key(
        "lagged",
        "lagged: from the margins; first: those of the first step, from then on; or a fixed number, or [A > 0, A < 0]",
    )
    score: ScoreKind = key("sigmoid", "score of a margin; hard and random are ablations")
    contrast: ContrastKind = key("between", "margins between the sides; within a side is an ablation")
    weighting: WeightingKind = key("range", "from score to coefficient; the others are ablations")
    share: float = key(0.5, "top, bottom, random: share of tokens that train", gt=0, le=1)
    normalise: NormaliseKind = key("sum", "coefficients with mean 1; count leaves them as they are")
    centroid: CentroidKind = key("mean", "of a side; the median heeds far tokens less")
    one_sided: OneSidedKind = key("none", "batches without a side: weights 1, or a contrast to a centroid at zero")
    shards: int = key(1, "parts of the batch with centroids and a mean of their own", ge=1, le=1024)

    def resolve(self) -> CoefficientSettings:
        """The core's settings; of temperature "first" those of the first step."""
        values = self.model_dump(exclude={"proxy", "topk", "scope"})
        return CoefficientSettings(**values | ({"temperature": "lagged"} if self.temperature == "first" else {}))

    @model_validator(mode="after")
    def _check(self) -> Self:
        self.resolve()
        if self.shards > 1 and self.scope == "group":
            raise ValueError("delta.shards and delta.scope = group exclude each other; set one of them")
        if self.temperature == "first" and (self.shards > 1 or self.scope == "group"):
            raise ValueError("delta.temperature = first needs one pair of centroids: no shards, scope = batch")
        return self
