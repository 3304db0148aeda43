"""The generated source "word_problems": nine kinds, with changing names, things and numbers.

A problem is two sentences with small whole numbers, ``Ada has 12 pens and gives 5 to Ben …``, and takes one or two
steps of arithmetic. Its id names its kind, so results can be reported by kind.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Iterator

import numpy as np

from delta_cli.data.problem import DataSplit, Problem
from delta_cli.errors import UserError

SOURCE = "word_problems"
HELD_OUT_ONE_IN = 5  # of all combinations of kind and numbers; the other four are for training
TRIES = 50  # draws for each problem asked for

DrawNumber = Callable[[int, int], int]  # a whole number from the first argument to the second, both included
TextAndAnswer = tuple[str, int]

NAMES = (
    "Ada", "Ben", "Clara", "David", "Emma", "Felix", "Grace", "Henry", "Iris", "Jack",
    "Kate", "Leo", "Mia", "Noah", "Olga", "Paul", "Rosa", "Sam", "Tina", "Victor",
)  # fmt: skip
THINGS = (
    "apples", "books", "cards", "coins", "cups", "eggs", "flowers", "marbles",
    "pencils", "plates", "shells", "stamps", "stickers", "toys",
)  # fmt: skip

# The two examples of the two-shot prompt. They show the form that responses then take; no generated problem has their
# numbers.
EXAMPLES = (
    ("Nina has 2 nuts and gets 6 more. How many nuts does Nina have?", "2 + 6 = 8"),
    ("Lily has 2 boxes of 5 nuts and 1 more. How many nuts does Lily have?", "2 * 5 = 10, 10 + 1 = 11"),
)
SHOTS = "".join(f"Q: {question}\nA: {answer}\n\n" for question, answer in EXAMPLES)
TEMPLATE = SHOTS + "Q: {question}\nA:"


def _gain(draw: DrawNumber, one: str, two: str, things: str) -> TextAndAnswer:
    first, second = draw(3, 30), draw(3, 19)
    return f"{one} has {first} {things} and gets {second} more. How many {things} does {one} have?", first + second


def _loss(draw: DrawNumber, one: str, two: str, things: str) -> TextAndAnswer:
    first, second = draw(20, 50), draw(3, 19)
    return f"{one} has {first} {things} and gives {second} to {two}. How many {things} are left?", first - second


def _price(draw: DrawNumber, one: str, two: str, things: str) -> TextAndAnswer:
    count, price = draw(3, 12), draw(2, 9)
    return f"{one} buys {count} {things} for {price} dollars each. How many dollars does {one} pay?", count * price


def _change(draw: DrawNumber, one: str, two: str, things: str) -> TextAndAnswer:
    count, price, rest = draw(2, 9), draw(2, 9), draw(1, 15)
    return (
        f"{one} has {count * price + rest} dollars and buys {count} {things} for {price} dollars each. "
        f"How many dollars are left?"
    ), rest


def _sharing(draw: DrawNumber, one: str, two: str, things: str) -> TextAndAnswer:
    people, each = draw(2, 9), draw(2, 12)
    return f"{one} shares {people * each} {things} equally among {people} children. How many does each get?", each


def _boxes(draw: DrawNumber, one: str, two: str, things: str) -> TextAndAnswer:
    boxes, inside, loose = draw(2, 9), draw(2, 10), draw(2, 19)
    return (
        f"{one} has {boxes} boxes of {inside} {things} and {loose} more. How many {things} does {one} have?"
    ), boxes * inside + loose


def _times(draw: DrawNumber, one: str, two: str, things: str) -> TextAndAnswer:
    first, factor = draw(3, 20), draw(2, 5)
    return (
        f"{one} has {first} {things}. {two} has {factor} times as many. How many {things} does {two} have?"
    ), first * factor


def _weeks(draw: DrawNumber, one: str, two: str, things: str) -> TextAndAnswer:
    start, weekly, weeks = draw(5, 30), draw(2, 9), draw(2, 8)
    return (
        f"{one} has {start} dollars and saves {weekly} a week for {weeks} weeks. How many dollars does {one} have?"
    ), start + weekly * weeks


def _more(draw: DrawNumber, one: str, two: str, things: str) -> TextAndAnswer:
    first, second = draw(3, 20), draw(2, 15)
    return (
        f"{one} has {first} {things}. {two} has {second} more than {one}. How many {things} does {two} have?"
    ), first + second


KINDS: dict[str, Callable[[DrawNumber, str, str, str], TextAndAnswer]] = {
    "gain": _gain,
    "loss": _loss,
    "price": _price,
    "change": _change,
    "sharing": _sharing,
    "boxes": _boxes,
    "times": _times,
    "weeks": _weeks,
    "more": _more,
}


def problems(count: int, seed: int, split: DataSplit = "train") -> list[Problem]:
    """``count`` different problems, taking the kinds in turn; the same arguments give the same problems.

    The split of a problem depends on its kind and its numbers alone, so no training problem is ever held out under
    other names. Raises UserError if there are fewer than ``count``.
    """
    rng = np.random.default_rng([seed, split == "held_out", 20805])
    made: dict[str, Problem] = {}
    for problem in itertools.islice(_stream(rng, split), count * TRIES):
        if len(made) == count:
            break
        made.setdefault(problem.question, problem)  # not every kind uses both names
    if len(made) < count:
        raise UserError(
            f"word_problems: the split '{split}' has only {len(made)} problems, and {count} are asked for; set a lower "
            "data.limit"
        )
    return list(made.values())


def _stream(rng: np.random.Generator, split: DataSplit) -> Iterator[Problem]:
    for kind in itertools.cycle(KINDS):
        while True:
            numbers: list[int] = []

            def draw(low: int, high: int, numbers: list[int] = numbers) -> int:
                numbers.append(int(rng.integers(low, high + 1)))
                return numbers[-1]

            one, two = (str(name) for name in rng.choice(NAMES, size=2, replace=False))
            things = str(rng.choice(THINGS))
            question, answer = KINDS[kind](draw, one, two, things)
            key = f"{kind} {' '.join(map(str, numbers))}"
            if _split(key) == split:
                yield Problem(f"{key} {one} {two} {things}", question, str(answer), SOURCE, kind)
                break


def _split(key: str) -> DataSplit:
    return "held_out" if zlib.crc32(key.encode()) % HELD_OUT_ONE_IN == 0 else "train"
