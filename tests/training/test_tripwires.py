"""Every tripwire fires on a record made for it, and none fires on a healthy record."""

from __future__ import annotations

from typing import Any

import pytest

from delta_cli.runs.metrics import METRICS, OPTION_METRICS, RANK_METRICS, REWARD_METRICS
from delta_cli.training.metrics import swapped
from delta_cli.training.tripwires import TRIPWIRES, fired

HEALTHY: dict[str, Any] = {
    "step": 2,
    "reward_mean": 0.4,
    "accuracy": 0.4,
    "reward_failures": 0,
    "zero_variance_groups": 0.25,
    "prompts_drawn": 32,
    "batch_filled": 1.0,
    "response_length_mean": 30.0,
    "response_length_max": 48,
    "truncated": 0.1,
    "tokens": 9000,
    "entropy_mean": 1.0,
    "scored": 1.0,
    "engine_gap_mean": 0.001,
    "engine_gap_max": 0.02,
    "engine_gap_p99": 0.004,
    "engine_gap_p999": 0.01,
    "engine_gap_q1": 0.001,
    "engine_gap_q2": 0.001,
    "engine_gap_q3": 0.001,
    "engine_gap_q4": 0.001,
    "ess_token": 1.0,
    "ess_sequence": 0.99,
    "staleness": 0,
    "loss": 0.01,
    "grad_norm": 0.5,
    "learning_rate": 1e-6,
    "updates": 4,
    "updates_skipped": 0,
    "nonfinite_updates": 0,
    "clip_fraction": 0.01,
    "kl_old": 0.001,
    "kl_reference": 0.0,
    "ratio_gap_first": 1e-6,
    "ratio_gap": 0.1,
    "probe_logprob_change": 0.01,
    "coefficient_mean": 1.0,
    "coefficient_std": 0.1,
    "coefficient_min": 0.8,
    "coefficient_max": 1.2,
    "coefficient_p05": 0.85,
    "coefficient_p25": 0.95,
    "coefficient_p50": 1.0,
    "coefficient_p75": 1.05,
    "coefficient_p95": 1.15,
    "coefficient_positive": 1.01,
    "coefficient_negative": 0.99,
    "margin_positive": 0.6,
    "margin_negative": 0.6,
    "gamma_positive": 0.3,
    "gamma_negative": 0.2,
    "degenerate": None,
    "tokens_per_second": 1000.0,
    "rollout_tokens_per_second": 2000.0,
    "peak_memory": 2**30,
    "swapped": 0,
    "seconds": 10.0,
}

# For each tripwire: the changes that fire it, and part of the advice it gives.
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "not_a_number": ({"entropy_mean": None}, "NaN or infinite"),
    "ratio_not_one": ({"ratio_gap_first": 0.5}, "float32"),
    "weights_did_not_move": ({"probe_logprob_change": 0.0}, "1e-06"),
    "gradient_zero": ({"grad_norm": 0.0}, "model.lora"),
    "groups_equal": (
        {"zero_variance_groups": 1.0, "updates": 0, "grad_norm": 0.0, "probe_logprob_change": 0.0},
        "rollout.dynamic_sampling",
    ),
    "batch_not_filled": ({"batch_filled": 0.5}, "rollout.dynamic_sampling_limit"),
    "all_truncated": ({"truncated": 1.0}, "set rollout.stop to its first words"),
    "entropy_collapse": ({"entropy_mean": 0.01}, "update.kl_coefficient"),
    "engine_mismatch": ({"engine_gap_mean": 0.3}, "choose a [correction]"),
    "correction_advised": (
        {"engine_gap_p999": 0.3, "ess_token": 0.98, "ess_sequence": 0.4},
        'correction.preset = "decoupled_token_is"',
    ),
    "stale_policy_moved": (
        {"staleness": 4, "ess_sequence": 0.4, "correction_cut": 0.01},
        "keep an effective sample size of 40%. No correction makes up for that: divide update.learning_rate",
    ),
    "correction_too_strict": ({"correction_cut": 0.4, "engine_gap_p999": 0.3, "ess_token": 0.98}, "cuts 40%"),
    "no_contrast": ({"degenerate": "no response has a negative advantage"}, "no response has a negative advantage"),
    "coefficients_equal": ({"coefficient_std": 0.0}, "delta.lambda_min"),
    "reward_failures": ({"reward_failures": 3}, "reward.timeout"),
    "environment_failures": ({"environment_failures": 2}, "2 episodes failed"),
    "nonfinite": ({"nonfinite_updates": 1}, "update.learning_rate"),
    "swapping": ({"swapped": 2**30}, "1,073,741,824 bytes"),
}


def test_the_healthy_record_has_every_metric() -> None:
    elsewhere = set(RANK_METRICS) | set(OPTION_METRICS) | set(REWARD_METRICS)
    assert {name for name in METRICS if not name.startswith(("seconds_", "eval_"))} - elsewhere == set(HEALTHY)


def test_a_healthy_record_fires_nothing() -> None:
    assert fired(HEALTHY, HEALTHY, set()) == []


def test_a_stale_batch_may_differ_from_the_engine() -> None:
    """A batch drawn ahead comes from the weights before the last updates."""
    assert fired(HEALTHY | {"engine_gap_mean": 0.3, "staleness": 4}, HEALTHY, set()) == []


def test_missing_values_fire_nothing_and_null_fires_one() -> None:
    """Methods without DelTA credit record no coefficients; a non-finite value is recorded as null."""
    credit = {name for name in HEALTHY if name.startswith(("coefficient", "margin", "gamma", "degenerate"))}
    plain = {name: value for name, value in HEALTHY.items() if name not in credit}
    assert fired(plain, plain, set()) == []
    nothing = dict.fromkeys(HEALTHY) | {"step": 1}
    assert [notice.name for notice in fired(nothing, nothing, set())] == ["not_a_number"]


def test_every_tripwire_has_a_record() -> None:
    assert [wire.name for wire in TRIPWIRES] == list(WRONG)


@pytest.mark.parametrize("name", WRONG)
def test_it_fires_once_and_alone_and_gives_advice(name: str) -> None:
    changes, advice = WRONG[name]
    already: set[str] = set()
    (notice,) = fired(HEALTHY | changes, HEALTHY, already)
    assert notice.name == name
    assert notice.text.startswith("step 2: ")
    assert advice in notice.text
    assert "\n" not in notice.text
    assert fired(HEALTHY | changes, HEALTHY, already) == []


@pytest.mark.parametrize(("scored", "half", "fires"), [(1.0, True, True), (0.0, False, True), (0.0, True, False)])
def test_the_first_ratio_may_differ_from_1_if_the_engine_rounds_differently(
    scored: float, half: bool, fires: bool
) -> None:
    """In 16 bits without scoring it may; in float32 it shows that the engine has other weights."""
    record = HEALTHY | {"ratio_gap_first": 0.3, "scored": scored}
    assert [notice.name for notice in fired(record, HEALTHY, set(), half=half)] == ["ratio_not_one"] * fires


def test_low_entropy_is_no_collapse_if_the_task_is_solved() -> None:
    assert fired(HEALTHY | {"entropy_mean": 0.01, "accuracy": 0.95}, HEALTHY, set()) == []


def test_swapped_memory_is_a_number_or_unknown() -> None:
    value = swapped()
    assert value is None or value >= 0
