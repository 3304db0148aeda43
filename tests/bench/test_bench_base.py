"""The texts that the bases of the tasks "fork" and "chain" learn from."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from make_bench_base import FOLLOWED, FREE, HINT, PREFERRED, TASKS, chain_text, demonstrations, fork_text, random_hint

from delta_cli.assets import model_path
from delta_cli.bench.letters import FORM, KEY, LETTERS, chain_reward, fork_reward
from delta_cli.data import arithmetic
from delta_cli.data.tokenizer import Tokenizer
from delta_cli.recipe.data import Arithmetic


def test_a_quarter_of_the_forks_is_right_and_the_free_letters_say_nothing() -> None:
    rng = np.random.default_rng(0)
    texts = [fork_text(rng, "") for _ in range(2000)]
    words = [each.split(" ") for each in texts]
    assert {tuple(map(len, each)) for each in words} == {(FREE, 1, FREE)}
    assert set(Counter(each[1] for each in words)) == set(LETTERS["D"])
    assert set("".join(each[0] + each[2] for each in words)) == set(LETTERS["F"])
    right = np.array([fork_reward(each, None) for each in texts])
    assert right.mean() == np.mean([each[1] == "a" for each in words])
    assert abs(right.mean() - 0.25) < 4 * (0.25 * 0.75 / 2000) ** 0.5
    share = np.array([each[0].count("a") / FREE for each in words])
    assert abs(np.corrcoef(share, right)[0, 1]) < 4 / 2000**0.5


def test_chains_follow_the_key_or_the_hint() -> None:
    rng = np.random.default_rng(1)
    places = [place for place, character in enumerate(FORM) if character == "D"]
    hint = random_hint(rng)
    assert hint[::2] == "".join(KEY)
    for given, followed, chance in (("", HINT, PREFERRED), (hint, hint, FOLLOWED)):
        texts = [chain_text(rng, given) for _ in range(500)]
        assert {len(text) for text in texts} == {len(FORM)}
        hits = np.array([[text[place] for place in places] for text in texts]) == list(followed[1::2])
        assert abs(hits.mean() - chance) < 4 * (chance * (1 - chance) / hits.size) ** 0.5
        if not given:
            assert [chain_reward(text, None) for text in texts] == hits.all(1).astype(float).tolist()


@pytest.mark.parametrize(("task", "length"), [("fork", 2 * FREE + 4), ("chain", len(FORM) + 1)])
def test_demonstrations_end_and_are_the_same_again(task: str, length: int) -> None:
    tokenizer = Tokenizer.load(model_path("tiny-base"))
    problems = arithmetic.problems(Arithmetic(), 3, 0, "train")
    first, again = (demonstrations(TASKS[task], problems, 5, tokenizer) for _ in range(2))
    assert first.tokens.tolist() == again.tokens.tolist()
    assert np.diff(first.starts).tolist() == [length] * 3
    assert first.tokens[first.starts[1:] - 1].tolist() == [tokenizer.eos_ids[0]] * 3
