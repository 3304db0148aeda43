"""The generated source "arithmetic": sums or products, with solutions written step by step.

A question is ``47+38=?``. Its solution works digit by digit from the right, ``7+8=15 4+3+1=8 \\boxed{85}``, so a
response is a short text in which the first mistake has an exact place.
"""

from __future__ import annotations

import itertools
import re
import zlib
from collections.abc import Callable, Sequence

import numpy as np

from delta_cli.data.problem import DataSplit, Problem
from delta_cli.errors import UserError
from delta_cli.recipe.data import Arithmetic

WriteResult = Callable[[int], int]  # from an exact result to the number that is written down
SOURCE = "arithmetic"
SIGNS = {"add": "+", "multiply": "*"}
HELD_OUT_ONE_IN = 5  # of all pairs of operands; the other four are for training


def problems(task: Arithmetic, count: int, seed: int, split: DataSplit = "train") -> list[Problem]:
    """``count`` different problems; the same arguments give the same problems.

    A pair of operands belongs to one split whatever their order and the seed, so no training problem is ever held
    out. Raises UserError if the split has fewer than ``count`` problems.
    """
    low = 10 ** (task.digits - 1) if task.digits > 1 else 0
    values = 10**task.digits - low
    rng = np.random.default_rng([seed, split == "held_out"])
    drawn = rng.choice(values**2, size=min(values**2, 64 + 8 * count), replace=False)
    pairs = ((low + int(index) // values, low + int(index) % values) for index in drawn)
    kept = list(itertools.islice((pair for pair in pairs if _split(*pair) == split), count))
    if len(kept) < count:
        raise UserError(
            f"data.digits = {task.digits}: the split '{split}' has only {len(kept)} such problems, and {count} are "
            "asked for; set a lower data.limit"
        )
    return [_problem(task, *pair) for pair in kept]


def solution(problem: Problem, task: Arithmetic, write: WriteResult = int) -> str:
    """The solution with every step, ending with the boxed answer.

    ``write`` maps each exact result to the number that is written for it. If it is sometimes off, the solution has
    mistakes, and later steps build on them.
    """
    first, second = _operands(problem)
    steps, answer = (_addition if task.operation == "add" else _multiplication)(first, second, write)
    lead = "-" * task.filler
    return " ".join(lead + part for part in [*steps, f"\\boxed{{{answer}}}"])


def first_error(problem: Problem, response: str, task: Arithmetic) -> int | None:
    """Index of the first character that differs from the solution; None if the response is right.

    A response that breaks off is wrong at its end. One that goes on after the answer is wrong where it goes on. White
    space at the end is no mistake.
    """
    expected, response = solution(problem, task), response.rstrip()
    if response == expected:
        return None
    agree = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(response, expected, strict=False))
    return len(list(agree))


def token_at(pieces: Sequence[str], character: int) -> int:
    """Index of the token that holds a character of the joined pieces; the last token for a place beyond the end."""
    ends = np.cumsum([len(piece) for piece in pieces])
    return min(int(np.searchsorted(ends, character, side="right")), len(pieces) - 1)


def _problem(task: Arithmetic, first: int, second: int) -> Problem:
    expression = f"{first}{SIGNS[task.operation]}{second}"
    answer = first + second if task.operation == "add" else first * second
    return Problem(id=expression, question=f"{expression}=?", answer=str(answer), source=SOURCE)


def _split(first: int, second: int) -> DataSplit:
    pair = f"{min(first, second)} {max(first, second)}"
    return "held_out" if zlib.crc32(pair.encode()) % HELD_OUT_ONE_IN == 0 else "train"


def _operands(problem: Problem) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)[+*](\d+)=\?", problem.question)
    if match is None:
        raise UserError(
            f"problem {problem.id!r} does not come from the source '{SOURCE}', so its solution is not known"
        )
    return int(match[1]), int(match[2])


def _addition(first: int, second: int, write: WriteResult) -> tuple[list[str], int]:
    """Column sums from the right, each with the carry into it: 7+8=15, 4+3+1=8."""
    steps: list[str] = []
    answer = carry = 0
    columns = itertools.zip_longest(reversed(str(first)), reversed(str(second)), fillvalue="0")
    for position, (a, b) in enumerate(columns):
        terms = [int(a), int(b)] + ([carry] if position else [])
        total = write(sum(terms))
        steps.append(f"{'+'.join(map(str, terms))}={total}")
        carry = total // 10
        answer += total % 10 * 10**position
    return steps, answer + carry * 10 ** len(steps)


def _multiplication(first: int, second: int, write: WriteResult) -> tuple[list[str], int]:
    """The partial product of each digit of the second number, and their running sum."""
    steps: list[str] = []
    total = 0
    for position, digit in enumerate(reversed(str(second))):
        factor = int(digit) * 10**position
        product = write(first * factor)
        steps.append(f"{first}*{factor}={product}")
        before, total = total, write(total + product) if position else product
        if position:
            steps.append(f"{before}+{product}={total}")
    return steps, total
