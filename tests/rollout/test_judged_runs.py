"""Runs whose rewards are judges, functions of a whole group, and async functions."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from delta_cli.errors import Interrupted, UserError
from delta_cli.runs.folder import JsonObject, RunFolder, read_lines
from tests.harness import contents, make_recipe, train
from tests.rewards.judge_server import FAULTS, JudgeServer, judging
from tests.rollout.test_rewards import several

TEMPLATE = "{question} {answer}\nResponse:{response}"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[JudgeServer]:
    monkeypatch.setattr("delta_cli.rewards.judge.PAUSE", 0.01)
    with judging() as state:
        yield state


def judge(server: JudgeServer, **changes: Any) -> dict[str, Any]:
    return {
        "kind": "judge",
        "judge": {"url": server.url, "template": TEMPLATE, "timeout": 30.0, "retries": 5, "price_prompt": 2.0}
        | changes,
    }


def records(folder: Path) -> list[JsonObject]:
    return list(read_lines(RunFolder(folder).metrics))


def rows(folder: Path, step: int) -> list[JsonObject]:
    return list(read_lines(RunFolder(folder).rollout_file(step)))


@pytest.mark.long
def test_a_stopped_run_asks_the_judge_nothing_twice(server: JudgeServer, model: Path, tmp_path: Path) -> None:
    """And ends as a run that was not stopped, with faults in between."""
    changes = {"run__steps": 4, "evaluation__every": "never"}
    whole = several(model, [{"kind": "math", "weight": 0.0}, judge(server)], **changes)
    train(whole, tmp_path / "whole")
    asked = len(server.prompts)
    assert asked == len(set(server.prompts)), "one response was asked twice"
    server.prompts.clear()
    server.faults = [fault for fault in FAULTS if fault not in ("slow", "trickle")]

    def stop() -> bool:
        return len(records(tmp_path / "parts")) >= 2 if (tmp_path / "parts" / "metrics.jsonl").exists() else False

    with pytest.raises(Interrupted):
        train(whole, tmp_path / "parts", stop_asked=stop)
    train(whole, tmp_path / "parts", resume=True)
    assert len(server.prompts) == len(set(server.prompts)) == asked
    one, other = contents(tmp_path / "whole"), contents(tmp_path / "parts")
    skipped = {"judge_calls", "judge_kept"}
    for mine, theirs in zip(one.pop("metrics.jsonl"), other.pop("metrics.jsonl"), strict=True):
        assert {k: v for k, v in mine.items() if k not in skipped} == {
            k: v for k, v in theirs.items() if k not in skipped
        }
    for name, value in one.items():
        np.testing.assert_equal(other[name], value, name)


def test_the_metrics_say_what_the_judge_cost(server: JudgeServer, model: Path, tmp_path: Path) -> None:
    recipe = several(model, [{"kind": "math", "weight": 0.0}, judge(server)], run__steps=1, evaluation__every="never")
    train(recipe, tmp_path / "run")
    (record,) = records(tmp_path / "run")
    asked = len(server.prompts)
    assert record["judge_calls"] == asked
    assert record["judge_calls"] + record["judge_kept"] == 32
    assert (record["judge_prompt_tokens"], record["judge_completion_tokens"]) == (100 * asked, 10 * asked)
    assert record["judge_cost"] == pytest.approx(100 * asked * 2.0 / 1e6, rel=1e-12)
    assert record["judge_failures"] == 0


def test_a_response_without_a_verdict_has_no_advantage(server: JudgeServer, model: Path, tmp_path: Path) -> None:
    """And is no zero among its group: the others are compared with each other."""
    server.faults = ["status 401"] * 6  # final: these six requests give no verdict
    recipe = several(model, [{"kind": "length"}, judge(server, concurrency=1)], run__steps=1, evaluation__every="never")
    train(recipe, tmp_path / "run")
    (record,) = records(tmp_path / "run")
    found = rows(tmp_path / "run", 1)
    failed = [row for row in found if row["failure"]]
    assert record["judge_failures"] == 6 == len({row["response"] for row in failed})
    assert all(row["advantage"] == 0 for row in failed)
    for group in range(4):
        counted = [row for row in found if row["group"] == group and not row["failure"]]
        rewards = np.array([row["reward"] for row in counted])
        expected = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
        np.testing.assert_allclose([row["advantage"] for row in counted], expected, atol=1e-9)


def test_a_run_stops_where_too_many_verdicts_fail_and_goes_on(server: JudgeServer, model: Path, tmp_path: Path) -> None:
    recipe = several(model, [{"kind": "math", "weight": 0.0}, judge(server)], run__steps=2, evaluation__every="never")
    server.always = "status 401"
    with pytest.raises(UserError, match=r"32 of 32 responses have no verdict, .* status 401.*--resume"):
        train(recipe, tmp_path / "run")
    server.always = ""
    train(recipe, tmp_path / "run", resume=True)
    assert [record["step"] for record in records(tmp_path / "run")] == [1, 2]


GROUP = """
import asyncio
async def rank(responses, problem):
    async def longer(one):
        await asyncio.sleep(0)
        return sum(len(one) > len(other) for other in responses) / len(responses)
    return await asyncio.gather(*map(longer, responses))

async def one(response, problem):
    await asyncio.sleep(0.001)
    return len(response) / 100

def short(responses, problem):
    return [0.0] * (len(responses) - 1)
"""


@pytest.fixture
def functions(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(GROUP)
    return str(tmp_path / "mine.py")


def test_a_function_compares_the_responses_of_a_group(functions: str, model: Path, tmp_path: Path) -> None:
    keys = {"reward__kind": "custom", "reward__custom_file": functions, "reward__custom_function": "rank"}
    recipe = make_recipe(
        model, reward__group=True, reward__length_penalty=0.0, run__steps=1, evaluation__every="never", **keys
    )
    train(recipe, tmp_path / "run")
    for group in range(4):
        found = [row for row in rows(tmp_path / "run", 1) if row["group"] == group]
        texts = [row["response"] for row in found]
        expected = [sum(len(one) > len(other) for other in texts) / 8 for one in texts]
        assert [row["reward"] for row in found] == expected


def test_an_async_function_is_awaited(functions: str, model: Path, tmp_path: Path) -> None:
    keys = {"reward__kind": "custom", "reward__custom_file": functions, "reward__custom_function": "one"}
    recipe = make_recipe(model, reward__length_penalty=0.0, run__steps=1, evaluation__every="never", **keys)
    train(recipe, tmp_path / "run")
    assert all(row["reward"] == len(row["response"]) / 100 for row in rows(tmp_path / "run", 1))


def test_a_group_function_that_forgets_a_response_is_refused(functions: str, model: Path, tmp_path: Path) -> None:
    keys = {"reward__kind": "custom", "reward__custom_file": functions, "reward__custom_function": "short"}
    with pytest.raises(UserError, match=r"returned '\[\]'; it must return 1 numbers, one for each response"):
        train(make_recipe(model, reward__group=True, run__steps=1, **keys), tmp_path / "run")


@pytest.mark.parametrize(
    ("reward", "said"),
    [
        ({"kind": "math", "group": True}, "reward.group is for a function of your own"),
        ({"kind": "math", "judge": {"model": "x"}}, r"\[reward.judge\] is for a judge"),
        ({"kind": "judge", "flip": 0.1}, "reward.flip"),
    ],
)
def test_keys_that_do_not_fit_are_refused(reward: dict[str, Any], said: str, model: Path) -> None:
    with pytest.raises(UserError, match=said):
        several(model, [reward])
