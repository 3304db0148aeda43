"""Plain words when something is wrong: each a condition on a step's metrics and what it means.

Pure functions of the numbers that are recorded anyway, so a finished run can be examined as well.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

from delta_cli.runs.folder import JsonObject
from delta_cli.runs.observer import Notice


@dataclass(frozen=True)
class Tripwire:
    """Fires when ``check(record, first)`` is true; ``first`` is the run's first record."""

    name: str
    check: Callable[[JsonObject, JsonObject], bool]
    text: str  # formatted with the record


AS_DRAWN = 0.5  # nats that one token drawn in 16 bits may be off, with update.old_logprobs = "rollout"
SWAPPED = 2**28  # bytes; less than that is libraries that nobody uses

# Numbers that every step has: null where they were none that JSON can write.
ALWAYS = ("reward_mean", "entropy_mean", "loss", "grad_norm", "kl_old", "ratio_gap", "probe_logprob_change")

TRIPWIRES = (
    Tripwire(
        "not_a_number",
        lambda now, first: any(name in now and math.isnan(now[name]) for name in ALWAYS),
        "a number of this step was NaN or infinite and is null in metrics.jsonl: weights, log-probabilities or "
        "gradients are breaking down. Stop, go on from an earlier checkpoint with a lower update.learning_rate, or use "
        'model.dtype = "float32"',
    ),
    Tripwire(
        "ratio_not_one",
        lambda now, first: now["ratio_gap_first"] > (AS_DRAWN if now["scored"] == 0 and now["half"] else 0.02),
        "at the first update the log-probabilities differ from those that the ratio starts from by up to "
        "{ratio_gap_first:.3g} nats; they must be equal. The forward passes before it and in training disagree: turn "
        'off dropout, or try model.dtype = "float32"; where update.old_logprobs is not "recompute", try that',
    ),
    Tripwire(
        "weights_did_not_move",
        lambda now, first: now["updates"] > 0 and now["grad_norm"] > 0 and now["probe_logprob_change"] == 0,
        "the gradient is {grad_norm:.3g} but the log-probabilities are the same after the update: the learning rate "
        "({learning_rate:g}) is too small for the weights' precision, or the model computes with other weights than "
        "those that are trained",
    ),
    Tripwire(
        "gradient_zero",
        lambda now, first: now["updates"] > 0 and now["grad_norm"] == 0,
        "the gradient is exactly 0 although rewards differ: no trainable weight reaches the loss; check model.lora",
    ),
    Tripwire(
        "groups_equal",
        lambda now, first: now["zero_variance_groups"] == 1 and now["updates"] == 0,
        "every prompt's responses all got one reward (accuracy {accuracy:.0%}), so nothing was learned in this step "
        "and the weights stayed as they were. Choose harder problems, or easier ones, or set "
        "rollout.dynamic_sampling = true",
    ),
    Tripwire(
        "batch_not_filled",
        lambda now, first: now["batch_filled"] < 1,
        "of {prompts_drawn} prompts drawn too few had rewards that differ: the batch is {batch_filled:.0%} of what "
        "rollout.prompts wants. Choose problems the model solves some of the time, or raise "
        "rollout.dynamic_sampling_limit",
    ),
    Tripwire(
        "all_truncated",
        lambda now, first: now["truncated"] == 1,
        "every response ran into the limit, so none could end with an answer: raise rollout.max_tokens; where a base "
        'model goes on with the next question, set rollout.stop to what that begins with, such as ["\\nQ:"]; or '
        "check that the model knows its end-of-sequence token",
    ),
    Tripwire(
        "entropy_collapse",
        lambda now, first: now["entropy_mean"] < 0.05 * first["entropy_mean"] and now["accuracy"] < 0.9,
        "entropy fell to {entropy_mean:.3g} nats: the policy says nearly the same each time and has stopped exploring. "
        "Lower update.learning_rate, raise method.eps_high, or add update.kl_coefficient",
    ),
    Tripwire(
        "engine_mismatch",
        lambda now, first: now["engine_gap_mean"] > 0.05 and not now["staleness"] > 0,  # older weights do differ
        "the sampling engine's log-probabilities differ from the trainer's by {engine_gap_mean:.3g} nats on average: "
        "rollouts come from another precision, or from weights (adapters) that the updates did not reach. If it grows "
        "from step to step it is the weights; otherwise set update.importance_cap = 2.0, or one precision",
    ),
    Tripwire(
        "no_contrast",
        lambda now, first: isinstance(now["degenerate"], str) and now["zero_variance_groups"] < 1,
        "DelTA found no contrast ({degenerate}), so all tokens weighed the same in this step",
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
        "{reward_failures} verifications were killed or failed and count as reward 0; the reasons are in rollouts/. "
        "Raise reward.timeout where the machine is slow",
    ),
    Tripwire(
        "nonfinite",
        lambda now, first: now["nonfinite_updates"] > 0,
        "{nonfinite_updates} updates had a loss or gradient that was not finite and were skipped; lower "
        'update.learning_rate, or use model.dtype = "float32"',
    ),
    Tripwire(
        "swapping",
        lambda now, first: now["swapped"] > SWAPPED,
        "the machine moved {swapped:,} bytes of this process to disk for want of memory, which makes it many times "
        "slower: close other programs, or lower rollout.batch and update.micro_batch_tokens",
    ),
)


def fired(record: JsonObject, first: JsonObject, already: set[str], *, half: bool = False) -> list[Notice]:
    """The notices of a step that were not given before; their names are added to ``already``.

    ``half``: the compute is in 16 bits.
    """
    found = []
    now, then = _comparable(record | {"half": half}), _comparable(first)
    for wire in TRIPWIRES:
        if wire.name not in already and wire.check(now, then):
            already.add(wire.name)
            found.append(Notice(wire.name, f"step {record['step']}: {wire.text.format(**record)}"))
    return found


def _comparable(record: JsonObject) -> JsonObject:
    """The record with NaN, which is beyond no limit, for what is null or not there."""
    known = {name: math.nan if value is None and name in ALWAYS else value for name, value in record.items()}
    return defaultdict(lambda: math.nan, {name: value for name, value in known.items() if value is not None})
