"""The generator and its solver, against Python's own arithmetic."""

import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from delta_cli.data.arithmetic import first_error, problems, solution, token_at
from delta_cli.data.problem import Problem
from delta_cli.errors import UserError
from delta_cli.recipe.data import Arithmetic

SPECS = [
    Arithmetic(),
    Arithmetic(digits=1),
    Arithmetic(digits=3),
    Arithmetic(digits=9),
    Arithmetic(operation="multiply"),
    Arithmetic(operation="multiply", digits=3, filler=2),
    Arithmetic(filler=5),
]


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_every_step_of_a_derivation_is_true(spec: Arithmetic) -> None:
    for problem in problems(spec, 40, seed=3):
        expression = problem.question.removesuffix("=?")
        assert problem.answer == str(eval(expression))
        *steps, boxed = solution(problem, spec).split(" ")
        assert boxed == "-" * spec.filler + f"\\boxed{{{problem.answer}}}"
        for step in steps:
            left, right = step.removeprefix("-" * spec.filler).split("=")
            assert eval(left) == int(right)


def test_the_answer_follows_from_the_columns_of_an_addition() -> None:
    spec = Arithmetic(digits=3)
    for problem in problems(spec, 200, seed=1):
        sums = [int(total) for total in re.findall(r"=(\d+)", solution(problem, spec))]
        digits = [str(total % 10) for total in sums[:-1]] + [str(sums[-1])[::-1]]
        assert "".join(digits)[::-1] == problem.answer


def test_written_out() -> None:
    problem = Problem("95+17", "95+17=?", "112")
    assert solution(problem, Arithmetic()) == "5+7=12 9+1+1=11 \\boxed{112}"
    assert solution(problem, Arithmetic(filler=2)) == "--5+7=12 --9+1+1=11 --\\boxed{112}"
    product = Problem("23*45", "23*45=?", "1035")
    assert solution(product, Arithmetic(operation="multiply")) == "23*5=115 23*40=920 115+920=1035 \\boxed{1035}"


def test_a_mistake_is_carried_on() -> None:
    """With every computed result one too high, what follows builds on it."""

    def one_more(exact: int) -> int:
        return exact + 1

    assert solution(Problem("95+14", "95+14=?", "109"), Arithmetic(), one_more) == "5+4=10 9+1+1=12 \\boxed{120}"
    wrong = "23*5=116 23*40=921 116+921=1038 \\boxed{1038}"
    product = Problem("23*45", "23*45=?", "1035")
    assert solution(product, Arithmetic(operation="multiply"), one_more) == wrong
    assert first_error(product, wrong, Arithmetic(operation="multiply")) == len("23*5=11")


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_the_same_arguments_give_the_same_problems_all_different(spec: Arithmetic) -> None:
    count = 20 if spec.digits == 1 else 300
    first = problems(spec, count, seed=5)
    assert first == problems(spec, count, seed=5)
    assert first != problems(spec, count, seed=6)
    assert len({problem.id for problem in first}) == count


def test_splits_share_no_pair_of_operands_in_either_order() -> None:
    def pairs(split: str) -> set[frozenset[str]]:
        return {frozenset(p.id.split("+")) for seed in range(5) for p in problems(Arithmetic(), 1000, seed, split)}

    train, held_out = pairs("train"), pairs("held_out")
    assert not train & held_out
    assert len(train) > 2500
    assert len(held_out) > 700


def test_more_problems_than_there_are() -> None:
    with pytest.raises(UserError, match=r"'held_out' has only \d+ such problems, and 3000 are"):
        problems(Arithmetic(), 3000, 0, "held_out")


@pytest.mark.parametrize("values", [{"operation": "divide"}, {"digits": 0}, {"digits": 10}, {"filler": -1}], ids=str)
def test_a_task_that_does_not_exist(values: dict) -> None:
    with pytest.raises(ValidationError):
        Arithmetic(**values)


@given(seed=st.integers(0, 10**6))
def test_a_changed_character_is_found_where_it_is(seed: int) -> None:
    rng = random.Random(seed)
    spec = rng.choice(SPECS)
    problem = problems(spec, 1, seed)[0]
    right = solution(problem, spec)
    place = rng.randrange(len(right))
    wrong = right[:place] + rng.choice([c for c in "0123456789+= x" if c != right[place]]) + right[place + 1 :]
    assert first_error(problem, right, spec) is None
    assert first_error(problem, right + "\n", spec) is None
    if wrong.rstrip() != right:
        assert first_error(problem, wrong, spec) == min(place, len(wrong.rstrip()))
    assert first_error(problem, right + "7", spec) == len(right)
    assert first_error(problem, right[: place + 1].rstrip()[:-1], spec) is not None


def test_the_token_of_a_character() -> None:
    pieces = ["ab", "", "c", "<eos>"]
    assert [token_at(pieces, place) for place in range(4)] == [0, 0, 2, 3]
    assert token_at(pieces, 99) == 3


def test_only_arithmetic_has_known_steps() -> None:
    with pytest.raises(UserError, match="its solution is not known"):
        solution(Problem("1", "What is 1+1?", "2"), Arithmetic())
