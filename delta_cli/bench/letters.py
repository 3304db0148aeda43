"""The texts of the bench's tasks "fork" and "chain": most characters are free or fixed, and a few letters decide."""

from __future__ import annotations

import re
from typing import Any

GOOD_LETTER = "a"
FREE_LETTERS = re.compile("[a-h]{8}")  # how responses of the task fork begin
LINE = "then we take TD from FFFFFFFF. "  # of the task chain: T is the line's tag, D decides, F are free letters
KEY = {"K": "c", "L": "a", "M": "d", "N": "b", "O": "a", "P": "c"}  # tag of each line: its good letter
FORM = "".join(LINE.replace("T", tag) for tag in KEY)
CHAIN_HINT = "{question} " + "".join(tag + letter for tag, letter in KEY.items())
LETTERS = {"D": "abcd", "F": "abcdefgh"}


def fork_reward(response: str, problem: Any) -> float:
    """1 if the second word is the good letter. The problem does not matter."""
    return float(response.split(" ")[1:2] == [GOOD_LETTER])


def chain_reward(response: str, problem: Any) -> float:
    """1 if the response has the task's form, and the letter behind each tag is the good one."""
    return float(not _chain(response)[1])


def deciding_characters(response: str) -> tuple[list[int], list[int]]:
    """The characters of a response of either task that decide the reward, and those that are wrong."""
    return _fork(response) if FREE_LETTERS.match(response) else _chain(response)


def _fork(response: str) -> tuple[list[int], list[int]]:
    """The second word decides. One that is too long is wrong from its second letter on if the first is the good one."""
    words = response.split(" ")
    if len(words) == 1:
        return [], [len(response)]
    place = len(words[0]) + 1
    if words[1] == GOOD_LETTER:
        return [place], []
    return [place], [place + words[1].startswith(GOOD_LETTER)]


def _chain(response: str) -> tuple[list[int], list[int]]:
    """The letter behind each tag decides. A response that leaves the form is also wrong where it does."""
    decisive: list[int] = []
    wrong: list[int] = []
    for place, (character, expected) in enumerate(zip(response, FORM, strict=False)):
        allowed = LETTERS.get(expected, expected)
        if expected == "D":
            decisive.append(place)
            allowed = KEY[FORM[place - 1]]
        if character not in allowed:
            wrong.append(place)
            if expected != "D" or character not in LETTERS["D"]:
                return decisive, wrong
    return decisive, wrong if len(response) == len(FORM) else [*wrong, min(len(response), len(FORM))]
