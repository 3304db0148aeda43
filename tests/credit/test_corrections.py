"""Corrections for the gap between engine and trainer: published formulas, autograd, and the bounds of the masks."""

from __future__ import annotations

import math
from typing import Any, get_args

import numpy as np
import pytest
import torch

from delta_cli.credit import CORRECTIONS, Correction, Method, MiniBatch, Surrogate, correction, method, policy_loss
from delta_cli.credit.corrections import RejectKind, WeightBound, WeightKind, accepted_tokens, correction_weights
from tests.credit.samples import starts_of

LENGTHS = [6, 1, 0, 11, 3, 1, 8]
ADVANTAGES = [0.9, -1.4, 0.5, -0.3, 0.0, 2.0, 0.7]
STARTS = starts_of(LENGTHS)
EXACT = {"rtol": 1e-12, "atol": 1e-12}


def arguments(seed: int) -> dict[str, Any]:
    """A mini-batch whose engine differs by a few tenths of a nat, more in some responses than in others."""
    rng = np.random.default_rng(seed)
    tokens = sum(LENGTHS)
    logp_old = np.log(rng.uniform(0.05, 0.95, tokens))
    spread = np.repeat([0.01, 0.3, 0.1, 0.2, 0.001, 1.0, 0.02], LENGTHS)
    return {
        "logp": logp_old + rng.normal(0, 0.2, tokens),
        "logp_old": logp_old,
        "engine_logp": logp_old + spread * rng.normal(size=tokens),
        "advantages": np.array(ADVANTAGES),
        "starts": STARTS,
        "kept": np.array([True, True, True, True, True, True, seed % 2 == 0]),
    }


def weights_and_acceptance(given: Correction, d: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One response's weights and which tokens stay, as TRL 1.16 and verl's rollout_corr_helper define them."""
    ratio = {
        "none": torch.ones_like(d),
        "token": d.exp(),
        "sequence": d.sum().exp().expand(len(d)),
        "geometric": (d.sum() / max(len(d), 1)).exp().expand(len(d)),
    }[given.weight]
    if given.weight == "none":
        weights = ratio
    elif given.bound == "truncate":
        weights = ratio.clamp(min=given.low, max=given.high)
    else:
        weights = torch.where((ratio < given.low) | (ratio > given.high), torch.zeros_like(ratio), ratio)
    if given.reject == "none" or not len(d):
        return weights, torch.ones_like(d, dtype=torch.bool)
    level, kind = given.reject.rsplit("_", 1)
    estimate = {"k1": -d, "k2": 0.5 * d**2, "k3": d.exp() - 1 - d}[kind]
    found = {"token": estimate, "seq_sum": estimate.sum(), "seq_mean": estimate.mean(), "seq_max": estimate.max()}[
        level
    ]
    low, high = -math.inf, given.reject_high
    if kind == "k1":
        low, high = math.log(given.reject_low), math.log(given.reject_high)
    return weights, ((found >= low) & (found <= high)).expand(len(d))


def oracle(given: Correction, aggregation: str, batch: dict[str, Any]) -> tuple[float, np.ndarray]:
    """DAPO's clip with a correction, response by response, differentiated by autograd."""
    logp = torch.tensor(batch["logp"], requires_grad=True)
    old, engine = torch.tensor(batch["logp_old"]), torch.tensor(batch["engine_logp"])
    sums, counts = [], []
    for r, (A, kept) in enumerate(zip(batch["advantages"], batch["kept"], strict=True)):
        part = slice(STARTS[r], STARTS[r + 1])
        weights, accepted = weights_and_acceptance(given, (old - engine)[part])
        if not kept or (len(accepted) and not accepted.any()):
            continue
        ratio = (logp[part] - (engine if given.bypass else old)[part]).exp()
        term = torch.minimum(ratio * A, ratio.clamp(0.8, 1.28) * A)
        term = torch.maximum(term, torch.full_like(term, 10 * A)) if A < 0 else term
        sums.append((term * weights * accepted).sum())
        counts.append(int(accepted.sum()))
    if aggregation == "token_mean":
        loss = -torch.stack(sums).sum() / max(sum(counts), 1)
    else:
        means = [total / max(count, 1) for total, count in zip(sums, counts, strict=True)]
        loss = -torch.stack(means).sum() / len(means)
    (gradient,) = torch.autograd.grad(loss, logp)
    return float(loss.detach()), gradient.numpy()


EVERY = [
    *(Correction(weight, bound, low, 1.2) for weight in get_args(WeightKind) for bound in get_args(WeightBound)
      for low in (0.0, 0.9)),
    *(Correction("token", reject=kind, reject_low=0.9, reject_high=1.15 if kind.endswith("1") else 0.01)
      for kind in get_args(RejectKind)),
    Correction("geometric", bypass=True, reject="token_k3", reject_high=0.01),
]  # fmt: skip


@pytest.mark.parametrize("aggregation", ["token_mean", "response_mean"])
@pytest.mark.parametrize("given", [*CORRECTIONS.values(), *EVERY])
def test_loss_and_gradient_equal_autograd_of_the_published_formula(given: Correction, aggregation: str) -> None:
    for seed in range(3):
        batch = arguments(seed)
        loss, gradient = policy_loss("dapo", **batch, correction=given, aggregation=aggregation)
        true_loss, true_gradient = oracle(given, aggregation, batch)
        np.testing.assert_allclose(loss, true_loss, **EXACT)
        np.testing.assert_allclose(gradient, true_gradient, **EXACT)


def test_the_cases_above_cut_something_and_keep_something() -> None:
    """Otherwise they would test little."""
    batch = arguments(0)
    gap = batch["logp_old"] - batch["engine_logp"]
    for given in EVERY:
        weights, accepted = correction_weights(given, gap, STARTS), accepted_tokens(given, gap, STARTS)
        assert accepted.any()
        assert given.reject == "none" or not accepted.all(), given
        if given.weight != "none" and given.bound == "mask":
            assert (weights == 0).any(), given
            assert (weights > 0).any(), given


@pytest.mark.parametrize(
    ("name", "constants"),
    [
        ("sequence_mask", ("sequence", "mask", 0.0, 3.0, "none")),  # TRL: vllm_importance_sampling_clip_max
        ("token_truncate", ("token", "truncate", 0.0, 3.0, "none")),
        ("decoupled_token_is", ("token", "truncate", 0.0, 2.0, "none")),  # verl: rollout_is_threshold
        ("decoupled_token_icepop", ("token", "mask", 0.5, 5.0, "none")),
        ("decoupled_seq_is_rs", ("sequence", "truncate", 0.0, 2.0, "seq_sum_k1", 0.5, 2.0)),
        ("decoupled_geo_rs", ("none", "truncate", 0.0, 2.0, "seq_mean_k1", 0.999, 1.001)),
        ("decoupled_k3_rs_token_tis", ("token", "truncate", 0.0, 2.0, "seq_mean_k3", 0.5, 0.01)),
        ("bypass_ppo_clip", ("none", "truncate", 0.0, 2.0, "none", 0.5, 2.0, True)),
    ],
)
def test_presets_have_the_published_constants(name: str, constants: tuple[Any, ...]) -> None:
    assert CORRECTIONS[name] == Correction(*constants)


def at_bound(ratio: float, high: bool) -> tuple[float, float, float]:
    """A log-ratio, the bound that its exponential equals to the last bit, and the next bound further in."""
    d = math.log(ratio)
    bound = float(np.exp(d))
    return d, bound, float(np.nextafter(bound, 0 if high else 9))


@pytest.mark.parametrize("weight", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("high", [True, False])
def test_a_weight_on_its_bound_stays_and_one_bit_beyond_goes(weight: Any, high: bool) -> None:
    d, bound, further_in = at_bound(2.7 if high else 0.4, high)
    gap, starts = np.array([d, 0.0]), starts_of([1, 1])
    for limit, stays in ((bound, True), (further_in, False)):
        given = Correction(weight, "mask", **({"high": limit} if high else {"low": limit, "high": 5.0}))
        assert correction_weights(given, gap, starts).tolist() == [bound if stays else 0.0, 1.0]
        capped = Correction(weight, "truncate", **({"high": limit} if high else {"low": limit, "high": 5.0}))
        assert correction_weights(capped, gap, starts).tolist() == [limit, 1.0]


@pytest.mark.parametrize("kind", [kind for kind in get_args(RejectKind) if kind != "none"])
def test_a_divergence_on_its_bound_stays_and_one_bit_beyond_goes(kind: Any) -> None:
    """Responses of one token, so that sum, mean and maximum are the token's."""
    d = 0.75
    gap, starts = np.array([-d, d, 0.0]), starts_of([1, 1, 1])
    if kind.endswith("k1"):
        bound = float(np.exp(d))
        while np.log(bound) < d:
            bound = float(np.nextafter(bound, 9))
        inside = bound
        while np.log(inside) >= d:
            inside = float(np.nextafter(inside, 0))
        assert accepted_tokens(Correction(reject=kind, reject_low=1e-9, reject_high=bound), gap, starts).all()
        found = accepted_tokens(Correction(reject=kind, reject_low=1e-9, reject_high=inside), gap, starts)
        assert found.tolist() == [False, True, True], "the engine found that token likelier"
        return
    exact = d**2 / 2 if kind.endswith("k2") else float(np.expm1(d) - d)
    for bound, stays in ((exact, True), (float(np.nextafter(exact, 0)), False)):
        found = accepted_tokens(Correction(reject=kind, reject_high=bound), gap, starts)
        assert bool(found[1]) is stays
        assert found[2]


def test_a_rejected_response_leaves_the_denominator_and_a_masked_one_does_not() -> None:
    logp = np.full(4, -1.0)
    batch = {"logp": logp, "logp_old": logp, "engine_logp": logp - np.array([0, 0, 2.0, 2.0])}
    batch |= {"advantages": [1.0, 1.0], "starts": starts_of([2, 2])}
    rejected, _ = policy_loss("grpo", **batch, correction=Correction(reject="seq_mean_k2", reject_high=1.0))
    masked, _ = policy_loss("grpo", **batch, correction="sequence_mask")
    assert (rejected, masked) == (-1.0, -0.5)


def test_a_batch_that_is_rejected_as_a_whole_teaches_nothing() -> None:
    batch = arguments(0)
    logp = batch.pop("logp")
    batch["engine_logp"] = batch["logp_old"] - 3.0
    surrogate = Surrogate(method("dapo"), MiniBatch(**batch, correction=correction("decoupled_k3_rs")))
    assert not surrogate.has_gradient
    loss, gradient = surrogate(logp, np.arange(len(LENGTHS)))
    assert loss == 0
    assert not gradient.any()


@pytest.mark.parametrize("name", CORRECTIONS)
def test_any_partition_into_micro_batches_and_nothing_skipped_matters(name: str) -> None:
    batch = arguments(2)
    logp = batch.pop("logp")
    surrogate = Surrogate(method("dapo"), MiniBatch(**batch, correction=correction(name)))
    whole, expected = surrogate(logp, np.arange(len(LENGTHS)))
    loss, gradient = 0.0, np.zeros(len(logp))
    for row in np.flatnonzero(surrogate.learned_from)[::-1]:
        part = slice(STARTS[row], STARTS[row + 1])
        value, gradient[part] = surrogate(logp[part], np.array([row]))
        loss += value
    np.testing.assert_allclose(loss, whole, **EXACT)
    np.testing.assert_allclose(gradient, expected, **EXACT)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"weight": "tokens"}, "weight 'tokens' does not exist"),
        ({"reject": "seq_max_k1"}, "reject 'seq_max_k1' does not exist"),
        ({"low": 3.0, "high": 2.0}, "low <= high"),
        ({"reject": "token_k1", "reject_low": 3.0}, "reject_low = 3.0 is above reject_high = 2.0"),
        ({"reject": "token_k2", "reject_high": 0.0}, "bounds above 0"),
    ],
)
def test_impossible_settings_are_refused(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Correction(**values)


def test_ratio_and_metrics_without_a_correction_do_not_change() -> None:
    """The engine's log-probabilities alone have no effect."""
    batch = arguments(1)
    plain = {name: value for name, value in batch.items() if name != "engine_logp"}
    one, two = policy_loss("delta", **batch), policy_loss("delta", **plain)
    assert one[0] == two[0]
    assert np.array_equal(one[1], two[1])
    assert Method("mean_removed", "uniform", "none", "token_mean").covariance == "none"
