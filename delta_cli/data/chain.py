"""The generated source "chain": a long response in which most tokens are wording and few decide.

A problem gives letters with digits, ``a4b7c2=?``, to be added up one letter a step, and only the last digit of a sum is
carried on. A solution words each step in one of several ways, all of them right: ``then take b: 4+7=11; and now c:
1+2=3. \\boxed{3}``. Only operands and results can be wrong, and a wrong digit makes the answer wrong unless a second
mistake cancels it.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable
from itertools import pairwise

import numpy as np

from delta_cli.data.problem import DataSplit, Problem
from delta_cli.errors import UserError

SOURCE = "chain"
HELD_OUT_ONE_IN = 5  # of all problems; the other four are for training
LEADS = ("then take ", "and now ", "next we add ", "so we get to ")
ENDS = ("; ", ", ", ". ", "! ")
LETTERS = "abcdefghijklmnopqrstuvwxyz"
STEP = re.compile(rf"(?:{'|'.join(LEADS)})([a-z]): (\d)\+(\d)=(\d{{1,2}})(?:{'|'.join(map(re.escape, ENDS))})")
BOX = re.compile(r"\\boxed\{(\d)\}")

WriteSum = Callable[[int, int], int]  # from two digits to the number that is written as their sum


def problems(steps: int, count: int, seed: int, split: DataSplit = "train") -> list[Problem]:
    """``count`` different problems of so many steps; the same arguments give the same problems.

    Raises UserError if the split has fewer.
    """
    rng = np.random.default_rng([seed, split == "held_out", steps])
    found: dict[str, Problem] = {}
    for _ in range(64 + 32 * count):
        digits = rng.integers(0, 10, steps + 1).tolist()
        question = "".join(f"{letter}{digit}" for letter, digit in zip(LETTERS, digits, strict=False)) + "=?"
        if _split(question) == split:
            found.setdefault(question, Problem(question[:-2], question, str(sum(digits) % 10), SOURCE))
        if len(found) == count:
            return list(found.values())
    raise UserError(
        f"data.steps = {steps}: the split '{split}' has too few problems for the {count} asked for; set a lower "
        "data.limit, or more steps"
    )


def solution(problem: Problem, rng: np.random.Generator, write: WriteSum | None = None) -> str:
    """One worded solution, ending with the boxed answer.

    ``write`` gives the number that is written for each sum; a wrong one is carried on.
    """
    first, *rest = digits_of(problem)
    text, total = "", first
    for letter, digit in zip(LETTERS[1:], rest, strict=False):
        result = total + digit if write is None else write(total, digit)
        text += f"{rng.choice(LEADS)}{letter}: {total}+{digit}={result}{rng.choice(ENDS)}"
        total = result % 10
    return f"{text}\\boxed{{{total}}}"


def wrong_characters(problem: Problem, response: str) -> list[int]:
    """The index of every wrong character of a response, each judged by what the response says before it.

    An operand must be the letter's digit or the last digit of the result before it, a result the sum of its
    operands; of a wrong result, its first wrong character counts. If the form breaks, the first character of the step
    that breaks it is the last index.
    """
    digits = digits_of(problem)
    found: list[int] = []
    place = 0
    before = digits[0]
    for letter, digit in zip(LETTERS[1:], digits[1:], strict=False):
        step = STEP.match(response, place)
        if step is None or step[1] != letter:
            return [*found, min(place, max(len(response) - 1, 0))]
        expected = (str(before), str(digit), str(int(step[2]) + int(step[3])))
        for number, text in enumerate(expected, 2):
            if step[number] != text:
                found.append(step.start(number) + _agreement(step[number], text))
        before, place = int(step[4]) % 10, step.end()
    box = BOX.fullmatch(response.rstrip(), place)
    if box is None:
        return [*found, min(place, max(len(response) - 1, 0))]
    return found if int(box[1]) == before else [*found, box.start(1)]


def result_characters(response: str) -> list[int]:
    """The index of each operand and result, the characters that can be wrong in a response of the right form."""
    return [place for step in STEP.finditer(response) for i in (2, 3, 4) for place in range(step.start(i), step.end(i))]


def _agreement(written: str, expected: str) -> int:
    """The index in ``written`` of its first character that is not the expected one; at most its last index."""
    same = (a == b for a, b in zip(written, expected, strict=False))
    return min(next((place for place, equal in enumerate(same) if not equal), len(written)), len(written) - 1)


def digits_of(problem: Problem) -> list[int]:
    """The digits of a problem of this source. Raises UserError for another one."""
    found = re.findall(r"([a-z])(\d)", problem.question)
    letters = [letter for letter, _ in found]
    if len(found) < 2 or any(ord(b) - ord(a) != 1 for a, b in pairwise(letters)):
        raise UserError(
            f"problem {problem.id!r} does not come from the source '{SOURCE}', so its solution is not known"
        )
    return [int(digit) for _, digit in found]


def _split(question: str) -> DataSplit:
    return "held_out" if zlib.crc32(question.encode()) % HELD_OUT_ONE_IN == 0 else "train"
