"""Every preset's loss and gradient against autograd of the plain formula and against central differences."""

from __future__ import annotations

from itertools import product
from typing import Any, get_args

import numpy as np
import pytest
import torch

from backends.interface import token_index
from delta_cli.credit import PRESETS, Correction, Method, MiniBatch, Surrogate, group_advantages, method, policy_loss
from delta_cli.credit.advantages import ADVANTAGES
from delta_cli.credit.methods import AggregationKind, CreditKind, GateKind

from . import oracle
from .samples import log_ratios, starts_of

LENGTHS = [6, 1, 0, 11, 3, 1, 8]
ADVANTAGES_R = [0.9, -1.4, 0.5, -0.3, 0.0, 2.0, 1e-3]


def case(seed: int, lengths: list[int] = LENGTHS, advantages: list[float] = ADVANTAGES_R) -> dict[str, Any]:
    """Arguments of policy_loss, every field filled."""
    rng = np.random.default_rng(seed)
    tokens = sum(lengths)
    logp_old = np.log(rng.uniform(0.01, 0.99, tokens))
    return {
        "logp": logp_old + log_ratios(rng, tokens),
        "logp_old": logp_old,
        "advantages": np.array(advantages),
        "starts": starts_of(lengths),
        "entropies": rng.integers(0, 6, tokens) / 2.0,  # with ties
        "max_length": 16,
    }


def extras(seed: int, arguments: dict[str, Any]) -> dict[str, Any]:
    rng = np.random.default_rng(seed + 100)
    tokens = len(arguments["logp"])
    return {
        "weights": rng.uniform(0.8, 1.2, tokens),
        "kept": np.array([True, True, True, True, False, True, False])[: len(arguments["advantages"])],
        "reference_logp": arguments["logp"] + rng.normal(size=tokens),
        "kl_coefficient": 0.3,
        "engine_logp": arguments["logp_old"] + rng.normal(size=tokens),
        "correction": Correction("token", high=1.5),
    }


def as_oracle(arguments: dict[str, Any]) -> oracle.Batch:
    def tensor(name: str) -> torch.Tensor | None:
        return None if name not in arguments else torch.from_numpy(np.asarray(arguments[name], np.float64))

    return oracle.Batch(
        tensor("logp"),
        tensor("logp_old"),
        arguments["advantages"].tolist(),
        arguments["starts"].tolist(),
        weights=tensor("weights"),
        entropies=tensor("entropies"),
        kept=arguments["kept"].tolist() if "kept" in arguments else None,
        max_length=arguments["max_length"],
        reference=tensor("reference_logp"),
        kl=arguments.get("kl_coefficient", 0.0),
        engine=tensor("engine_logp"),
        cap=arguments["correction"].high if "correction" in arguments else None,
    )


def compare(preset: str, arguments: dict[str, Any]) -> None:
    loss, gradient = policy_loss(preset, **arguments)
    true_loss, true_gradient = oracle.loss_and_gradient(preset, as_oracle(arguments))
    assert loss == pytest.approx(true_loss, rel=1e-9, abs=1e-9)
    np.testing.assert_allclose(gradient, true_gradient, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("seed", range(5))
def test_loss_and_gradient_are_those_of_the_formula(preset: str, seed: int) -> None:
    compare(preset, case(seed))


@pytest.mark.parametrize("threshold", [1.1, 2.0, 5.0])
@pytest.mark.parametrize("seed", range(3))
def test_fipo_with_a_threshold_below_the_dual_clip(threshold: float, seed: int) -> None:
    """Where the ratio is above the dual clip the gradient is 0 whatever the weight; below it, the weight shows."""
    arguments = case(seed)
    loss, gradient = policy_loss("fipo", **arguments, future_ratio=threshold)
    true_loss, true_gradient = oracle.loss_and_gradient("fipo", as_oracle(arguments), threshold=threshold)
    assert loss == pytest.approx(true_loss, rel=1e-9, abs=1e-9)
    np.testing.assert_allclose(gradient, true_gradient, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("preset", sorted(PRESETS.keys() - {"gspo"}))
@pytest.mark.parametrize("seed", range(3))
def test_with_everything_that_combines(preset: str, seed: int) -> None:
    """Weights, dropped responses, KL and the importance cap at once; GSPO's weights have a test of their own."""
    arguments = case(seed)
    compare(preset, arguments | extras(seed, arguments))


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("option", ["kept", "kl"])
def test_options_of_every_preset(preset: str, option: str) -> None:
    arguments = case(9)
    more = extras(9, arguments)
    names = ["kept"] if option == "kept" else ["reference_logp", "kl_coefficient"]
    compare(preset, arguments | {name: more[name] for name in names})


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize(
    ("lengths", "advantages"),
    [
        ([1, 1, 1], [1.0, -1.0, 0.0]),
        ([0, 3, 0], [1.0, -1.0, 2.0]),
        ([4, 4], [0.0, 0.0]),
        ([5], [-2.0]),
        ([0], [1.0]),
        ([], []),
    ],
    ids=["one token each", "empty responses", "A = 0", "one response", "no token", "no response"],
)
def test_edges(preset: str, lengths: list[int], advantages: list[float]) -> None:
    compare(preset, case(4, lengths, advantages))


@pytest.mark.parametrize("preset", PRESETS)
def test_nothing_kept_is_a_loss_of_zero(preset: str) -> None:
    arguments = case(2)
    loss, gradient = policy_loss(preset, **arguments, kept=np.zeros(len(LENGTHS), bool))
    assert loss == 0
    assert not gradient.any()


@pytest.mark.parametrize(
    ("changes", "moves"),
    [
        ({}, True),
        ({"advantages": np.zeros(3)}, False),
        ({"kept": np.array([False, True, True])}, False),
        ({"weights": np.array([0.0, 0.0, 1.0, 1.0])}, False),
        ({"advantages": np.zeros(3), "reference_logp": np.zeros(4), "kl_coefficient": 0.1}, True),
    ],
    ids=["an advantage", "none", "its response left out", "without weight", "KL"],
)
def test_a_mini_batch_that_cannot_move_the_weights_is_known_beforehand(changes: dict[str, Any], moves: bool) -> None:
    batch = {"advantages": np.array([1.0, 0.0, 0.0]), "starts": starts_of([2, 1, 1])} | changes
    surrogate = Surrogate(method("dapo"), MiniBatch(np.full(4, -1.0), **batch))
    assert surrogate.has_gradient is moves
    assert surrogate(np.full(4, -1.1), np.arange(3))[1].any() == moves


@pytest.mark.parametrize("preset", sorted(PRESETS.keys() - {"cispo", "fipo"}))
def test_central_differences(preset: str) -> None:
    """CISPO and FIPO hold part of the loss constant: autograd, above, is their test."""
    arguments = case(7)
    logp, gradient = arguments.pop("logp"), policy_loss(preset, **case(7))[1]
    step = 1e-6
    for t in range(len(logp)):
        at = [policy_loss(preset, logp + sign * step * (np.arange(len(logp)) == t), **arguments)[0] for sign in (1, -1)]
        difference = (at[0] - at[1]) / (2 * step)
        resolution = 1e-15 * max(abs(at[0]), 1) / step  # what is left of so large a loss
        assert gradient[t] == pytest.approx(difference, rel=1e-5, abs=1e-6 + 10 * resolution)


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("seed", range(3))
def test_any_partition_into_micro_batches(preset: str, seed: int) -> None:
    arguments = case(seed)
    arguments |= extras(seed, arguments)
    whole_loss, whole = policy_loss(preset, **arguments)
    logp = arguments.pop("logp")
    surrogate = Surrogate(method(preset), MiniBatch(**arguments))
    rng = np.random.default_rng(seed)
    rows = rng.permutation(len(LENGTHS))
    loss, gradient = 0.0, np.zeros(len(logp))
    for part in np.split(rows, np.sort(rng.integers(0, len(rows) + 1, 3))):
        index = [t for r in part for t in range(arguments["starts"][r], arguments["starts"][r + 1])]
        part_loss, part_gradient = surrogate(logp[index], part)
        loss += part_loss
        gradient[index] = part_gradient
    assert loss * surrogate.scale == pytest.approx(whole_loss, rel=1e-12)
    np.testing.assert_allclose(gradient * surrogate.scale, whole, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("preset", PRESETS)
def test_two_ranks_sum_to_one(preset: str) -> None:
    """Each rank sees some responses of the mini-batch; losses, and the totals that FIPO's scale needs, add up.

    Two dual-clipped tokens in a response make FIPO leave it out, so the scale is not 1.
    """
    arguments = case(5)
    chosen = method(preset)
    if preset == "fipo":
        first = arguments["starts"][3]  # the response of eleven tokens, with a negative advantage
        tokens = slice(first, first + 2)
        arguments["logp"][tokens] = arguments["logp_old"][tokens] + 3
    whole_loss, whole = policy_loss(preset, **arguments)
    logp = arguments.pop("logp")
    ranks = [Surrogate(chosen, MiniBatch(**arguments)) for _ in range(2)]
    loss, gradient = 0.0, np.zeros_like(logp)
    for surrogate, rows in zip(ranks, (np.array([0, 3, 4]), np.array([1, 2, *range(5, len(LENGTHS))])), strict=True):
        index = token_index(arguments["starts"], rows)
        part_loss, gradient[index] = surrogate(logp[index], rows)
        loss += part_loss
    total = ranks[0].totals + ranks[1].totals
    for surrogate in ranks:
        surrogate.totals = total
        assert (surrogate.scale != 1) == (preset == "fipo")
        assert loss * surrogate.scale == pytest.approx(whole_loss, rel=1e-12)
        np.testing.assert_allclose(gradient * surrogate.scale, whole, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("preset", PRESETS)
def test_responses_that_teach_nothing_need_not_be_shown(preset: str, weighted: bool) -> None:
    """Loss, gradient and scale are the same without them; only where a KL term pulls is each one needed."""
    arguments = case(5)
    if preset == "fipo":  # a response leaves, so the scale is not 1
        tokens = slice(arguments["starts"][3], arguments["starts"][3] + 2)
        arguments["logp"][tokens] = arguments["logp_old"][tokens] + 3
    if weighted:
        arguments |= extras(5, arguments) | {"kl_coefficient": 0.0}
    logp = arguments.pop("logp")
    every, some = (Surrogate(method(preset), MiniBatch(**arguments)) for _ in range(2))
    rows = np.flatnonzero(some.learned_from)
    assert not {2, 4} & set(rows.tolist()), "one has no tokens, the other no advantage"
    index = token_index(arguments["starts"], rows)
    loss, gradient = every(logp, np.arange(len(LENGTHS)))
    fewer, part = some(logp[index], rows)
    assert fewer == pytest.approx(loss, rel=1e-12)
    np.testing.assert_allclose(part, gradient[index], rtol=1e-12, atol=0)
    assert not np.delete(gradient, index).any()
    assert some.scale == every.scale
    if weighted:
        pulled = Surrogate(method(preset), MiniBatch(**arguments | {"kl_coefficient": 0.3}))
        assert set(rows.tolist()) <= set(np.flatnonzero(pulled.learned_from).tolist())


@pytest.mark.parametrize("advantage", ADVANTAGES)
def test_every_combination_runs(advantage: Any) -> None:
    """Log-ratios of +1000 and −1000 in a long response included."""
    advantages = group_advantages([1, 0, 0.5, 0.2, 1, 1, 0, 0], [0, 0, 0, 0, 1, 1, 2, 3], advantage)
    arguments = case(1, [*LENGTHS, 120], (advantages - 0.1).tolist())
    arguments["logp"][:2] = arguments["logp_old"][:2] + np.array([1000, -1000])
    arguments["logp"][-120:] = arguments["logp_old"][-120:] + 19
    logp = arguments.pop("logp")
    arguments["weights"] = np.linspace(0.8, 1.2, len(logp))
    batch = MiniBatch(**arguments, kl_coefficient=0.1, reference_logp=logp - 500.0)
    for options in product(get_args(CreditKind), get_args(GateKind), get_args(AggregationKind), [None, 10.0]):
        credit, gate, aggregation, dual_clip = options
        surrogate = Surrogate(Method(advantage, credit, gate, aggregation, dual_clip=dual_clip), batch)
        loss, gradient = surrogate(logp, np.arange(len(arguments["advantages"])))
        assert gradient.shape == logp.shape
        assert np.isfinite([loss, surrogate.scale, *gradient]).all(), options


def test_totals_count_what_was_seen() -> None:
    """Six tokens of A = 1 at ratios 1, 1.2, 1.5, 2 (closed twice), of A = −1 at 0.5 (closed) and 11 (dual)."""
    ratios = np.array([1.0, 1.2, 1.5, 2.0, 0.5, 11.0])
    batch = MiniBatch(np.full(6, -1.0), np.array([1.0, -1.0]), np.array([0, 4, 6]))
    surrogate = Surrogate(method("dapo"), batch)
    surrogate(-1.0 + np.log(ratios), np.array([1, 0])[::-1])
    assert (surrogate.totals.tokens, surrogate.totals.closed) == (6, 4)
    assert surrogate.totals.ratio_gap == pytest.approx(np.log(11))
    assert surrogate.totals.kl_old == pytest.approx(sum(r - 1 - np.log(r) for r in ratios))
    surrogate.restart()
    assert surrogate.totals.tokens == 0


def test_extreme_kl_is_finite_and_pulls_toward_the_reference() -> None:
    logp = np.array([-1.0, -1.0])
    batch = MiniBatch(logp, np.zeros(1), np.array([0, 2]), reference_logp=np.array([-3.0, -0.2]), kl_coefficient=1.0)
    _, gradient = Surrogate(method("dapo"), batch)(logp, np.array([0]))
    assert gradient[0] > 0 > gradient[1]
