"""No small edit of a gold answer is accepted but those that say the same, each of which is listed with its reason."""

from __future__ import annotations

import importlib.util
import time
from pathlib import Path

import pytest

from delta_cli.rewards import math_reward

HERE = Path(__file__).parent


def _load() -> object:
    spec = importlib.util.spec_from_file_location("mutations", HERE / "mutations.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


mutations = _load()
GOLDS = mutations.golds(HERE / "golds.txt")


def test_every_gold_is_an_answer_to_itself() -> None:
    assert [gold for gold in GOLDS if math_reward(rf"\boxed{{{gold}}}", gold) != 1.0] == []


@pytest.mark.parametrize("every", [10, pytest.param(1, marks=pytest.mark.long)])
def test_no_edit_is_accepted_but_those_listed(every: int) -> None:
    """Of every tenth gold answer, and of all."""
    golds = GOLDS[::every]
    lines = (HERE / "accepted_mutations.txt").read_text(encoding="utf-8").splitlines()
    listed = {each for each in (tuple(line.split("\t")[1:]) for line in lines) if each[0] in golds}
    accepted, edits, slowest = set(), 0, 0.0
    for gold in golds:
        for _, text in mutations.mutations(gold):
            edits += 1
            started = time.process_time()
            if math_reward(rf"\boxed{{{text}}}", gold) == 1.0:
                accepted.add((gold, text))
            slowest = max(slowest, time.process_time() - started)
    assert edits >= 10_000 // every
    assert accepted - listed == set()
    assert listed - accepted == set()
    assert slowest < 1.0
