"""The gap between the sampler's log-probabilities and the trainer's: metrics of a step, and what to do about it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from backends.arrays import Bools, Doubles
from delta_cli.credit.corrections import Correction, accepted_tokens, correction_weights, raw_weights
from delta_cli.training.update import ScoredBatch

LARGE = 0.1  # nats: a gap of one token in a thousand that asks for a correction
ENOUGH = 0.9  # effective sample size, as a share, with which a weight can be left as it is
RARE = 0.5  # nats: if 99 % of the gaps are below it, larger ones are a few bad tokens
MOVED = 0.5  # effective sample size of responses, as a share, below which stale batches teach too little
CUT = 0.2  # share of tokens cut off above which a correction is too strict


def describe_gap(batch: ScoredBatch, correction: Correction) -> dict[str, Any]:
    """Metrics of the gap over the responses that a forward pass scored; null if it scored none.

    Quarters are those of each response: a gap that grows from one to the next comes from what the engine keeps, such as
    its cache. The effective sample size is (Σ w)² / Σ w² over the number of tokens, or of responses, for weights w that
    are not bounded.
    """
    sequences = batch.rollout.sequences
    scored = batch.scored
    difference = np.asarray(batch.old_logprobs, np.float64) - batch.rollout.engine_logprobs
    gap = np.abs(difference)
    p99, p999 = np.quantile(gap[scored], [0.99, 0.999]).tolist() if scored.any() else (None, None)
    found = {
        "engine_gap_mean": _mean(gap[scored]),
        "engine_gap_max": float(gap[scored].max()) if scored.any() else None,
        "engine_gap_p99": p99,
        "engine_gap_p999": p999,
    }
    quarters = _quarters(sequences.starts)
    for quarter in range(4):
        found[f"engine_gap_q{quarter + 1}"] = _mean(gap[scored & (quarters == quarter)])
    firsts = sequences.starts[:-1][sequences.lengths > 0]
    firsts = firsts[scored[firsts]]
    found["ess_token"] = _effective_share(raw_weights("token", difference, sequences.starts)[scored])
    found["ess_sequence"] = _effective_share(raw_weights("sequence", difference, sequences.starts)[firsts])
    if correction.active:
        found["correction_cut"] = _mean(_cut(correction, difference, sequences.starts)[scored])
    return found


def advice(record: Mapping[str, Any]) -> tuple[str, str] | None:
    """The entry of the menu of corrections that fits a step's gap, and the reason; None if the gap is harmless.

    It goes by what each correction costs. The product of a response's ratios is unbiased, so it is taken if nearly all
    responses keep their weight; otherwise the ratio of each token; if only a few tokens are far off, those tokens are
    left out; and if many are, whole responses are.
    """
    token, sequence = record.get("ess_token"), record.get("ess_sequence")
    p99, p999 = record.get("engine_gap_p99"), record.get("engine_gap_p999")
    if token is None or sequence is None or p99 is None or p999 is None or p999 <= LARGE:
        return None
    if sequence >= ENOUGH:
        return "decoupled_seq_is", f"the weights of whole responses keep an effective sample size of {sequence:.0%}"
    if token >= ENOUGH:
        return (
            "decoupled_token_is",
            f"weights of whole responses keep an effective sample size of {sequence:.0%} only, those of tokens "
            f"{token:.0%}",
        )
    if p99 <= RARE:
        return (
            "decoupled_token_icepop",
            f"99 % of the tokens differ by at most {p99:.2g} nats, and the few others dominate the weights",
        )
    return (
        "decoupled_k3_rs_token_tis",
        f"one token in a hundred differs by {p99:.2g} nats or more, so some responses have another policy altogether",
    )


def moves_too_fast(record: Mapping[str, Any]) -> bool:
    """Whether the policy moves so far while batches wait that no correction makes up for it."""
    sequence = record.get("ess_sequence")
    return bool((record.get("staleness") or 0) > 0 and sequence is not None and sequence < MOVED)


def _cut(correction: Correction, difference: Doubles, starts: Any) -> Bools:
    """Which tokens the correction rejects, or whose weight it changes, [N]."""
    raw = raw_weights(correction.weight, difference, starts)
    changed: Bools = correction_weights(correction, difference, starts) != raw
    return changed | ~accepted_tokens(correction, difference, starts)


def _quarters(starts: Any) -> Any:
    """The quarter of its response that each token lies in, 0 to 3, [N]."""
    lengths = np.diff(starts)
    places = np.arange(int(starts[-1])) - np.repeat(starts[:-1], lengths)
    return 4 * places // np.repeat(np.maximum(lengths, 1), lengths)


def _effective_share(weights: Doubles) -> float | None:
    if not len(weights):
        return None
    scaled = weights / weights.max()  # squares of large weights would overflow
    return float(scaled.sum() ** 2 / (len(scaled) * (scaled**2).sum()))


def _mean(values: Any) -> float | None:
    return float(values.mean()) if len(values) else None
