"""Every method as four choices: advantage × credit × gate × aggregation (method, section 4)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from delta_cli.credit.advantages import ADVANTAGES, AdvantageKind
from delta_cli.credit.checks import check_choices, check_positive
from delta_cli.credit.entropy import CovarianceKind
from delta_cli.credit.weight_functions import FUNCTION_IN_FILE, WEIGHT_FUNCTIONS

CreditKind = Literal[
    "uniform",
    "delta",
    "entropy",
    "future_kl",
    "surprisal",
    "entropy_weight",
    "random",
    "position",
    "eapo",
    "rlsd",
    "cort",
    "arca",
]
GateKind = Literal["none", "clip", "soft", "sequence_clip", "stop_gradient"]
AggregationKind = Literal["token_mean", "micro_batch_mean", "response_mean", "response_sum", "constant"]

_CHOICES = {
    "advantage": ADVANTAGES,
    "gate": get_args(GateKind),
    "aggregation": get_args(AggregationKind),
    "entropy_mean": ("kept", "all"),
    "covariance": get_args(CovarianceKind),
}


@dataclass(frozen=True)
class Method:
    """A row of the table of presets: the four choices and the numbers they read.

    ``credit`` says where a token's weight comes from: "uniform" is 1, "delta" the coefficients of section 2, "entropy"
    1 on the top ``entropy_share`` of tokens by entropy while the others are left out, "future_kl" the future
    log-ratios. The rows of ``WEIGHT_FUNCTIONS`` and "FILE.py:FUNCTION" are weight functions
    (credit/weight_functions.py).

    ``covariance`` acts on a few tokens whose advantage and log-probability vary together the most, because they lower
    the entropy: "clip" takes their gradient away, "kl" adds a penalty on their change (arXiv 2505.22617).

    ``aggregation`` "micro_batch_mean" is what verl computes with packed micro-batches: the token mean of each,
    weighted by its share of the responses, so that the loss depends on how they were packed.
    """

    advantage: AdvantageKind
    credit: str  # a CreditKind, or FILE.py:FUNCTION
    gate: GateKind
    aggregation: AggregationKind
    eps_low: float = 0.2  # clip: the ratio's range is [1 − eps_low, 1 + eps_high]
    eps_high: float = 0.2
    dual_clip: float | None = None  # where A < 0, the objective is at least dual_clip · A
    tau_positive: float = 1.0  # soft: temperature where A > 0
    tau_negative: float = 1.05  # soft: elsewhere
    bound: float = 5.0  # stop_gradient: the ratio's upper bound
    bound_low: float = 0.0  # stop_gradient: the ratio's lower bound
    entropy_share: float = 0.2
    entropy_mean: Literal["kept", "all"] = "kept"  # entropy: the tokens in the mean; TRL takes all
    future_half_life: float = 32.0  # future_kl: tokens after which a log-ratio counts half
    future_high: float = 1.2  # future_kl: the weight's range is [1, future_high] …
    future_ratio: float = 10.0  # … but it is 1 where A < 0 and r > future_ratio
    covariance: CovarianceKind = "none"  # what happens to tokens of large covariance of advantage and log-probability
    covariance_share: float = 2e-4  # of the tokens that are chosen, at least one
    covariance_low: float = 1.0  # clip: only tokens with a covariance above this …
    covariance_high: float = 5.0  # … and below this
    covariance_kl: float = 1.0  # kl: weight of the penalty |logp − logp_old|

    @property
    def weight_function(self) -> str | None:
        """The credit if a weight function gives it."""
        in_file = FUNCTION_IN_FILE.fullmatch(self.credit)
        return self.credit if in_file or self.credit in WEIGHT_FUNCTIONS else None

    def __post_init__(self) -> None:
        check_choices(self, _CHOICES)
        if not FUNCTION_IN_FILE.fullmatch(self.credit):
            check_choices(self, {"credit": get_args(CreditKind)})
        if not 0 <= self.eps_low < 1 or not self.eps_high >= 0:
            raise ValueError(f"clip needs 0 <= eps_low < 1 and eps_high >= 0, not {self.eps_low} and {self.eps_high}")
        if self.dual_clip is not None and not self.dual_clip > 1:
            raise ValueError(f"dual_clip must be above 1, not {self.dual_clip}")
        if not 0 < self.entropy_share <= 1:
            raise ValueError(f"entropy_share must lie in (0, 1], not {self.entropy_share}")
        check_positive(self, "tau_positive", "tau_negative", "bound", "future_half_life", "future_ratio")
        if not 0 <= self.bound_low <= self.bound:
            raise ValueError(f"bound_low must lie between 0 and bound = {self.bound}, not {self.bound_low}")
        if not 0 < self.covariance_share <= 1:
            raise ValueError(f"covariance_share must lie in (0, 1], not {self.covariance_share}")
        if not self.covariance_low < self.covariance_high or not self.covariance_kl >= 0:
            raise ValueError(
                "a covariance needs covariance_low < covariance_high and covariance_kl >= 0, not "
                f"{self.covariance_low}, {self.covariance_high} and {self.covariance_kl}"
            )
        if not self.future_high >= 1:
            raise ValueError(f"FIPO needs future_high >= 1, not {self.future_high}")


_DAPO = Method("group_normalised", "uniform", "clip", "token_mean", eps_high=0.28, dual_clip=10.0)

PRESETS: dict[str, Method] = {
    "reinforce": Method("mean_removed", "uniform", "none", "token_mean"),
    "grpo": Method("group_normalised", "uniform", "clip", "response_mean"),
    "dr_grpo": Method("mean_removed", "uniform", "clip", "constant"),
    "rloo": Method("leave_one_out", "uniform", "none", "response_sum"),
    "dapo": _DAPO,
    "dapo_ft": replace(_DAPO, credit="entropy"),
    "sapo": Method("group_normalised", "uniform", "soft", "response_mean"),
    "fipo": replace(_DAPO, credit="future_kl"),
    # GSPO's own range: a mean of log-ratios moves far less than one of them (arXiv 2507.18071, section 5.1)
    "gspo": Method("group_normalised", "uniform", "sequence_clip", "response_mean", eps_low=3e-4, eps_high=4e-4),
    "cispo": Method("group_normalised", "uniform", "stop_gradient", "token_mean"),
    # arXiv 2505.22617 with the constants of verl's recipes
    "clip_cov": Method("group_normalised", "uniform", "clip", "token_mean", covariance="clip"),
    "kl_cov": Method("group_normalised", "uniform", "none", "token_mean", covariance="kl"),
    "delta": replace(_DAPO, credit="delta"),
    "delta_group": replace(_DAPO, credit="delta"),
    "delta_light": replace(_DAPO, credit="delta"),
}

# What presets change beside the method, by recipe section; each is the arm of a hypothesis that held on fresh seeds.
# delta_group has the exact proxy and centroids inside each prompt's group (docs/real.md), delta_light gives each side
# mean 1 and wrong responses half their weight (docs/bench.md).
PRESET_KEYS: dict[str, dict[str, dict[str, str | float]]] = {
    "delta_group": {"delta": {"proxy": "hidden_exact", "scope": "group"}},
    "delta_light": {"method": {"normalise": "side", "weight_negative": 0.5}},
}


def method(preset: str, **changes: Any) -> Method:
    """The method of a preset, with fields changed. Raises ValueError for an unknown preset or value."""
    if preset not in PRESETS:
        raise ValueError(f"preset '{preset}' does not exist; choose one of {', '.join(PRESETS)}")
    return replace(PRESETS[preset], **changes) if changes else PRESETS[preset]
