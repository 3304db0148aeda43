"""Equality with other people's losses: formulas written out from what TRL and verl publish, on padded tensors.

Each formula is written here after the published one, with torch's autodiff for the gradient, and compared
with ours in value and in every derivative. The constants in which they differ from ours are named.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from delta_cli.credit import MiniBatch, Surrogate, group_advantages, method, policy_loss

from .samples import log_ratios, starts_of

TRL_ADVANTAGE_EPSILON = 1e-4  # ours and verl's: 1e-6
TRL_CISPO_BOUND = 5.0  # epsilon_high of its documentation; ours is called bound
VERL_MASKED_MEAN_EPSILON = 1e-8  # in the denominator; a relative 1e-8 / N
VERL_GSPO_CLAMP = 10.0  # of the sequence's log-ratio, from above; ours clamps every token's at 20

LENGTHS = [5, 1, 7, 3, 6, 2]
MAX_LENGTH = 9


@dataclass
class Padded:
    """A mini-batch as both libraries hold it: [R, T] with a mask; log-probabilities want a gradient."""

    logp: Tensor
    old: Tensor
    advantages: Tensor  # [R, 1]
    mask: Tensor
    reference: Tensor
    engine: Tensor
    entropies: Tensor


@dataclass
class Sample:
    """The same mini-batch flat, as ours takes it, and padded."""

    logp: np.ndarray
    old: np.ndarray
    advantages: np.ndarray
    starts: np.ndarray
    reference: np.ndarray
    engine: np.ndarray
    entropies: np.ndarray

    def padded(self) -> Padded:
        def pad(flat: np.ndarray) -> Tensor:
            rows = [torch.tensor(flat[a:b]) for a, b in zip(self.starts[:-1], self.starts[1:], strict=True)]
            return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)

        mask = pad(np.ones_like(self.logp))
        logp = pad(self.logp).requires_grad_()
        others = (pad(each) for each in (self.reference, self.engine, self.entropies))
        return Padded(logp, pad(self.old), torch.tensor(self.advantages)[:, None], mask, *others)


def sample(seed: int, wild: bool = True) -> Sample:
    """Log-ratios small, large and (where ``wild``) up to 15: below the clamp at 20, which TRL has not."""
    rng = np.random.default_rng(seed)
    starts = starts_of(LENGTHS)
    count = int(starts[-1])
    old = np.log(rng.uniform(0.02, 0.98, count))
    drift = np.clip(log_ratios(rng, count), -15, 15) if wild else rng.normal(0, 0.3, count)
    advantages = group_advantages(
        rng.integers(0, 2, len(LENGTHS)).astype(float) + rng.normal(0, 0.1, 6), [0] * 3 + [1] * 3
    )
    return Sample(
        logp=old + drift,
        old=old,
        advantages=advantages,
        starts=starts,
        reference=old + rng.normal(0, 0.4, count),
        engine=old + rng.normal(0, 0.4, count),
        entropies=rng.uniform(0, 2, count),
    )


def compare(preset: str, given: Sample, formula: Callable[[Padded], Tensor], **options: Any) -> None:
    """Value and derivatives to 1e-10 of their scale."""
    batch = given.padded()
    loss = formula(batch)
    loss.backward()
    assert batch.logp.grad is not None
    expected = batch.logp.grad[batch.mask.bool()].numpy()
    value, gradient = policy_loss(preset, given.logp, given.old, given.advantages, given.starts, **options)
    assert value == pytest.approx(loss.item(), rel=1e-9, abs=1e-10)
    np.testing.assert_allclose(gradient, expected, rtol=1e-9, atol=1e-10 * np.abs(expected).max())


# ------------------------------------------------------------------------------------------- TRL


def trl_ratio(b: Padded, sequence: bool = False) -> Tensor:
    log_ratio = b.logp - b.old
    if sequence:
        log_ratio = ((log_ratio * b.mask).sum(-1) / b.mask.sum(-1).clamp(min=1.0)).unsqueeze(-1)
    return torch.exp(log_ratio)


def trl_clipped(b: Padded, low: float, high: float, delta: float | None = None, sequence: bool = False) -> Tensor:
    """The token losses of grpo, dr_grpo, dapo and (by sequence) GSPO; delta bounds the ratio of both signs."""
    ratio = trl_ratio(b, sequence)
    clipped = torch.clamp(ratio, 1 - low, 1 + high)
    if delta is not None:
        ratio = torch.clamp(ratio, max=delta)
    return -torch.min(ratio * b.advantages, clipped * b.advantages)


def trl_kl(b: Padded) -> Tensor:
    return torch.exp(b.reference - b.logp) - (b.reference - b.logp) - 1


def trl_response_mean(b: Padded, token_loss: Tensor) -> Tensor:
    return ((token_loss * b.mask).sum(-1) / b.mask.sum(-1).clamp(min=1.0)).mean()


def trl_dapo_mean(b: Padded, token_loss: Tensor) -> Tensor:
    return (token_loss * b.mask).sum() / b.mask.sum()


def trl_dr_grpo_mean(b: Padded, token_loss: Tensor) -> Tensor:
    return (token_loss * b.mask).sum() / (len(token_loss) * MAX_LENGTH)


SEEDS = pytest.mark.parametrize("seed", range(8))


@SEEDS
def test_trl_grpo(seed: int) -> None:
    compare("grpo", sample(seed), lambda b: trl_response_mean(b, trl_clipped(b, 0.2, 0.2)))


@SEEDS
def test_trl_dr_grpo(seed: int) -> None:
    compare("dr_grpo", sample(seed), lambda b: trl_dr_grpo_mean(b, trl_clipped(b, 0.2, 0.2)), max_length=MAX_LENGTH)


@SEEDS
def test_trl_dapo_with_delta_10_has_our_dual_clip(seed: int) -> None:
    compare("dapo", sample(seed), lambda b: trl_dapo_mean(b, trl_clipped(b, 0.2, 0.28, delta=10.0)))


@SEEDS
def test_trl_dapo_without_delta_is_ours_without_dual_clip(seed: int) -> None:
    compare("dapo", sample(seed), lambda b: trl_dapo_mean(b, trl_clipped(b, 0.2, 0.28)), dual_clip=None)


def test_trls_default_without_dual_clip_points_elsewhere_on_extreme_ratios() -> None:
    """One token with A < 0 and a ratio above 10 decides on the whole gradient; without such a token nothing differs."""
    cosines: dict[bool, list[float]] = {False: [], True: []}
    for seed in range(12):
        given = sample(seed)
        one, other = (
            policy_loss("dapo", given.logp, given.old, given.advantages, given.starts, dual_clip=bound)[1]
            for bound in (None, 10.0)
        )
        negative = np.repeat(given.advantages, LENGTHS) < 0
        extreme = bool(np.any(negative & (given.logp - given.old > np.log(10))))
        cosines[extreme].append(float(one @ other / np.linalg.norm(one) / np.linalg.norm(other)))
    assert min(cosines[False]) > 1 - 1e-12
    assert max(cosines[True]) < 0.5
    assert len(cosines[True]) > 3


@SEEDS
def test_trl_sapo(seed: int) -> None:
    def formula(b: Padded) -> Tensor:
        tau = torch.where(
            b.advantages > 0, torch.tensor(1.0, dtype=torch.float64), torch.tensor(1.05, dtype=torch.float64)
        )
        return trl_response_mean(b, -torch.sigmoid(tau * (trl_ratio(b) - 1)) * 4 / tau * b.advantages)

    compare("sapo", sample(seed), formula)


@SEEDS
def test_trl_cispo(seed: int) -> None:
    def formula(b: Padded) -> Tensor:
        bounded = torch.clamp(trl_ratio(b), max=TRL_CISPO_BOUND).detach()
        return trl_dapo_mean(b, -bounded * b.advantages * b.logp)

    compare("cispo", sample(seed), formula)


@SEEDS
def test_trl_gspo(seed: int) -> None:
    """One ratio a sequence; a token loss [R, 1] under the mean over a response's tokens."""
    given = sample(seed, wild=False)
    formula = lambda b: trl_response_mean(b, trl_clipped(b, 3e-4, 4e-4, sequence=True).expand_as(b.mask))  # noqa: E731
    compare("gspo", given, formula)


@SEEDS
def test_trl_kl_and_truncated_importance_sampling(seed: int) -> None:
    def formula(b: Padded) -> Tensor:
        weight = torch.exp(b.old - b.engine).clamp(max=2.0)
        return trl_response_mean(b, trl_clipped(b, 0.2, 0.2) * weight + 0.05 * trl_kl(b))

    given = sample(seed)
    options = {"reference_logp": given.reference, "kl_coefficient": 0.05}
    compare("grpo", given, formula, engine_logp=given.engine, correction="decoupled_token_is", **options)


@SEEDS
def test_trl_forking_tokens_divide_by_all_tokens(seed: int) -> None:
    """Its threshold is a quantile; with 24 tokens, the upper 17/23 of them, it is the 18th largest, as ours."""
    given = sample(seed)
    count = len(given.logp)
    share = 6 / (count - 1)

    def formula(b: Padded) -> Tensor:
        threshold = torch.quantile(b.entropies[b.mask.bool()], 1 - share)
        high = (b.entropies * b.mask >= threshold - 1e-12) & b.mask.bool()
        return trl_dapo_mean(b, trl_clipped(b, 0.2, 0.28, delta=10.0) * high)

    options = {"entropies": given.entropies, "entropy_share": 7 / count}
    compare("dapo_ft", given, formula, entropy_mean="all", **options)
    whole = policy_loss("dapo_ft", given.logp, given.old, given.advantages, given.starts, **options)[1]
    part = policy_loss("dapo_ft", given.logp, given.old, given.advantages, given.starts, entropy_mean="all", **options)
    np.testing.assert_allclose(part[1], whole * 7 / count, rtol=1e-12)  # five times weaker at a share of a fifth


def test_trls_advantages_differ_by_their_epsilon_alone() -> None:
    rng = np.random.default_rng(0)
    rewards, groups = rng.normal(size=12), np.repeat([0, 1, 2], 4)
    grouped = torch.tensor(rewards).view(-1, 4)
    theirs = (grouped - grouped.mean(1, keepdim=True)) / (grouped.std(1, keepdim=True) + TRL_ADVANTAGE_EPSILON)
    scale = (grouped.std(1, keepdim=True) + TRL_ADVANTAGE_EPSILON) / (grouped.std(1, keepdim=True) + 1e-6)
    np.testing.assert_allclose(group_advantages(rewards, groups), (theirs * scale).flatten().numpy(), rtol=1e-12)
    assert np.abs(scale.numpy() - 1).max() < 5e-4


# ------------------------------------------------------------------------------------------ verl


def verl_mean(values: Tensor, mask: Tensor) -> Tensor:
    return (values * mask).sum() / (mask.sum() + VERL_MASKED_MEAN_EPSILON)


def verl_vanilla(b: Padded, low: float, high: float, c: float) -> Tensor:
    ratio = torch.exp(torch.clamp(b.logp - b.old, -20.0, 20.0))
    first = torch.maximum(-b.advantages * ratio, -b.advantages * torch.clamp(ratio, 1 - low, 1 + high))
    second = torch.min(-b.advantages * c, first)
    return torch.where(b.advantages < 0, second, first)


@SEEDS
def test_verl_dapo(seed: int) -> None:
    compare("dapo", sample(seed), lambda b: verl_mean(verl_vanilla(b, 0.2, 0.28, 10.0), b.mask))


@SEEDS
def test_verl_grpo_by_response_with_truncated_importance_sampling(seed: int) -> None:
    def formula(b: Padded) -> Tensor:
        losses = verl_vanilla(b, 0.2, 0.2, 3.0) * torch.clamp(torch.exp(b.old - b.engine), max=2.0)
        return ((losses * b.mask).sum(-1) / b.mask.sum(-1)).mean()

    given = sample(seed)
    compare("grpo", given, formula, dual_clip=3.0, engine_logp=given.engine, correction="decoupled_token_is")


@SEEDS
def test_verl_gspo(seed: int) -> None:
    def formula(b: Padded) -> Tensor:
        mean = ((b.logp - b.old) * b.mask).sum(-1) / b.mask.sum(-1).clamp(min=1)
        log_ratio = torch.clamp(b.logp - b.logp.detach() + mean.detach().unsqueeze(-1), max=VERL_GSPO_CLAMP)
        ratio = torch.exp(log_ratio)
        losses = torch.maximum(-b.advantages * ratio, -b.advantages * torch.clamp(ratio, 1 - 3e-4, 1 + 4e-4))
        return ((losses * b.mask).sum(-1) / b.mask.sum(-1)).mean()

    compare("gspo", sample(seed, wild=False), formula)


@SEEDS
def test_verl_cispo_has_a_lower_bound(seed: int) -> None:
    def formula(b: Padded) -> Tensor:
        ratio = torch.exp(torch.clamp(b.logp - b.old, -20.0, 20.0))
        return verl_mean(-torch.clamp(ratio, 1 - 0.2, 1 + 0.28).detach() * b.advantages * b.logp, b.mask)

    compare("cispo", sample(seed), formula, bound_low=0.8, bound=1.28)


@SEEDS
@pytest.mark.parametrize("packing", [[[0, 1], [2], [3, 4, 5]], [[5, 0, 3], [4, 2, 1]], [[0, 1, 2, 3, 4, 5]]])
def test_verl_means_over_packed_micro_batches(seed: int, packing: list[list[int]]) -> None:
    """The token mean of every micro-batch times its share of the mini-batch's responses, added up."""
    given = sample(seed)
    batch = given.padded()
    loss = torch.zeros((), dtype=torch.float64)
    for rows in packing:
        part = [getattr(batch, name)[rows] for name in ("logp", "old", "advantages", "mask")]
        piece = Padded(*part, *part[:3])
        loss = loss + verl_mean(verl_vanilla(piece, 0.2, 0.28, 10.0), piece.mask) * len(rows) / len(LENGTHS)
    loss.backward()
    assert batch.logp.grad is not None
    expected = batch.logp.grad[batch.mask.bool()].numpy()

    ours = Surrogate(
        method("dapo", aggregation="micro_batch_mean"), MiniBatch(given.old, given.advantages, given.starts)
    )
    value, gradient = 0.0, np.zeros_like(expected)
    for rows in packing:
        index = np.concatenate([np.arange(given.starts[row], given.starts[row + 1]) for row in rows])
        partial, gradient[index] = ours(given.logp[index], np.array(rows))
        value += partial
    assert value == pytest.approx(loss.item(), rel=1e-8)
    np.testing.assert_allclose(gradient, expected, rtol=1e-7, atol=1e-9 * np.abs(expected).max())
    if len(packing) == 1:  # then it is the token mean
        np.testing.assert_allclose(
            gradient, policy_loss("dapo", given.logp, given.old, given.advantages, given.starts)[1], rtol=1e-12
        )
