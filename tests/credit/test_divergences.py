"""KL estimates, the entropy bonus and the covariance methods against autograd in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from delta_cli.credit import Method, MiniBatch, Surrogate, method, policy_loss
from delta_cli.credit.divergences import KL_ESTIMATORS, direction
from delta_cli.credit.entropy import clip_cov_tokens, covariances, entropy_estimate, kl_cov_tokens, next_coefficient

from .samples import starts_of

EXACT = {"rtol": 1e-12, "atol": 1e-12}
STARTS = starts_of([3, 0, 5, 2])


def published(name: str, logp: torch.Tensor, reference: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """The estimates as Schulman, verl (kl_penalty) and TRL (use_bias_correction_kl) write them."""
    x = logp - reference
    k3 = (reference - logp).exp() - (reference - logp) - 1
    straight = {
        "k1": x,
        "k2": 0.5 * x.square(),
        "k3": k3,
        "abs": x.abs(),
        "low_var_kl": k3.clamp(-10, 10),
        "k3_bias_corrected": k3 * (logp - old).exp(),
    }
    if name in straight:
        return straight[name]
    value, slope = straight[name[:-1]], straight["k2"]
    return slope - slope.detach() + value.detach()


@pytest.mark.parametrize("aggregation", ["token_mean", "response_mean"])
@pytest.mark.parametrize("name", KL_ESTIMATORS)
def test_every_kl_estimate_equals_autograd(name: Any, aggregation: Any) -> None:
    rng = np.random.default_rng(3)
    old = np.log(rng.uniform(0.05, 0.95, 10))
    logp, reference = old + rng.normal(0, 0.3, 10), old + rng.normal(0, 1.5, 10)
    reference[4] = logp[4] + 3.5  # beyond the limit of low_var_kl
    found = policy_loss(
        "reinforce", logp, old, np.zeros(4), STARTS,
        reference_logp=reference, kl_coefficient=0.7, kl_estimator=name, aggregation=aggregation,
    )  # fmt: skip
    tensor = torch.tensor(logp, requires_grad=True)
    terms = published(name, tensor, torch.tensor(reference), torch.tensor(old))
    parts = [terms[STARTS[r] : STARTS[r + 1]] for r in range(4)]
    mean = terms.mean() if aggregation == "token_mean" else sum(part.mean() for part in parts if len(part)) / 4
    (gradient,) = torch.autograd.grad(0.7 * mean, tensor)
    np.testing.assert_allclose(found[0], 0.7 * float(mean.detach()), **EXACT)
    np.testing.assert_allclose(found[1], gradient.numpy(), **EXACT)


def categorical(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of five tokens with their log-probabilities."""
    logits = torch.tensor(np.random.default_rng(seed).normal(0, 1.5, 5), requires_grad=True)
    return logits, logits.log_softmax(0)


def mean_gradient(logits: torch.Tensor, logp: torch.Tensor, slopes: np.ndarray) -> np.ndarray:
    """The gradient with respect to the logits of Σ p·value, each sampled token with its derivative, p held constant."""
    total = (logp.detach().exp() * torch.tensor(slopes) * logp).sum()
    (found,) = torch.autograd.grad(total, logits, retain_graph=True)
    return found.numpy()


@pytest.mark.parametrize("seed", range(3))
def test_the_mean_over_tokens_of_the_bonus_is_the_entropy_and_its_gradient(seed: int) -> None:
    logits, logp = categorical(seed)
    entropy = -(logp.exp() * logp).sum()
    (true,) = torch.autograd.grad(entropy, logits, retain_graph=True)
    flat = logp.detach().numpy()
    value, slope = entropy_estimate(flat, np.zeros(5), np.full(5, entropy.item()))
    np.testing.assert_allclose(np.dot(np.exp(flat), value), entropy.item(), **EXACT)
    np.testing.assert_allclose(mean_gradient(logits, logp, slope), true.numpy(), **EXACT)


@pytest.mark.parametrize("name", ["k2", "k1+", "k3+", "k3_bias_corrected"])
def test_the_mean_gradient_of_these_is_that_of_the_kl_divergence(name: str) -> None:
    """And that of the others is not, which is why they exist."""
    logits, logp = categorical(1)
    reference = torch.tensor(np.random.default_rng(9).normal(0, 1, 5)).log_softmax(0)
    (true,) = torch.autograd.grad((logp.exp() * (logp - reference)).sum(), logits, retain_graph=True)
    x = logp.detach().numpy() - reference.numpy()
    slopes = {each: KL_ESTIMATORS[each](x, np.zeros(5))[1] for each in KL_ESTIMATORS}
    np.testing.assert_allclose(mean_gradient(logits, logp, slopes[name]), true.numpy(), **EXACT)
    for biased in ("k1", "k3", "abs"):
        assert np.abs(mean_gradient(logits, logp, slopes[biased]) - true.numpy()).max() > 0.01


def test_the_bonus_in_a_loss_equals_autograd() -> None:
    """A mean over tokens whatever the aggregation, as in TRL; without any advantage too."""
    rng = np.random.default_rng(5)
    old = np.log(rng.uniform(0.05, 0.95, 10))
    logp, entropies = old + rng.normal(0, 0.3, 10), rng.uniform(0, 2, 10)
    for aggregation in ("token_mean", "response_mean", "response_sum"):
        loss, gradient = policy_loss(
            "dapo", logp, old, np.zeros(4), STARTS,
            entropies=entropies, entropy_coefficient=0.4, aggregation=aggregation,
        )  # fmt: skip
        tensor = torch.tensor(logp, requires_grad=True)
        H = torch.tensor(entropies)
        mean = ((tensor - torch.tensor(old)).exp() * (1 - H - tensor) + H - 1).mean()
        (true,) = torch.autograd.grad(-0.4 * mean, tensor)
        np.testing.assert_allclose(loss, -0.4 * float(mean.detach()), **EXACT)
        np.testing.assert_allclose(gradient, true.numpy(), **EXACT)


def test_a_bonus_alone_is_something_to_learn_from() -> None:
    old = np.full(3, -1.0)
    batch = MiniBatch(old, np.zeros(1), starts_of([3]), entropies=np.ones(3), entropy_coefficient=0.1)
    assert Surrogate(method("dapo"), batch).has_gradient


def test_the_coefficient_follows_the_target() -> None:
    """TRL's rule: up at or below the target, down above it, within its limits."""
    coefficient, seen = 0.01, []
    for entropy in (0.5, 0.2, 0.1, 0.3, 0.3, 0.3, 0.3):
        coefficient = next_coefficient(coefficient, entropy, 0.2, 0.005, 0.018)
        seen.append(round(coefficient, 6))
    assert seen == [0.005, 0.01, 0.015, 0.01, 0.005, 0.0, 0.0]
    assert next_coefficient(0.017, 0.0, 0.2, 0.005, 0.018) == 0.018


# ------------------------------------------------------------------------------------- covariance


def test_covariances_are_those_of_numpy() -> None:
    rng = np.random.default_rng(1)
    logp, advantages = rng.normal(size=50), rng.normal(size=50)
    counted = rng.random(50) < 0.8
    found = covariances(logp, advantages, counted)
    np.testing.assert_allclose(found[counted].mean(), np.cov(logp[counted], advantages[counted], ddof=0)[0, 1], **EXACT)


def test_clip_cov_chooses_only_between_its_bounds_and_no_more_than_its_share() -> None:
    covariance = np.array([1.0, np.nextafter(1, 2), 2.0, 3.0, 4.0, 5.0, 9.0, 3.0])
    counted = np.array([True] * 7 + [False])
    rng = np.random.default_rng(0)
    assert np.flatnonzero(clip_cov_tokens(covariance, counted, 1.0, 1.0, 5.0, rng)).tolist() == [1, 2, 3, 4]
    assert clip_cov_tokens(covariance, counted, 0.3, 1.0, 5.0, rng).sum() == 2
    assert clip_cov_tokens(covariance, counted, 1e-4, 1.0, 5.0, rng).sum() == 1
    assert not clip_cov_tokens(covariance, counted, 1.0, 5.0, 9.0, rng).any()
    chosen = {int(np.flatnonzero(clip_cov_tokens(covariance, counted, 0.1, 1.0, 5.0, rng))[0]) for _ in range(50)}
    assert chosen == {1, 2, 3, 4}


def test_rounding_has_no_direction() -> None:
    """Else the first update would go one way or the other by the number of processes."""
    np.testing.assert_array_equal(direction(np.array([-1e-6, 1e-6, 0.0, -1e-3, 1e-3])), [0, 0, 0, -1, 1])


def test_kl_cov_chooses_the_largest() -> None:
    covariance = np.array([1.0, 5.0, 7.0, 3.0, 9.0])
    counted = np.array([True, True, True, True, False])
    assert np.flatnonzero(kl_cov_tokens(covariance, counted, 0.5)).tolist() == [1, 2]
    assert np.flatnonzero(kl_cov_tokens(covariance, counted, 1e-4)).tolist() == [2]


def test_clip_cov_takes_the_gradient_of_exactly_the_chosen_tokens_and_counts_them() -> None:
    rng = np.random.default_rng(2)
    logp = np.log(rng.uniform(0.01, 0.99, 60))
    advantages = rng.normal(0, 2, 6)
    batch = MiniBatch(logp, advantages, starts_of([10] * 6), seed=3)
    plain = Surrogate(method("grpo", aggregation="token_mean"), batch)
    clipped = Surrogate(method("clip_cov", covariance_share=0.1, covariance_low=0.1), batch)
    _, before = plain(logp, np.arange(6))
    _, after = clipped(logp, np.arange(6))
    lost = after == 0
    assert lost.sum() == 6 == clipped.totals.closed
    np.testing.assert_array_equal(after[~lost], before[~lost])
    covariance = covariances(logp, np.repeat(advantages, 10), np.ones(60, bool))
    assert ((covariance[lost] > 0.1) & (covariance[lost] < 5)).all()


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"covariance": "both"}, "covariance 'both' does not exist"),
        ({"covariance_share": 0.0}, "covariance_share must lie"),
        ({"covariance_low": 6.0}, "covariance_low < covariance_high"),
    ],
)
def test_impossible_covariances_are_refused(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Method("mean_removed", "uniform", "clip", "token_mean", **values)
