"""The embedded task: arithmetic with written steps, generated, with its solver.

A problem is a question like ``47+38=?``; its derivation is written digit by digit from the right,
``7+8=15 4+3+1=8 \\boxed{85}``, so that a response is a short text in which the first mistake has an
exact place.
"""

from __future__ import annotations

import itertools
import re
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from delta_cli.data.problem import Problem
from delta_cli.errors import UserError

Split = Literal["train", "held_out"]
Compute = Callable[[int], int]
SOURCE = "arithmetic"
SIGNS = {"add": "+", "multiply": "*"}
HELD_OUT_ONE_IN = 5  # of all pairs of operands; the others are for training


@dataclass(frozen=True)
class TaskSpec:
    """Which arithmetic, and in what form its derivation is written."""

    operation: Literal["add", "multiply"] = "add"
    digits: int = 2  # of each operand
    filler: int = 0  # dashes before each step: formatting that right and wrong responses share

    def __post_init__(self) -> None:
        if self.operation not in SIGNS:
            raise UserError(f"operation '{self.operation}' does not exist; choose one of {', '.join(SIGNS)}")
        if not 1 <= self.digits <= 9:
            raise UserError(f"digits {self.digits} is out of range; choose 1 to 9")
        if not 0 <= self.filler <= 64:
            raise UserError(f"filler {self.filler} is out of range; choose 0 to 64")


def problems(spec: TaskSpec, count: int, seed: int, split: Split = "train") -> list[Problem]:
    """``count`` different problems, the same for the same arguments.

    Which split a pair of operands belongs to depends on the pair alone, whatever their order, so
    that no seed lets a training problem into the held-out ones. Raises UserError where the split
    has fewer than ``count`` problems.
    """
    low = 10 ** (spec.digits - 1) if spec.digits > 1 else 0
    values = 10**spec.digits - low
    rng = np.random.default_rng([seed, split == "held_out"])
    drawn = rng.choice(values**2, size=min(values**2, 64 + 8 * count), replace=False)
    pairs = ((low + int(index) // values, low + int(index) % values) for index in drawn)
    kept = list(itertools.islice((pair for pair in pairs if _split(*pair) == split), count))
    if len(kept) < count:
        raise UserError(
            f"{spec.digits}-digit problems: only {len(kept)} in '{split}', {count} asked; set a lower limit"
        )
    return [_problem(spec, *pair) for pair in kept]


def solution(problem: Problem, spec: TaskSpec, compute: Compute = int) -> str:
    """The derivation in the form of ``spec``, ending with the boxed answer.

    ``compute`` stands between each exact result and what is written for it: one that is sometimes
    off gives derivations with mistakes, in which what follows builds on the mistake.
    """
    first, second = _operands(problem)
    steps, answer = (_addition if spec.operation == "add" else _multiplication)(first, second, compute)
    lead = "-" * spec.filler
    return " ".join(lead + part for part in [*steps, f"\\boxed{{{answer}}}"])


def first_error(problem: Problem, response: str, spec: TaskSpec) -> int | None:
    """Index of the first character that is not the derivation's; None where the response is right.

    A response that breaks off counts as wrong at its end, one that goes on after the answer where
    it goes on. White space at the end is no mistake.
    """
    expected, response = solution(problem, spec), response.rstrip()
    if response == expected:
        return None
    agree = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(response, expected, strict=False))
    return len(list(agree))


def token_at(pieces: Sequence[str], character: int) -> int:
    """Index of the token that holds a character of the joined pieces; the last one beyond the end."""
    ends = np.cumsum([len(piece) for piece in pieces])
    return min(int(np.searchsorted(ends, character, side="right")), len(pieces) - 1)


def _problem(spec: TaskSpec, first: int, second: int) -> Problem:
    expression = f"{first}{SIGNS[spec.operation]}{second}"
    answer = first + second if spec.operation == "add" else first * second
    return Problem(id=expression, question=f"{expression}=?", answer=str(answer), source=SOURCE)


def _split(first: int, second: int) -> Split:
    pair = f"{min(first, second)} {max(first, second)}"
    return "held_out" if zlib.crc32(pair.encode()) % HELD_OUT_ONE_IN == 0 else "train"


def _operands(problem: Problem) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)[+*](\d+)=\?", problem.question)
    if match is None:
        raise UserError(f"problem {problem.id!r} is not of the source '{SOURCE}'; its steps are not known")
    return int(match[1]), int(match[2])


def _addition(first: int, second: int, compute: Compute) -> tuple[list[str], int]:
    """Column sums from the right, each with the carry it receives: 7+8=15, 4+3+1=8."""
    steps: list[str] = []
    answer = carry = 0
    columns = itertools.zip_longest(reversed(str(first)), reversed(str(second)), fillvalue="0")
    for position, (a, b) in enumerate(columns):
        terms = [int(a), int(b)] + ([carry] if position else [])
        total = compute(sum(terms))
        steps.append(f"{'+'.join(map(str, terms))}={total}")
        carry = total // 10
        answer += total % 10 * 10**position
    return steps, answer + carry * 10 ** len(steps)


def _multiplication(first: int, second: int, compute: Compute) -> tuple[list[str], int]:
    """The partial product of each digit of the second number, and their running sum."""
    steps: list[str] = []
    total = 0
    for position, digit in enumerate(reversed(str(second))):
        factor = int(digit) * 10**position
        product = compute(first * factor)
        steps.append(f"{first}*{factor}={product}")
        before, total = total, compute(total + product) if position else product
        if position:
            steps.append(f"{before}+{product}={total}")
    return steps, total
