"""Whether credit finds the mistake: the marks, the numbers, and that the weights are those of training."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from analysis.mistakes import VARIANTS, Marks, kind_means, mark, separation, token_weights, updated_future_kl
from analysis.noise import stability
from scipy import stats

from backends import registry
from backends.interface import Engine, Sequences
from delta_cli.assets import model_path
from delta_cli.credit import DenseFeatures, group_advantages, token_coefficients
from delta_cli.data import arithmetic
from delta_cli.data.tokenizer import Tokenizer
from delta_cli.recipe import Recipe, load_recipe
from delta_cli.recipe.backend_settings import backend_settings
from delta_cli.recipe.data import Arithmetic
from delta_cli.rewards.grader import Verdict
from delta_cli.rollout.batch import RolloutBatch
from delta_cli.training.update import Updater

TASK = Arithmetic()
TEXTS = (r"7+8=15 4+3+1=8 \boxed{85}", r"7+8=14 4+3+1=8 \boxed{84}", r"7+8=15 4+3+1=8 \boxed{8}", r"7+8=1")
RIGHT = (True, False, False, False)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(model_path("tiny-base"))


@pytest.fixture
def recipe() -> Recipe:
    return load_recipe(Path(__file__).parents[2] / "recipes" / "quickstart.toml")


@pytest.fixture
def backend(recipe: Recipe) -> Iterator[Engine]:
    found = registry.create("fake", backend_settings(recipe))
    yield found
    found.close()


@pytest.fixture
def batch(tokenizer: Tokenizer) -> RolloutBatch:
    """One problem, 47+38, with a right response and three wrong ones."""
    problem = arithmetic.Problem(id="47+38", question="47+38=?", answer="85", source=arithmetic.SOURCE)
    assert arithmetic.solution(problem, TASK) == TEXTS[0]
    tokens = [np.append(tokenizer.encode(text), tokenizer.eos_ids[0]) for text in TEXTS]
    prompt = tokenizer.encode("47+38=?\n")
    starts = np.cumsum([0, *map(len, tokens)])
    return RolloutBatch(
        problems=(problem,),
        sequences=Sequences((prompt,) * 4, np.concatenate(tokens), starts),
        texts=TEXTS,
        verdicts=tuple(Verdict(float(right), right, None) for right in RIGHT),
        truncated=np.zeros(4, bool),
        engine_logprobs=np.zeros(starts[-1]),
    )


def test_marks_of_a_wrong_result_a_wrong_answer_and_a_response_that_breaks_off(
    batch: RolloutBatch, tokenizer: Tokenizer
) -> None:
    marks = mark(batch, TASK, tokenizer)
    starts = batch.sequences.starts
    inside = [place - start for place, start in zip(marks.mistakes[1:], starts[1:-1], strict=True)]
    assert marks.mistakes[0] == -1
    assert inside[0] == len("7+8=1")
    assert inside[1] == len("7+8=15 4+3+1=8 ") + 2  # \boxed{ is one token, then the 8 that is right
    assert inside[2] == len("7+8=1")  # its end of sequence
    results = [np.flatnonzero(marks.results[a:b]).tolist() for a, b in pairwise(starts)]
    assert results == [[], [4, 5, 13], [4, 5, 13], [4]]
    assert marks.digits[: starts[1]].tolist() == [text.isdigit() for text in [*TEXTS[0][:15], "box", "8", "5", "}", ""]]


def test_a_group_that_is_all_wrong_has_no_credit_to_place(batch: RolloutBatch, tokenizer: Tokenizer) -> None:
    wrong = replace(batch, verdicts=(Verdict(0.0, False, None),) * 4)
    assert (mark(wrong, TASK, tokenizer).mistakes == -1).all()


def test_separation_by_hand() -> None:
    starts = np.array([0, 4, 7, 9])
    weights = np.array([1.0, 2.0, 3.0, 0.0, 1.0, 1.0, 1.0, 9.0, 9.0])
    results = np.array([0, 1, 1, 1, 0, 0, 1, 0, 0], bool)
    marks = Marks(np.array([1, 6, -1]), results, np.zeros(9, bool))
    found = separation("w", weights, marks, starts)
    assert (found.there, found.elsewhere) == (1.5, pytest.approx((4 / 3 + 1) / 2))
    assert found.auc == pytest.approx((2 / 3 + 0.5) / 2)
    assert (found.auc_results, found.responses, found.responses_results) == (0.5, 2, 1)
    nothing = separation("w", weights, Marks(np.full(3, -1), results, results), starts)
    assert nothing.responses == 0
    assert np.isnan(nothing.auc)


def test_kind_means_by_hand() -> None:
    weights = np.array([1.0, 3.0, 5.0, 2.0, 4.0, 100.0])
    advantages = np.array([1.0, 1.0, 1.0, -1.0, -1.0, 0.0])
    found = kind_means(weights, advantages, np.array([0, 1, 1, 0, 1, 0], bool))
    assert (found.formatting_positive, found.digits_positive) == (1.0, 4.0)
    assert (found.formatting_negative, found.digits_negative) == (2.0, 4.0)
    assert found.formatting_share == 0.4


def test_the_weights_are_those_of_training(batch: RolloutBatch, backend: Engine, recipe: Recipe) -> None:
    found = token_weights(backend, batch, step=0)
    assert set(found) == {variant.name for variant in VARIANTS} | {"entropy (forking tokens)", "surprisal"}
    updater = Updater(recipe, backend)
    scored = updater.score(batch)
    np.testing.assert_array_equal(found["delta"], updater.credit(scored, 0).weights)
    np.testing.assert_allclose(found["surprisal"], -scored.old_logprobs)
    assert len({values.tobytes() for values in found.values()}) == len(found) - 3  # one group: both scopes agree


def test_future_kl_sees_the_updates(batch: RolloutBatch, backend: Engine, recipe: Recipe) -> None:
    """Against the definition: a sum over the tokens ahead, halved every 32 tokens."""
    updater = Updater(recipe, backend)
    before = backend.score(batch.sequences).logprobs
    weights = updated_future_kl(updater, batch, step=0)
    delta = np.asarray(backend.score(batch.sequences).logprobs - before, np.float64)
    expected = []
    for first, last in pairwise(batch.sequences.starts):
        for t in range(first, last):
            future = sum(0.5 ** ((k - t) / 32) * delta[k] for k in range(t, last))
            expected.append(np.clip(np.exp(future), 1.0, 1.2))
    np.testing.assert_allclose(weights, expected, rtol=1e-6)
    assert np.ptp(weights) > 1e-4


def test_stability_against_one_draw_by_hand() -> None:
    rng = np.random.default_rng(5)
    features = DenseFeatures(rng.normal(size=(120, 6)) + 1)
    starts, groups = np.arange(0, 121, 10), np.repeat([0, 1, 2], 4)
    rewards = np.array([1, 0, 0, 1, 1, 1, 0, 0, 1, 1, 1, 1], np.float64)
    assert stability(features, rewards, groups, starts, 0.0, rng, draws=1).rank_correlation == pytest.approx(1)

    found = stability(features, rewards, groups, starts, 0.3, np.random.default_rng(1), draws=1)
    flipped = np.random.default_rng(1).random(12) < 0.3
    assert 0 < flipped.sum() < 12
    clean, noisy = (
        token_coefficients(features, group_advantages(each, groups), starts).weights
        for each in (rewards, np.abs(rewards - flipped))
    )
    kept = np.repeat(~flipped & (groups < 2), 10)  # the last group has no contrast
    assert found.rank_correlation == pytest.approx(stats.spearmanr(clean, noisy).statistic)
    assert found.change_kept == pytest.approx(np.abs(clean - noisy)[kept].mean())
    assert found.rank_correlation_kept == pytest.approx(stats.spearmanr(clean[kept], noisy[kept]).statistic)


def test_each_proxy_costs_one_forward() -> None:
    """The variants of a proxy stand together."""
    order = [variant.proxy for variant in VARIANTS]
    assert len(set(order)) == 1 + sum(a != b for a, b in pairwise(order))
