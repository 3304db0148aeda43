"""What sets each method apart, by hand-worked cases."""

from __future__ import annotations

import numpy as np
import pytest

from delta_cli.credit import PRESETS, Method, method, policy_loss
from delta_cli.credit.gates import GateInput, clip, sequence_clip, soft

from .samples import starts_of

LOGP_OLD = np.array([-0.5, -2.0, -1.0, -0.1, -3.0, -0.7])
STARTS = np.array([0, 2, 6])


@pytest.mark.parametrize("preset", ["dapo", "delta", "fipo", "reinforce", "cispo"])
def test_on_policy_gradient_is_minus_the_advantage_over_all_tokens(preset: str) -> None:
    _, gradient = policy_loss(preset, LOGP_OLD, LOGP_OLD, [1.5, -0.5], STARTS)
    np.testing.assert_allclose(gradient, [-1.5 / 6] * 2 + [0.5 / 6] * 4, rtol=1e-14)


@pytest.mark.parametrize("preset", ["grpo", "sapo", "gspo"])
def test_on_policy_gradient_of_a_mean_over_responses(preset: str) -> None:
    _, gradient = policy_loss(preset, LOGP_OLD, LOGP_OLD, [1.5, -0.5], STARTS)
    np.testing.assert_allclose(gradient, [-1.5 / 4] * 2 + [0.5 / 8] * 4, rtol=1e-14)


def test_delta_weighs_each_tokens_gradient() -> None:
    weights = np.array([0.8, 1.2, 1.0, 1.1, 0.9, 1.0])
    _, gradient = policy_loss("delta", LOGP_OLD, LOGP_OLD, [1.5, -0.5], STARTS, weights=weights)
    np.testing.assert_allclose(gradient, weights * [-0.25, -0.25, 1 / 12, 1 / 12, 1 / 12, 1 / 12], rtol=1e-14)


# -------------------------------------------------------------------------------------- gates


def gate_input(ratios: list[float], advantage: float, lengths: list[int] | None = None) -> GateInput:
    delta = np.log(ratios)
    return GateInput(delta - 1, delta, np.full(len(delta), advantage), np.array(lengths or [len(delta)]))


def test_clip_by_hand() -> None:
    dapo = PRESETS["dapo"]
    up = clip(gate_input([0.5, 1.0, 1.27, 1.29, 50], 2.0), dapo)
    np.testing.assert_allclose(up.value, [1.0, 2.0, 2.54, 2.56, 2.56], rtol=1e-14)
    np.testing.assert_allclose(up.slope, [1.0, 2.0, 2.54, 0, 0], rtol=1e-14)
    down = clip(gate_input([0.5, 0.9, 1.5, 9.9, 10.1], -2.0), dapo)
    np.testing.assert_allclose(down.value, [-1.6, -1.8, -3.0, -19.8, -20.0], rtol=1e-14)
    np.testing.assert_allclose(down.slope, [0, -1.8, -3.0, -19.8, 0], rtol=1e-14)
    assert down.closed.tolist() == [True, False, False, False, True]
    assert clip(gate_input([10.1], -2.0), PRESETS["grpo"]).slope[0] == pytest.approx(-20.2)  # no dual clip


@pytest.mark.parametrize("tau", [0.1, 1.0, 1.05, 7.0])
@pytest.mark.parametrize("advantage", [2.5, -0.4])
def test_sapo_is_the_plain_gradient_at_ratio_one(tau: float, advantage: float) -> None:
    chosen = method("sapo", tau_positive=tau, tau_negative=tau)
    assert soft(gate_input([1.0], advantage), chosen).slope[0] == pytest.approx(advantage, rel=1e-14)


def test_sapo_fades_out_where_a_clip_would_cut() -> None:
    """At r = 2, s = 0.7310585786 and the slope is 4·s·(1 − s)·2; at r = 8 little is left, but not nothing."""
    slopes = soft(gate_input([2.0, 8.0], 1.0), PRESETS["sapo"]).slope
    assert slopes[0] == pytest.approx(8 * 0.7310585786 * 0.2689414214, rel=1e-9)
    assert 0 < slopes[1] < 0.03


def test_gspo_opens_and_closes_for_whole_responses() -> None:
    """Ratios 2 and 1/2 cancel in the sequence: both get s·A = A, though a clip on tokens would close one."""
    result = sequence_clip(gate_input([2.0, 0.5, 1.01, 1.0], 1.0, [2, 2]), PRESETS["gspo"])
    np.testing.assert_allclose(result.slope, [1, 1, 0, 0], rtol=1e-14)
    np.testing.assert_allclose(result.value, [1, 1, 1.0004, 1.0004], rtol=1e-14)
    assert result.closed.tolist() == [False, False, True, True]


def test_gspo_shares_one_gradient_inside_a_response() -> None:
    delta = np.array([1e-4, -2e-4, 2e-4, 1e-4, 0.0, 1e-4])
    _, gradient = policy_loss("gspo", LOGP_OLD + delta, LOGP_OLD, [1.0, -1.0], STARTS)
    np.testing.assert_allclose(gradient[:2], -np.exp(delta[:2].mean()) / (2 * 2), rtol=1e-14)
    np.testing.assert_allclose(gradient[2:], np.exp(delta[2:].mean()) / (2 * 4), rtol=1e-14)


def test_weights_of_gspo_scale_each_tokens_share() -> None:
    weights = np.linspace(0.5, 1.5, 6)
    plain = policy_loss("gspo", LOGP_OLD, LOGP_OLD, [1.0, -1.0], STARTS)[1]
    np.testing.assert_allclose(
        policy_loss("gspo", LOGP_OLD, LOGP_OLD, [1.0, -1.0], STARTS, weights=weights)[1], plain * weights, rtol=1e-14
    )


def test_cispo_never_loses_a_token() -> None:
    ratios = np.array([1e-3, 0.5, 1.0, 4.9, 5.1, np.exp(25)])
    _, gradient = policy_loss("cispo", LOGP_OLD + np.log(ratios), LOGP_OLD, [1.0, -1.0], STARTS)
    np.testing.assert_allclose(gradient * 6, [-1e-3, -0.5, 1.0, 4.9, 5.0, 5.0], rtol=1e-12)


# --------------------------------------------------------------------------------------- FIPO


@pytest.mark.parametrize("seed", range(3))
def test_fipo_equals_dapo_while_the_policy_has_not_moved(seed: int) -> None:
    rng = np.random.default_rng(seed)
    logp_old, starts = -rng.exponential(size=40), starts_of([10, 1, 0, 29])
    advantages = rng.normal(size=4)
    fipo, dapo = (policy_loss(name, logp_old, logp_old, advantages, starts) for name in ("fipo", "dapo"))
    assert fipo[0] == dapo[0]
    np.testing.assert_array_equal(fipo[1], dapo[1])


def test_fipo_weights_by_hand() -> None:
    """One response, delta 0.1 at its last token 32 tokens after the first: it counts half there."""
    delta = np.zeros(33)
    delta[-1] = 0.1
    _, gradient = policy_loss("fipo", delta - 1, np.full(33, -1.0), [1.0], [0, 33])
    expected = np.exp(0.1 * 2 ** (-np.arange(32, -1, -1) / 32)) * np.exp(delta) / 33
    np.testing.assert_allclose(-gradient, expected, rtol=1e-12)
    assert gradient[0] * -33 == pytest.approx(np.exp(0.05), rel=1e-12)


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("later", [0.1, 1.05], ids=["future below 1", "future above 1.2"])
def test_fipo_weights_past_the_threshold_are_one(advantage: float, later: float) -> None:
    """Ratio 3 at the first token, which only the threshold 2 calls too large, and only where A < 0.

    Its own weight: exp(F) with F = ln 3 + 2^(−1/32)·ln later, clamped to [1, 1.2], and where it is too
    large that once more to [0.8, 1], which leaves 1 and nothing else.
    """
    delta, bounds = np.log([3.0, later]), {"eps_low": 0.99, "eps_high": 9.0}  # a clip that cuts nothing off here
    inside = 1.2 if later > 1 else 1.0
    own = {10.0: inside, 2.0: 1.0 if advantage < 0 else inside}
    for threshold, weight in own.items():
        _, gradient = policy_loss(
            "fipo", delta - 1, np.full(2, -1.0), [advantage], [0, 2], future_ratio=threshold, **bounds
        )
        expected = [3.0 * weight, later * max(1.0, later)]
        np.testing.assert_allclose(gradient * 2 / -advantage, expected, rtol=1e-12)


@pytest.mark.parametrize(("clipped_tokens", "stays"), [(1, True), (2, False)])
def test_fipo_drops_a_response_with_more_than_one_dual_clipped_token(clipped_tokens: int, stays: bool) -> None:
    """The other response's gradient is then a mean over its own two tokens, not over all six."""
    delta = np.zeros(6)
    delta[2 : 2 + clipped_tokens] = np.log(11)
    loss, gradient = policy_loss("fipo", LOGP_OLD + delta, LOGP_OLD, [1.0, -1.0], STARTS)
    assert gradient[2:].any() == stays
    np.testing.assert_allclose(gradient[:2], -1 / (6 if stays else 2), rtol=1e-12)
    if not stays:
        assert loss == pytest.approx(-1, rel=1e-12)


def test_fipo_with_every_response_dropped() -> None:
    loss, gradient = policy_loss("fipo", LOGP_OLD + 3, LOGP_OLD, [-1.0, -1.0], STARTS)
    assert loss == 0
    assert not gradient.any()


# ---------------------------------------------------------------------- aggregation and options


def test_forking_tokens_are_all_that_counts() -> None:
    """20 % of 6 tokens is two; entropy 2 is the second highest and has a tie: three are kept."""
    entropies = np.array([2.0, 0.1, 3.0, 2.0, 0.2, 1.9])
    loss, gradient = policy_loss("dapo_ft", LOGP_OLD, LOGP_OLD, [1.5, -0.5], STARTS, entropies=entropies)
    np.testing.assert_allclose(gradient, [-1.5 / 3, 0, 0.5 / 3, 0.5 / 3, 0, 0], rtol=1e-14)
    assert loss == pytest.approx(-(1.5 - 0.5 - 0.5) / 3)


def test_entropy_of_dropped_responses_does_not_take_a_place() -> None:
    entropies = np.array([9.0, 9.0, 0.4, 0.3, 0.2, 0.1])
    _, gradient = policy_loss(
        "dapo_ft", LOGP_OLD, LOGP_OLD, [1.0, -1.0], STARTS, entropies=entropies, kept=[False, True]
    )
    np.testing.assert_allclose(gradient, [0, 0, 1, 0, 0, 0], rtol=1e-14)


def test_dr_grpo_divides_by_a_constant() -> None:
    _, gradient = policy_loss("dr_grpo", LOGP_OLD, LOGP_OLD, [1.5, -0.5], STARTS, max_length=50)
    np.testing.assert_allclose(gradient, [-1.5 / 100] * 2 + [0.5 / 100] * 4, rtol=1e-14)


def test_rloo_sums_a_responses_tokens() -> None:
    _, gradient = policy_loss("rloo", LOGP_OLD, LOGP_OLD, [1.5, -0.5], STARTS)
    np.testing.assert_allclose(gradient, [-1.5 / 2] * 2 + [0.5 / 2] * 4, rtol=1e-14)


@pytest.mark.parametrize("preset", PRESETS)
def test_dropped_responses_leave_loss_and_denominator(preset: str) -> None:
    """What is left is the batch without them."""
    rng = np.random.default_rng(0)
    starts = starts_of([4, 7, 3])
    logp_old, entropies = -rng.exponential(size=14), rng.random(14)
    logp, advantages = logp_old + 0.3 * rng.normal(size=14), rng.normal(size=3)
    index = np.r_[0:4, 11:14]
    loss, gradient = policy_loss(
        preset, logp, logp_old, advantages, starts, entropies=entropies, max_length=9, kept=[True, False, True]
    )
    alone_loss, alone = policy_loss(
        preset, logp[index], logp_old[index], advantages[[0, 2]], [0, 4, 7], entropies=entropies[index], max_length=9
    )
    assert loss == pytest.approx(alone_loss, rel=1e-12)
    np.testing.assert_allclose(gradient[index], alone, rtol=1e-12)
    assert not gradient[4:11].any()


def test_kl_by_hand() -> None:
    """k3 at ref − logp = ln 2: 2 − ln 2 − 1, slope −(2 − 1); the advantage is 0."""
    loss, gradient = policy_loss(
        "dapo", [-2.0], [-2.0], [0.0], [0, 1], kl_coefficient=0.5, reference_logp=[-2 + np.log(2)]
    )
    assert loss == pytest.approx(0.5 * (1 - np.log(2)), rel=1e-14)
    assert gradient[0] == pytest.approx(-0.5, rel=1e-14)


def test_importance_weights_are_capped() -> None:
    engine = LOGP_OLD - np.log([0.5, 1.0, 1.9, 2.1, 100, 1e30])
    _, gradient = policy_loss(
        "dapo", LOGP_OLD, LOGP_OLD, [1.0, 1.0], STARTS, engine_logp=engine, correction="decoupled_token_is"
    )
    np.testing.assert_allclose(gradient * -6, [0.5, 1.0, 1.9, 2.0, 2.0, 2.0], rtol=1e-12)


def test_presets_are_the_table() -> None:
    """The rows as the method lists them."""
    rows = {
        name: (row.advantage, row.credit, row.gate, row.aggregation, row.eps_high, row.dual_clip)
        for name, row in PRESETS.items()
    }
    group, removed = "group_normalised", "mean_removed"
    assert rows == {
        "reinforce": (removed, "uniform", "none", "token_mean", 0.2, None),
        "grpo": (group, "uniform", "clip", "response_mean", 0.2, None),
        "dr_grpo": (removed, "uniform", "clip", "constant", 0.2, None),
        "rloo": ("leave_one_out", "uniform", "none", "response_sum", 0.2, None),
        "dapo": (group, "uniform", "clip", "token_mean", 0.28, 10.0),
        "dapo_ft": (group, "entropy", "clip", "token_mean", 0.28, 10.0),
        "sapo": (group, "uniform", "soft", "response_mean", 0.2, None),
        "fipo": (group, "future_kl", "clip", "token_mean", 0.28, 10.0),
        "gspo": (group, "uniform", "sequence_clip", "response_mean", 4e-4, None),
        "cispo": (group, "uniform", "stop_gradient", "token_mean", 0.2, None),
        "clip_cov": (group, "uniform", "clip", "token_mean", 0.2, None),
        "kl_cov": (group, "uniform", "none", "token_mean", 0.2, None),
        "delta": (group, "delta", "clip", "token_mean", 0.28, 10.0),
        "delta_group": (group, "delta", "clip", "token_mean", 0.28, 10.0),
        "delta_light": (group, "delta", "clip", "token_mean", 0.28, 10.0),
    }
    assert isinstance(method("grpo", eps_high=0.3), Method)
