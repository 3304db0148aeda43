"""Tripwires: conditions on a step's metrics, each with a warning that says what it means and what to do.

They are pure functions of recorded metrics, so they can examine finished runs too.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from delta_cli.runs.folder import JsonObject
from delta_cli.runs.observer import Notice


@dataclass(frozen=True)
class Tripwire:
    """Fires when ``check(record, first)`` is true; ``first`` is the record of the run's first step."""

    name: str
    check: Callable[[JsonObject, JsonObject], bool]
    text: str  # formatted with the record


ROLLOUT_GAP = 0.5  # nats: tolerated gap of one token sampled in 16 bits, with update.old_logprobs = "rollout"
SWAPPED_BYTES = 2**28  # bytes; swapping less is harmless: unused library pages
LARGE_GAP = 0.1  # nats: a gap of one token in a thousand that asks for a correction
SAFE_ESS = 0.9  # effective sample size, as a share, that a correction may cost
RARE_GAP = 0.5  # nats: if 99 % of the gaps are below it, larger ones are a few bad tokens
STALE_ESS = 0.5  # effective sample size of responses, as a share, below which stale batches teach too little
TOO_MUCH_CUT = 0.2  # share of tokens cut off above which a correction is too strict

# Metrics that every step has; null means NaN or infinity.
ALWAYS = ("reward_mean", "entropy_mean", "loss", "grad_norm", "kl_old", "ratio_gap", "probe_logprob_change")


def advice(record: Mapping[str, Any]) -> tuple[str, str] | None:
    """The entry of the menu of corrections that fits a step's gap, and the reason; None if the gap is harmless.

    It goes by what each correction costs. The product of a response's ratios is unbiased, so it is taken if nearly all
    responses keep their weight; otherwise the ratio of each token; if only a few tokens are far off, those tokens are
    left out; and if many are, whole responses are.
    """
    token, sequence = record.get("ess_token"), record.get("ess_sequence")
    p99, p999 = record.get("engine_gap_p99"), record.get("engine_gap_p999")
    if token is None or sequence is None or p99 is None or p999 is None or p999 <= LARGE_GAP:
        return None
    if sequence >= SAFE_ESS:
        return "decoupled_seq_is", f"the weights of whole responses keep an effective sample size of {sequence:.0%}"
    if token >= SAFE_ESS:
        return (
            "decoupled_token_is",
            f"weights of whole responses keep an effective sample size of {sequence:.0%} only, those of tokens "
            f"{token:.0%}",
        )
    if p99 <= RARE_GAP:
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
    return bool((record.get("staleness") or 0) > 0 and sequence is not None and sequence < STALE_ESS)


TRIPWIRES = (
    Tripwire(
        "not_a_number",
        lambda now, first: (
            any(name in now and math.isnan(now[name]) for name in ALWAYS) and not now["environment_failures"] > 0
        ),
        "a number of this step was NaN or infinite and is null in metrics.jsonl: weights, log-probabilities or "
        "gradients are breaking down. Stop, resume from an earlier checkpoint with a lower update.learning_rate, or "
        'use model.dtype = "float32"',
    ),
    Tripwire(
        "ratio_not_one",
        lambda now, first: now["ratio_gap_first"] > (ROLLOUT_GAP if now["scored"] == 0 and now["half"] else 0.02),
        "at the first update the log-probabilities differ from the old ones by up to {ratio_gap_first:.3g} nats, but "
        "they must be equal. The forward passes before and during the update disagree: turn off dropout, or try "
        'model.dtype = "float32" or update.old_logprobs = "recompute"',
    ),
    Tripwire(
        "weights_did_not_move",
        lambda now, first: now["updates"] > 0 and now["grad_norm"] > 0 and now["probe_logprob_change"] == 0,
        "the gradient is {grad_norm:.3g} but the update changed no log-probability: the learning rate "
        "({learning_rate:g}) is too small for the precision of the weights, or the forward pass uses other weights "
        "than those being trained",
    ),
    Tripwire(
        "gradient_zero",
        lambda now, first: now["updates"] > 0 and now["grad_norm"] == 0,
        "the gradient is exactly 0 although rewards differ: no trainable weight reaches the loss; check model.lora",
    ),
    Tripwire(
        "groups_equal",
        lambda now, first: now["zero_variance_groups"] == 1 and now["updates"] == 0 and now["accuracy"] >= 0,
        "every group has zero variance: all responses to a prompt got the same reward (accuracy {accuracy:.0%}). This "
        "step learned nothing and left the weights unchanged. Choose harder or easier problems, or set "
        "rollout.dynamic_sampling = true",
    ),
    Tripwire(
        "batch_not_filled",
        lambda now, first: now["batch_filled"] < 1,
        "too few of {prompts_drawn} sampled prompts had rewards that differ: the batch has {batch_filled:.0%} of "
        "rollout.prompts. Choose problems that the model solves some of the time, or raise "
        "rollout.dynamic_sampling_limit",
    ),
    Tripwire(
        "all_truncated",
        lambda now, first: now["truncated"] == 1,
        "every response reached the length limit before it could end: raise rollout.max_tokens; if a base model "
        'continues with the next question, set rollout.stop to its first words, such as ["\\nQ:"]; or check that '
        "the model knows its end-of-sequence token",
    ),
    Tripwire(
        "entropy_collapse",
        lambda now, first: now["entropy_mean"] < 0.05 * first["entropy_mean"] and now["accuracy"] < 0.9,
        "entropy fell to {entropy_mean:.3g} nats: the policy gives nearly the same response each time and has stopped "
        "exploring. "
        "Lower update.learning_rate, raise method.eps_high, or add update.kl_coefficient",
    ),
    Tripwire(
        "engine_mismatch",
        lambda now, first: (
            now["engine_gap_mean"] > 0.05 and not now["staleness"] > 0
        ),  # with older weights a gap is expected
        "the sampler's log-probabilities differ from the trainer's by {engine_gap_mean:.3g} nats on average: it uses "
        "another precision, or weights (adapters) that the updates did not reach. If the gap grows from step to step, "
        "the weights are stale; otherwise choose a [correction], or use one precision",
    ),
    Tripwire(
        "correction_advised",
        lambda now, first: isinstance(now["advised"], str) and not now["correction_cut"] >= 0,
        "the sampler's and the trainer's log-probabilities differ by more than {engine_gap_p999:.2g} nats at one token "
        'in a thousand, and nothing corrects for it: set correction.preset = "{advised}", because {advised_because}. '
        "delta doctor RUN shows the gap of every step",
    ),
    Tripwire(
        "stale_policy_moved",
        lambda now, first: moves_too_fast(now),
        "the policy moves too far while batches wait: {staleness} updates after they were drawn, the weights of whole "
        "responses keep an effective sample size of {ess_sequence:.0%}. No correction makes up for that: divide "
        "update.learning_rate by the square root of 1 + engine.async_steps, and set correction.preset = "
        '"decoupled_seq_is"',
    ),
    Tripwire(
        "correction_too_strict",
        lambda now, first: now["correction_cut"] > TOO_MUCH_CUT,
        "the correction cuts {correction_cut:.0%} of the tokens off, so much of the batch teaches little or nothing. "
        "Choose a wider correction.high or correction.reject_high, weigh tokens, not responses, or close the gap: "
        "fewer engine.async_steps, or one precision",
    ),
    Tripwire(
        "no_contrast",
        lambda now, first: isinstance(now["degenerate"], str) and now["zero_variance_groups"] < 1,
        "DelTA found no contrast ({degenerate}), so all tokens had the same weight in this step",
    ),
    Tripwire(
        "coefficients_equal",
        lambda now, first: now["coefficient_std"] == 0 and not isinstance(now["degenerate"], str),
        "all token coefficients are equal although the sides differ: check delta.lambda_min, delta.lambda_max and "
        "delta.proxy",
    ),
    Tripwire(
        "reward_failures",
        lambda now, first: now["reward_failures"] > 0,
        "{reward_failures} verifications were killed or failed and count as reward 0; rollouts/ has the reasons. "
        "Raise reward.timeout if the machine is slow",
    ),
    Tripwire(
        "environment_failures",
        lambda now, first: now["environment_failures"] > 0,
        "{environment_failures} episodes failed with their environment and are left out; rollouts/ has the reasons "
        "under failure. Mend the environment, or raise environment.seconds if it is slow",
    ),
    Tripwire(
        "nonfinite",
        lambda now, first: now["nonfinite_updates"] > 0,
        "{nonfinite_updates} updates had a loss or gradient that was not finite and were skipped; lower "
        'update.learning_rate, or use model.dtype = "float32"',
    ),
    Tripwire(
        "swapping",
        lambda now, first: now["swapped"] > SWAPPED_BYTES,
        "memory is short: {swapped:,} bytes of this process were swapped to disk, which makes it many times slower. "
        "Close other programs, or lower rollout.batch and update.micro_batch_tokens",
    ),
)


def fired(record: JsonObject, first: JsonObject, already: set[str], *, half: bool = False) -> list[Notice]:
    """The new warnings of a step; adds their names to ``already``.

    ``half``: the compute is in 16 bits.
    """
    found = []
    record = record | {"half": half} | _advised(record)
    now, then = _comparable(record), _comparable(first)
    for wire in TRIPWIRES:
        if wire.name not in already and wire.check(now, then):
            already.add(wire.name)
            found.append(Notice(wire.name, f"step {record['step']}: {wire.text.format(**record)}"))
    return found


def _advised(record: JsonObject) -> JsonObject:
    """The correction that fits the step's gap and the reason; empty if none is needed."""
    found = advice(record)
    return {} if found is None else {"advised": found[0], "advised_because": found[1]}


def _comparable(record: JsonObject) -> JsonObject:
    """The record with NaN, which exceeds no limit, for null and missing values."""
    known = {name: math.nan if value is None and name in ALWAYS else value for name, value in record.items()}
    return defaultdict(lambda: math.nan, {name: value for name, value in known.items() if value is not None})
