"""Whatever a response says, grading gives a verdict: it raises nothing and takes no longer than its limit."""

from __future__ import annotations

import gc
import time
from pathlib import Path
from typing import Any

import pytest

from delta_cli.data.problem import Problem
from delta_cli.recipe.reward import Reward
from delta_cli.rewards.grader import Grader
from tests.rewards.responses import GOLDS, LONG, repeated, responses

SUBMIT_SECONDS = 0.25  # processor time of the calling thread for one response, at most
QUESTION = "How many eggs, in percent?"
# A function of a user's own that returns, raises and does what it should not.
CUSTOM = """
import os, sys, time
class Unprintable(Exception):
    def __str__(self): raise self
class Number(float):
    def __reduce__(self): raise ValueError
def throw(error): raise error
ACTS = [
    lambda: 1.0, lambda: float("nan"), lambda: "good", lambda: None, lambda: 10**400, lambda: Number(1), lambda: {}[1],
    lambda: sys.exit(0), lambda: throw(Unprintable), lambda: throw(KeyboardInterrupt), lambda: reward("", None),
    lambda: True, lambda: "x" * 10**7, lambda: [][0], lambda: throw(GeneratorExit), lambda: throw(type("E", (), {})),
]
def reward(response, problem):
    if len(response) % 97 == 3: os._exit(1)
    if len(response) % 211 == 5: time.sleep(99)
    return ACTS[(len(response) - 8) % len(ACTS)]() if response else reward(response, problem)
"""
TESTS = {"type": "asserts", "code": "assert f(1) == 85"}
# Of each kind: its settings, a response that is worth 1 or more, and its gold answer.
KINDS: dict[str, tuple[dict[str, Any], str, Any]] = {
    "math": ({"kind": "math", "format_bonus": 0.5}, r"\boxed{x+1}", "1+x"),
    "math-verify": ({"kind": "math", "verifier": "math-verify"}, r"\boxed{85}", "85"),
    "public": ({"kind": "math", "verifier": "public"}, r"\boxed{85}", "85"),
    "number": ({"kind": "number", "format_bonus": 0.5}, "#### 85", "85"),
    "choice": ({"kind": "choice"}, r"\boxed{A}", "A"),
    "code": ({"kind": "code", "run_seconds": 0.5}, "```python\ndef f(x): return 85\n```", TESTS),
    "custom": ({"kind": "custom"}, "8 digits", "85"),
    "format": ({"kind": "format"}, r"\boxed{85}", "85"),
    "pattern": ({"kind": "format", "pattern": r"(a+)+b|<think>.*</think>.+"}, "<think>x</think> 85", "85"),
    "length": ({"kind": "length", "format_bonus": 0.5}, r"\boxed{85}", "85"),
}


@pytest.fixture(autouse=True)
def _no_pauses_for_garbage() -> None:
    """What earlier tests left behind is not searched for garbage, which takes half a second after some of them."""
    gc.collect()
    gc.freeze()


def make(name: str, folder: Path) -> Grader:
    settings = dict(KINDS[name][0])
    if name == "custom":
        (folder / "mine.py").write_text(CUSTOM)
        settings["custom_file"] = str(folder / "mine.py")
    return Grader(Reward(workers=2, timeout=1.0, **settings), 1000)


def submit_all(name: str, folder: Path, given: list[str]) -> None:
    """Grade every response and then one that is right: it still is."""
    _, right, gold = KINDS[name]
    futures = []
    with make(name, folder) as grader:
        for place, response in enumerate(given):
            problem = Problem("p", QUESTION, TESTS if name == "code" else GOLDS[place % len(GOLDS)])
            started = time.thread_time()
            futures.append(grader.submit(response, problem, len(response) % 1000, truncated=place % 7 == 0))
            assert time.thread_time() - started < SUBMIT_SECONDS, (response[:60], len(response))
        verdicts = [future.result(600) for future in futures]
        last = grader.submit(right, Problem("p", QUESTION, gold), 0, truncated=False).result(60)
    assert last.correct
    for response, verdict in zip(given, verdicts, strict=True):
        assert abs(verdict.reward) <= 1.5, (response[:60], verdict)
        assert verdict.failure is None or (verdict.reward == 0.0 and "\n" not in verdict.failure)


@pytest.mark.usefixtures("sandbox")
@pytest.mark.parametrize("name", ["math", "code", "custom"])  # all kinds are below
def test_a_kind_has_a_verdict_on_any_response(name: str, tmp_path: Path) -> None:
    submit_all(name, tmp_path, responses(0, 60 if name == "math" else 8))


@pytest.mark.long
@pytest.mark.usefixtures("sandbox")
@pytest.mark.parametrize("name", KINDS)
def test_every_kind_has_a_verdict_on_ten_thousand_responses(name: str, tmp_path: Path) -> None:
    """Fewer of the kinds that start programs, or run into their limit with a good part of the responses."""
    few = {"code": 300, "custom": 400, "pattern": 1500, "math-verify": 80, "public": 80}
    submit_all(name, tmp_path, responses(1, few.get(name, 10_000)))


@pytest.mark.parametrize(
    "name",
    ["math", pytest.param("number", marks=pytest.mark.long), pytest.param("format", marks=pytest.mark.long), "length"],
)
def test_what_is_graded_in_this_process_takes_little_time(name: str, tmp_path: Path) -> None:
    """Long responses go to a worker. Those that are just short enough are graded here."""
    with make(name, tmp_path) as grader:
        for response in [*repeated(20_000), *repeated(LONG)]:
            started = time.thread_time()
            grader.submit(response, Problem("p", "q", "85"), 9, truncated=False)
            assert time.thread_time() - started < SUBMIT_SECONDS, response[:60]
