"""A judge behind a real endpoint: faults of every kind, verdicts kept by content, limits, and what is counted."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from delta_cli.data.problem import Problem
from delta_cli.errors import UserError
from delta_cli.recipe.reward import JudgeSection
from delta_cli.rewards.judge import JudgeClient, check_template
from delta_cli.rewards.worker_pool import Score
from tests.rewards.judge_server import FAULTS, JudgeServer, judging

PROBLEM = Problem("1", "2+2?", "4", columns={"rubric": ["short", "kind"]})
TEMPLATE = "{question} {answer} {rubric} {other}\nResponse:{response}"


@pytest.fixture
def server() -> Iterator[JudgeServer]:
    with judging() as state:
        yield state


def judge(server: JudgeServer, file: Path | None = None, **changes: Any) -> JudgeClient:
    fast = {"timeout": 2.0, "deadline": 30.0, "retries": 3, "concurrency": 8, "template": TEMPLATE}
    return JudgeClient(JudgeSection(url=server.url, **(fast | changes)), file)


@pytest.fixture(autouse=True)
def _no_long_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("delta_cli.rewards.judge.PAUSE", 0.01)


def results(futures: list[Future[Score]]) -> list[Score]:
    return [future.result(30) for future in futures]


def test_a_verdict_is_the_last_score_of_the_answer_over_the_best(server: JudgeServer) -> None:
    (score,) = results([judge(server).submit("banana", PROBLEM)])
    assert score == Score(0.3)
    assert server.prompts == ['2+2? 4 ["short", "kind"] {other}\nResponse:banana']


def test_thirty_faults_leave_every_verdict_whole(server: JudgeServer, tmp_path: Path) -> None:
    """Each fault strikes one request; every response still gets its own verdict, and each is kept once."""
    server.faults = list(FAULTS)
    assert len(server.faults) == 30
    responses = ["a" * (n % 11) + f" {n}" for n in range(40)]
    asked = judge(server, tmp_path / "verdicts-0.jsonl", retries=30)
    found = results([asked.submit(response, PROBLEM) for response in responses])
    assert [score.value for score in found] == [n % 11 / 10 for n in range(40)]
    assert all(score.failure is None and not score.void for score in found)
    assert not server.faults, "some fault did not strike"
    usage = asked.used()
    assert (usage.calls, usage.failures, usage.kept) == (70, 0, 0)
    assert (usage.prompt_tokens, usage.completion_tokens) == (4000, 400)
    assert len((tmp_path / "verdicts-0.jsonl").read_text().splitlines()) == 40
    assert sorted(set(server.prompts)) == sorted(server.prompts), "something good was asked twice"


def test_a_resumed_run_asks_nothing_twice(server: JudgeServer, tmp_path: Path) -> None:
    """Not even after a kill in the middle of a line, and whichever rank asked."""
    responses = [f"{'a' * n} {n}" for n in range(6)]
    first = judge(server, tmp_path / "verdicts-0.jsonl")
    before = results([first.submit(response, PROBLEM) for response in responses[:4]])
    second = judge(server, tmp_path / "verdicts-1.jsonl")
    before += results([second.submit(response, PROBLEM) for response in responses[4:]])
    with (tmp_path / "verdicts-1.jsonl").open("ab") as file:
        file.write(b'{"request": "abc", "val')
    server.always = "status 500"  # nothing may be asked any more
    again = judge(server, tmp_path / "verdicts-0.jsonl")
    assert results([again.submit(response, PROBLEM) for response in responses]) == before
    assert (again.used().kept, len(server.prompts)) == (6, 6)


def test_another_question_is_another_verdict(server: JudgeServer, tmp_path: Path) -> None:
    asked = judge(server, tmp_path / "verdicts-0.jsonl")
    other = Problem("2", "3+3?", "6", columns=PROBLEM.columns)
    results([asked.submit("a", PROBLEM), asked.submit("a", other)])
    results([judge(server, tmp_path / "verdicts-0.jsonl", model="other").submit("a", PROBLEM)])
    assert len(server.prompts) == 3


def test_the_same_response_in_a_group_is_asked_once(server: JudgeServer) -> None:
    server.pause = 0.1
    asked = judge(server)
    assert results([asked.submit("aa", PROBLEM) for _ in range(8)]) == [Score(0.2)] * 8
    assert len(server.prompts) == 1
    assert asked.used().kept == 7


@pytest.mark.parametrize("fault", ["status 401", "status 404", "status 500", "no score", "slow", "hang up"])
def test_a_verdict_that_failed_is_no_zero(server: JudgeServer, fault: str) -> None:
    server.always = fault
    asked = judge(server, retries=1, timeout=0.2 if fault == "slow" else 2.0)
    (score,) = results([asked.submit("a", PROBLEM)])
    assert score.void
    assert score.failure is not None
    assert score.failure.startswith("error: ")
    usage = asked.used()
    assert usage.failures == 1
    assert usage.calls == (1 if fault in ("status 401", "status 404") else 2), "asking again would not help"
    server.always = ""
    asked = judge(server)
    assert results([asked.submit("a", PROBLEM)]) == [Score(0.1)], "a failure is not kept"


def test_the_deadline_holds_over_all_repetitions(server: JudgeServer) -> None:
    server.always = "slow"
    asked = judge(server, retries=100, timeout=0.2, deadline=0.5)
    start = time.monotonic()
    (score,) = results([asked.submit("a", PROBLEM)])
    assert time.monotonic() - start < 2
    assert score.void


def test_no_more_requests_at_a_time_than_allowed(server: JudgeServer) -> None:
    server.pause = 0.05
    asked = judge(server, concurrency=3)
    results([asked.submit(f"{n}", PROBLEM) for n in range(12)])
    assert server.most_at_once == 3


def test_closing_a_judge_ends_every_wait(server: JudgeServer) -> None:
    server.pause = 0.3
    asked = judge(server, concurrency=1)
    futures = [asked.submit(f"{n}", PROBLEM) for n in range(4)]
    asked.close()
    assert all(future.result(5).failure == "error: the grader was closed" for future in futures)


def test_the_key_of_the_environment_is_sent(server: JudgeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "secret")
    results([judge(server, key_variable="MY_KEY").submit("a", PROBLEM)])
    assert server.keys == {"Bearer secret"}


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{response} {rubrik}", r"\{rubrik\} is not known; the names are rubric, question, answer, response"),
        ("{question}", r"does not contain \{response\}"),
    ],
)
def test_a_template_that_cannot_work_is_refused(template: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        check_template(template, PROBLEM)


def test_a_template_may_be_a_file(server: JudgeServer, tmp_path: Path) -> None:
    (tmp_path / "rubric.txt").write_text("Q {question}\nResponse:{response}")
    results([judge(server, template=str(tmp_path / "rubric.txt")).submit("aaa", PROBLEM)])
    assert server.prompts == ["Q 2+2?\nResponse:aaa"]
    with pytest.raises(UserError, match="cannot be read"):
        judge(server, template=str(tmp_path / "nothing.txt"))


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"url": "ftp://x"}, "is no address"),
        ({"pattern": "("}, "is no regular expression"),
        ({"pattern": "Score"}, "has no group"),
    ],
)
def test_impossible_settings_are_refused(values: dict[str, str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        JudgeSection(**values)


def test_the_file_of_verdicts_says_what_the_judge_wrote(server: JudgeServer, tmp_path: Path) -> None:
    file = tmp_path / "judge" / "verdicts-0.jsonl"
    results([judge(server, file).submit("aa", PROBLEM)])
    (record,) = map(json.loads, file.read_text().splitlines())
    assert (record["value"], record["answer"]) == (2.0, "Thinking.\nscore: 0\nScore: 2")
