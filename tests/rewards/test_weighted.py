"""Several rewards as one: sums worked by hand, who says what is right, and failures that stay one reward's own."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from delta_cli.data.problem import Problem
from delta_cli.recipe.reward import Reward, RewardKind
from delta_cli.rewards.grader import Grader, Verdict
from delta_cli.rewards.weighted import RewardTerm, WeightedReward

PROBLEM = Problem(id="p", question="q", answer="5")
CUSTOM = """
import os, time
def reward(response, problem):
    if "hang" in response: time.sleep(99)
    if "die" in response: os._exit(3)
    return len(response) / 4
"""


def term(
    kind: RewardKind,
    weight: float = 1.0,
    verifies: bool = False,
    limit: int = 1,
    form: RewardKind = "math",
    **settings: Any,
) -> RewardTerm:
    """A term with the name of its kind."""
    section = Reward(kind=kind, workers=1, **{"timeout": 20.0, **settings})
    return RewardTerm(Grader(section, limit, form), kind, weight, verifies)


def graded(reward: WeightedReward, response: str, length: int = 10, truncated: bool = False) -> Verdict:
    return reward.submit(response, PROBLEM, length, truncated).result(60)


def test_the_reward_is_the_weighted_sum_and_each_is_told() -> None:
    """By hand: 2 · right + 0.5 · one box − 0.25 · (1 − 10/40), and the shaping of one is weighed with it."""
    terms = [
        term("math", 2.0, verifies=True),
        term("format", 0.5),
        term("length", -0.25, limit=40, length_penalty=1.0),
    ]
    with WeightedReward(terms) as reward:
        verdict = graded(reward, r"\boxed{5}")
        assert verdict.reward == pytest.approx(2 + 0.5 - 0.25 * (0.75 - 0.01), abs=1e-12)
        assert verdict.parts == {"math": 1.0, "format": 1.0, "length": pytest.approx(0.74, abs=1e-12)}
        assert (verdict.correct, verdict.failure) == (True, None)
        wrong = graded(reward, r"\boxed{4} \boxed{6}", length=40)
        assert wrong.reward == pytest.approx(0.25 * 0.04, abs=1e-12)
        assert not wrong.correct


def test_one_reward_is_a_list_of_one() -> None:
    with (
        WeightedReward([term("math", verifies=True)]) as one,
        WeightedReward([term("math", 3.0, verifies=True)]) as thrice,
    ):
        assert graded(one, r"\boxed{5}") == Verdict(1.0, True, None)
        assert graded(thrice, r"\boxed{5}") == Verdict(3.0, True, None)


@pytest.mark.parametrize(
    ("response", "correct"),
    [(r"so \boxed{5} and 5", True), (r"so \boxed{5} and 6", False), (r"so \boxed{6} and 5", False)],
)
def test_right_is_what_all_verifiers_call_right_whatever_their_weights(response: str, correct: bool) -> None:
    terms = [term("math", 0.0, verifies=True), term("number", -1.0, verifies=True), term("format", 9.0)]
    with WeightedReward(terms) as reward:
        assert graded(reward, response).correct is correct
        assert graded(reward.verifying, response).correct is correct
        assert [each.name for each in reward.verifying.terms] == ["math", "number"]


@pytest.mark.parametrize(
    ("form", "response", "value"),
    [
        ("math", r"\boxed{7}", 1.0),
        ("math", r"\boxed{7} \boxed{7}", 0.0),
        ("math", "#### 7", 0.0),
        ("number", "#### 7", 1.0),
        ("number", "7", 0.0),
        ("code", "```python\npass\n```", 1.0),
        ("code", "pass", 0.0),
    ],
)
def test_the_format_is_that_of_the_verifier(form: RewardKind, response: str, value: float) -> None:
    with WeightedReward([term("format", form=form)]) as reward:
        assert graded(reward, response).reward == value
        assert graded(reward, response, truncated=True).reward == 0.0


def test_the_format_is_that_of_a_pattern() -> None:
    """Of the whole response, with any character for a dot; white space around it does not count."""
    values = {"<think>a\nb</think> 5\n": 1.0, "so <think>a</think> 5": 0.0, "<think>a</think>": 0.0}
    with WeightedReward([term("format", pattern="<think>.*</think>.+")]) as reward:
        for response, value in values.items():
            assert graded(reward, response).reward == value
            assert graded(reward, response, truncated=True).reward == 0.0


def test_a_pattern_that_backtracks_for_ever_meets_its_limit_and_the_others_count() -> None:
    terms = [term("math", verifies=True), term("format", pattern=r"(.+)+!", timeout=0.8)]
    started = time.monotonic()
    with WeightedReward(terms) as reward:
        verdict = graded(reward, r"\boxed{5} " + "x" * 64)
    assert verdict == Verdict(1.0, True, "format: timeout", {"math": 1.0, "format": 0.0})
    assert time.monotonic() - started < 30


def test_length_is_one_without_tokens_and_nothing_at_the_limit_or_beyond() -> None:
    with WeightedReward([term("length", limit=200)]) as reward:
        assert [graded(reward, "", length).reward for length in (0, 50, 200, 999)] == [1.0, 0.75, 0.0, 0.0]


def test_a_failure_is_one_rewards_own(tmp_path: Path) -> None:
    """What hangs or dies adds nothing; the verdict of the other, with its own workers, comes through."""
    (tmp_path / "mine.py").write_text(CUSTOM)
    custom = term("custom", 0.5, timeout=0.8, custom_file=str(tmp_path / "mine.py"))
    with WeightedReward([term("math", verifies=True), custom]) as reward:
        responses = (r"\boxed{5}", r"hang \boxed{5}", r"die \boxed{6}", r"abc \boxed{5}")
        verdicts = [reward.submit(each, PROBLEM, 1, False) for each in responses]
        fine, hung, died, after = (each.result(60) for each in verdicts)
    assert fine == Verdict(1 + 0.5 * 9 / 4, True, None, {"math": 1.0, "custom": 9 / 4})
    assert hung == Verdict(1.0, True, "custom: timeout", {"math": 1.0, "custom": 0.0})
    assert died == Verdict(0.0, False, "custom: worker died", {"math": 0.0, "custom": 0.0})
    assert after == Verdict(1 + 0.5 * 13 / 4, True, None, {"math": 1.0, "custom": 13 / 4})


def test_a_verifier_that_fails_makes_the_response_wrong(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(CUSTOM)
    custom = term("custom", verifies=True, timeout=0.8, custom_file=str(tmp_path / "mine.py"))
    with WeightedReward([custom, term("length", limit=4)]) as reward:
        assert graded(reward, "hang", 1) == Verdict(0.75, False, "custom: timeout", {"custom": 0.0, "length": 0.75})


@pytest.mark.usefixtures("sandbox")
def test_programs_in_the_sandbox_beside_others() -> None:
    problem = Problem(id="p", question="q", answer={"type": "asserts", "code": "assert f(1) == 2\nassert f(2) == 3"})
    share = term("code", verifies=True, code="share", format_bonus=0.5)
    with WeightedReward([share, term("format", 0.25, form="code")]) as reward:
        right, half, none = (
            reward.submit(f"```python\ndef f(x): return {body}\n```", problem, 9, False).result(60)
            for body in ("x + 1", "2", "x")
        )
    assert right == Verdict(1.75, True, None, {"code": 1.5, "format": 1.0})
    assert half == Verdict(1.25, False, None, {"code": 1.0, "format": 1.0})
    assert none == Verdict(0.75, False, None, {"code": 0.5, "format": 1.0})


def test_closing_settles_what_hangs(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(CUSTOM)
    reward = WeightedReward(
        [term("math", verifies=True), term("custom", custom_file=str(tmp_path / "mine.py"), timeout=60.0)]
    )
    hung = reward.submit(r"hang \boxed{5}", PROBLEM, 1, False)
    time.sleep(0.2)
    assert not hung.done()
    reward.close()
    failure = "custom: error: the grader was closed"
    assert hung.result(0) == Verdict(1.0, True, failure, {"math": 1.0, "custom": 0.0})
