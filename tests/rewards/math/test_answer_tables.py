"""Tables of answers by kind, decided by hand: each line has a gold answer, then answers to it, separated by tabs."""

from __future__ import annotations

from pathlib import Path

import pytest

from delta_cli.rewards import math_reward

HERE = Path(__file__).parent


def _lines(name: str) -> list[tuple[str, list[str]]]:
    lines = (HERE / name).read_text(encoding="utf-8").splitlines()
    cells = [line.split("\t") for line in lines if line and not line.startswith("#")]
    return [(gold, answers) for gold, *answers in cells]


@pytest.mark.parametrize(("gold", "answers"), _lines("right_answers.txt"), ids=lambda value: str(value)[:24])
def test_right_answers_are_accepted(gold: str, answers: list[str]) -> None:
    assert [answer for answer in [gold, *answers] if math_reward(rf"\boxed{{{answer}}}", gold) != 1.0] == []


@pytest.mark.parametrize(("gold", "answers"), _lines("wrong_answers.txt"), ids=lambda value: str(value)[:24])
def test_wrong_answers_are_refused(gold: str, answers: list[str]) -> None:
    assert [answer for answer in answers if math_reward(rf"\boxed{{{answer}}}", gold) != 0.0] == []
