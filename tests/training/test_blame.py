"""method.blame: a wrong response is blamed for the equation that is false, and only for it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from backends import registry
from backends.interface import Engine, Sequences
from delta_cli.assets import model_path
from delta_cli.data.problem import Problem
from delta_cli.data.tokenizer import Tokenizer
from delta_cli.recipe import Recipe, load_recipe
from delta_cli.recipe.backend_settings import backend_settings
from delta_cli.rewards.grader import Verdict
from delta_cli.rollout.batch import RolloutBatch
from delta_cli.training.blame import blamed_tokens, first_false
from delta_cli.training.update import Updater

# Right; a false equation in the middle; a false one that the reward did not mind; true equations and a wrong answer.
TEXTS = ("7+8=15 so \\boxed{85}", "1+1=2, 7+8=14, 2+2=5", "7+8=14 but \\boxed{85}", "7+8=15 so \\boxed{8}")
RIGHT = (True, False, True, False)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(model_path("tiny-base"))


@pytest.fixture(scope="module")
def batch(tokenizer: Tokenizer) -> RolloutBatch:
    tokens = [np.append(tokenizer.encode(text), tokenizer.eos_ids[0]) for text in TEXTS]
    starts = np.cumsum([0, *map(len, tokens)])
    return RolloutBatch(
        problems=(Problem("p", "47+38=?", "85"),),
        sequences=Sequences((tokenizer.encode("47+38=?\n"),) * 4, np.concatenate(tokens), starts),
        texts=TEXTS,
        verdicts=tuple(Verdict(float(right), right, None) for right in RIGHT),
        truncated=np.zeros(4, bool),
        engine_logprobs=np.zeros(starts[-1]),
    )


def recipe(*changes: str) -> Recipe:
    return load_recipe(None, changes)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    found = registry.create("fake", backend_settings(recipe()))
    yield found
    found.close()


def test_the_tokens_are_those_of_the_first_false_equation(batch: RolloutBatch, tokenizer: Tokenizer) -> None:
    blamed = blamed_tokens(batch, np.array([1.0, -1.0, 1.0, -1.0]), tokenizer)
    pieces = tokenizer.pieces(batch.sequences.tokens)
    parts = [
        "".join(piece for piece, mark in zip(pieces[a:b], blamed[a:b], strict=True) if mark)
        for a, b in pairwise(batch.sequences.starts)
    ]
    assert parts == ["", "7+8=14", "", ""]
    assert first_false(tokenizer.encode("no equation"), tokenizer) is None
    assert first_false(np.array([], np.int64), tokenizer) is None


@pytest.mark.parametrize("preset", ["dapo", "delta"])
def test_it_multiplies_the_methods_own_weights(
    batch: RolloutBatch, engine: Engine, tokenizer: Tokenizer, preset: str
) -> None:
    """With mean 1 again; responses without a false equation keep their proportions."""

    def weights(*changes: str) -> np.ndarray:
        updater = Updater(recipe(f"method.preset={preset}", *changes), engine)
        return updater.credit(updater.score(batch), 0).weights

    plain, found = weights(), weights("method.blame=equations")
    first, last = batch.sequences.starts[1:3]
    marks = blamed_tokens(batch, np.array([1.0, -1.0, 1.0, -1.0]), tokenizer)
    expected = plain.copy()
    expected[first:last] = np.where(marks[first:last], plain[first:last] * (last - first) / marks.sum(), 0)
    np.testing.assert_allclose(found, expected / expected.mean(), rtol=1e-12)
    assert found.mean() == pytest.approx(1)
    right = replace(batch, verdicts=(Verdict(1.0, True, None),) * 4)
    updater = Updater(recipe(f"method.preset={preset}", "method.blame=equations"), engine)
    np.testing.assert_array_equal(updater.credit(updater.score(right), 0).weights, 1)
