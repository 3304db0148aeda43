"""The texts that the base of the task "fork" learns from."""

from __future__ import annotations

from collections import Counter

import numpy as np
from make_fork_base import DECIDING, FREE, LETTERS, demonstrations, text

from delta_cli.assets import model_path
from delta_cli.bench.fork_reward import reward
from delta_cli.data import arithmetic
from delta_cli.data.tokenizer import Tokenizer
from delta_cli.recipe.data import Arithmetic


def test_a_quarter_of_the_texts_is_right_and_the_free_letters_say_nothing() -> None:
    rng = np.random.default_rng(0)
    texts = [text(rng) for _ in range(2000)]
    words = [each.split(" ") for each in texts]
    assert {tuple(map(len, each)) for each in words} == {(FREE, 1, FREE)}
    assert set(Counter(each[1] for each in words)) == set(DECIDING)
    assert set("".join(each[0] + each[2] for each in words)) == set(LETTERS)
    right = np.array([reward(each, None) for each in texts])
    assert right.mean() == np.mean([each[1] == "a" for each in words])
    assert abs(right.mean() - 0.25) < 4 * (0.25 * 0.75 / 2000) ** 0.5
    share = np.array([each[0].count("a") / FREE for each in words])
    assert abs(np.corrcoef(share, right)[0, 1]) < 4 / 2000**0.5


def test_demonstrations_end_and_are_the_same_again() -> None:
    tokenizer = Tokenizer.load(model_path("tiny-base"))
    problems = arithmetic.problems(Arithmetic(), 3, 0, "train")
    first, again = (demonstrations(problems, 5, tokenizer) for _ in range(2))
    assert first.tokens.tolist() == again.tokens.tolist()
    assert np.diff(first.starts).tolist() == [2 * FREE + 4] * 3
    assert first.tokens[first.starts[1:] - 1].tolist() == [tokenizer.eos_ids[0]] * 3
