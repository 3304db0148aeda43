"""Corrections for tokens that were not drawn from the policy that learns from them.

The sampler is never quite the trainer: it has other kernels, another precision or older weights. With the log-ratio
d = logp_old − logp_engine of each token, a correction does up to two things:

- it **weighs** tokens by exp(d), by exp(Σ d) of their response (``sequence``), or by exp(mean d) (``geometric``), and
  either caps the weight or sets it to 0 outside its bounds. The denominators of the loss do not change.
- it **rejects** tokens or responses whose divergence from the engine is too large. They leave the loss and its
  denominators.

Weights are constants of the update. Bounds belong to the range that is kept. DelTA's coefficients never see the
engine's log-probabilities: they come from the trainer's forward pass, before any correction.

The names in :data:`CORRECTIONS` are those of TRL 1.16 (``vllm_importance_sampling_mode``) and of verl's
``RolloutCorrectionConfig``, with the constants that those programs publish.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from delta_cli.credit.checks import check_choices
from delta_cli.credit.gates import MAX_LOG_RATIO

if TYPE_CHECKING:  # the core itself needs nothing but numpy
    from backends.arrays import Bools, Doubles, Ids


WeightKind = Literal["none", "token", "sequence", "geometric"]
WeightBound = Literal["truncate", "mask"]
RejectKind = Literal[
    "none",
    "token_k1",
    "token_k2",
    "token_k3",
    "seq_sum_k1",
    "seq_sum_k2",
    "seq_sum_k3",
    "seq_mean_k1",
    "seq_mean_k2",
    "seq_mean_k3",
    "seq_max_k2",
    "seq_max_k3",
]
_CHOICES = {"weight": get_args(WeightKind), "bound": get_args(WeightBound), "reject": get_args(RejectKind)}


@dataclass(frozen=True)
class Correction:
    """How tokens are weighed and rejected by the gap between the engine and the trainer.

    ``reject`` names a divergence: k1 = −d, k2 = d²/2 or k3 = exp(d) − 1 − d, of a token, or summed, averaged or
    maximised over a response. For k1 the bounds apply to exp(k1), the ratio of engine to trainer; for k2 and k3 only
    ``reject_high`` counts, and applies to the divergence in nats.
    """

    weight: WeightKind = "none"
    bound: WeightBound = "truncate"  # weights outside the bounds: capped, or set to 0
    low: float = 0.0
    high: float = 2.0
    reject: RejectKind = "none"
    reject_low: float = 0.5
    reject_high: float = 2.0
    bypass: bool = False  # the gate's ratio is that of the policy to the engine, not to the trainer's old policy

    def __post_init__(self) -> None:
        check_choices(self, _CHOICES)
        if not 0 <= self.low <= self.high or not self.high > 0:
            raise ValueError(f"a correction needs 0 <= low <= high and high > 0, not {self.low} and {self.high}")
        if not self.reject_low > 0 or not self.reject_high > 0:
            raise ValueError(
                f"a rejection needs bounds above 0, not {self.reject_low} and {self.reject_high}; see reject_low and "
                "reject_high"
            )
        if self.reject.endswith("k1") and self.reject_low > self.reject_high:
            raise ValueError(f"reject_low = {self.reject_low} is above reject_high = {self.reject_high}")

    @property
    def active(self) -> bool:
        """Whether it needs the engine's log-probabilities."""
        return self.weight != "none" or self.reject != "none" or self.bypass


_GEO = Correction(reject="seq_mean_k1", reject_low=0.999, reject_high=1.001)
_K3 = Correction(reject="seq_mean_k3", reject_high=0.01)

NO_CORRECTION = Correction()

CORRECTIONS: dict[str, Correction] = {
    "none": NO_CORRECTION,
    # TRL 1.16; sequence_mask is its default
    "token_truncate": Correction("token", "truncate", high=3.0),
    "token_mask": Correction("token", "mask", high=3.0),
    "sequence_truncate": Correction("sequence", "truncate", high=3.0),
    "sequence_mask": Correction("sequence", "mask", high=3.0),
    # verl
    "decoupled_token_is": Correction("token"),
    "decoupled_seq_is": Correction("sequence"),
    "decoupled_token_icepop": Correction("token", "mask", low=0.5, high=5.0),
    "decoupled_seq_is_rs": Correction("sequence", reject="seq_sum_k1"),
    "decoupled_geo_rs": _GEO,
    "decoupled_geo_rs_seq_tis": replace(_GEO, weight="sequence"),
    "decoupled_geo_rs_token_tis": replace(_GEO, weight="token"),
    "decoupled_k3_rs": _K3,
    "decoupled_k3_rs_seq_tis": replace(_K3, weight="sequence"),
    "decoupled_k3_rs_token_tis": replace(_K3, weight="token"),
    "bypass_ppo_clip": Correction(bypass=True),
    "bypass_ppo_clip_geo_rs": replace(_GEO, bypass=True),
    "bypass_ppo_clip_k3_rs": replace(_K3, bypass=True),
}


def correction(preset: str, **changes: Any) -> Correction:
    """A row of :data:`CORRECTIONS`, with fields changed. Raises ValueError for an unknown preset or value."""
    if preset not in CORRECTIONS:
        raise ValueError(f"correction '{preset}' does not exist; choose one of {', '.join(CORRECTIONS)}")
    return replace(CORRECTIONS[preset], **changes)


def raw_weights(kind: WeightKind, gap: Doubles, starts: Ids) -> Doubles:
    """The ratio that weighs each token before it is bounded, [N]; ``gap`` [N] is logp_old − logp_engine."""
    if kind == "none":
        return np.ones(len(gap))
    how = {"sequence": "sum", "geometric": "mean"}
    log_ratio = gap if kind == "token" else _of_responses(gap, starts, how[kind])
    weights: Doubles = np.exp(np.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO))
    return weights


def correction_weights(settings: Correction, gap: Doubles, starts: Ids) -> Doubles:
    """The constant factor on each token's term of the objective, [N]."""
    weights = raw_weights(settings.weight, gap, starts)
    if settings.weight == "none":
        return weights
    if settings.bound == "truncate":
        return np.clip(weights, settings.low, settings.high)
    return np.where((weights >= settings.low) & (weights <= settings.high), weights, 0.0)


def accepted_tokens(settings: Correction, gap: Doubles, starts: Ids) -> Bools:
    """Which tokens stay in the loss and its denominators, [N]."""
    if settings.reject == "none":
        return np.ones(len(gap), dtype=bool)
    level, _, kind = settings.reject.rpartition("_")
    d = np.clip(gap, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    divergence: Doubles = {"k1": -d, "k2": d**2 / 2, "k3": np.expm1(d) - d}[kind]
    if level != "token":
        divergence = _of_responses(divergence, starts, level.removeprefix("seq_"))
    accepted: Bools = divergence <= (np.log(settings.reject_high) if kind == "k1" else settings.reject_high)
    if kind == "k1":
        accepted = accepted & (divergence >= np.log(settings.reject_low))
    return accepted


def _of_responses(values: Doubles, starts: Ids, how: str) -> Doubles:
    """The sum, mean or maximum of each response, given to each of its tokens, [N]."""
    lengths = np.diff(starts)
    rows = np.repeat(np.arange(len(lengths)), lengths)
    if how == "max":
        found = np.full(len(lengths), -np.inf)
        np.maximum.at(found, rows, values)
    else:
        found = np.bincount(rows, values, len(lengths))
        if how == "mean":
            found = found / np.maximum(lengths, 1)
    return found[rows]
