"""Generated word problems: a reader that knows only the sentences checks every answer."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from delta_cli.assets import model_path
from delta_cli.data import word_problems
from delta_cli.data.loading import load_problems
from delta_cli.data.problem import Problem
from delta_cli.data.prompts import render
from delta_cli.data.tokenizer import Tokenizer
from delta_cli.recipe.data import DataSection
from delta_cli.rewards.math.last_number import last_number

TOKENIZER = Tokenizer.load(model_path("tiny-base"))

# What each kind's words say, as a function of the numbers in the order they are read.
MEANING = {
    r"gets \d+ more": lambda a, b: a + b,
    r"gives \d+ to": lambda a, b: a - b,
    r"has \d+ dollars and buys": lambda a, b, c: a - b * c,
    r"buys \d+ \w+ for": lambda a, b: a * b,
    r"equally among": lambda a, b: a / b,
    r"boxes of": lambda a, b, c: a * b + c,
    r"times as many": lambda a, b: a * b,
    r"a week for": lambda a, b, c: a + b * c,
    r"has \d+ more than": lambda a, b: a + b,
}


def solve(question: str) -> float:
    """The result of the first meaning whose words occur in the problem."""
    meaning = next(value for words, value in MEANING.items() if re.search(words, question))
    return meaning(*map(int, re.findall(r"\d+", question)))


@pytest.fixture(scope="module")
def made() -> dict[str, list[Problem]]:
    return {split: word_problems.problems(900, 3, split) for split in ("train", "held_out")}


def test_answers_are_what_the_sentences_say(made: dict[str, list[Problem]]) -> None:
    for problem in [*made["train"], *made["held_out"]]:
        assert solve(problem.question) == int(problem.answer), problem.question
        assert 0 < int(problem.answer) < 200


def test_all_kinds_come_equally_often(made: dict[str, list[Problem]]) -> None:
    for problems in made.values():
        counts = Counter(problem.kind for problem in problems)
        assert len(counts) == 9
        assert max(counts.values()) - min(counts.values()) <= 5  # some came twice
        assert len({problem.id for problem in problems}) == len({problem.question for problem in problems}) == 900


def test_the_splits_share_no_numbers_of_a_kind(made: dict[str, list[Problem]]) -> None:
    """For all names, things and seeds."""
    keys = [
        {(problem.kind, *re.findall(r"\d+", problem.question)) for problem in problems}
        for problems in (made["train"], word_problems.problems(900, 4, "held_out"))
    ]
    assert not keys[0] & keys[1]


def test_the_seed_decides(made: dict[str, list[Problem]]) -> None:
    assert word_problems.problems(900, 3) == made["train"]
    assert word_problems.problems(900, 5) != made["train"]


def test_the_examples_of_the_prompt_are_right_and_no_problems(made: dict[str, list[Problem]]) -> None:
    for question, solution in word_problems.EXAMPLES:
        assert solve(question) == int(last_number(solution) or "")
        numbers = re.findall(r"\d+", question)
        for problem in [*made["train"], *made["held_out"]]:
            assert re.findall(r"\d+", problem.question) != numbers
    prompt = render("two_shot", "How many?", TOKENIZER)
    assert prompt.endswith("\n\nQ: How many?\nA:")
    assert prompt.count("Q:") == 3


def test_a_recipe_gets_them_by_name() -> None:
    data = load_problems(DataSection(source="word_problems", limit=100, held_out=0.2), seed=1)
    assert (len(data.problems), len(data.held_out)) == (80, 20)
    assert {problem.source for problem in data.problems} == {"word_problems"}
