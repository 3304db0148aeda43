"""Batches drawn several steps ahead: bounded staleness, exact resume of what was drawn, and no waiting in turn."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from backends.collective import SOLO
from backends.interface import Completions, Sequences, starts_of
from delta_cli.data.problem import Problem
from delta_cli.recipe import load_recipe
from delta_cli.rewards.grader import Verdict
from delta_cli.rollout import unused_batches
from delta_cli.rollout.batch import RolloutBatch
from delta_cli.rollout.collect import BatchCollector
from delta_cli.rollout.worker import PendingRollout
from delta_cli.runs.folder import JsonObject, RunFolder, read_lines
from delta_cli.runs.observer import Observer, PhaseClock
from tests.harness import Watcher, contents, make_recipe, train, write_model
from tests.vllm.server import COMPLETIONS, serving


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


def records(folder: Path) -> list[JsonObject]:
    return list(read_lines(RunFolder(folder).metrics))


@pytest.mark.parametrize("ahead", [2, pytest.param(4, marks=pytest.mark.long)])
def test_no_batch_is_older_than_allowed_and_every_response_says_how_old(
    ahead: int, model: Path, tmp_path: Path
) -> None:
    with serving(model) as (_, url):
        changes = {"engine__kind": "vllm", "engine__url": [url], "engine__async_steps": ahead}
        train(make_recipe(model, run__steps=7, evaluation__every="never", **changes), tmp_path / "run")
    updates = [int(record["updates"]) for record in records(tmp_path / "run")]
    expected = [sum(updates[max(step - ahead, 0) : step]) for step in range(7)]
    assert [record["staleness"] for record in records(tmp_path / "run")] == expected
    for step in range(7):
        rows = read_lines(RunFolder(tmp_path / "run").rollout_file(step + 1))
        assert {row["staleness"] for row in rows} == {expected[step]}


class Dies(Watcher):
    """Ends the process's work in the middle of a run, as a crash does."""

    def step(self, record: JsonObject, examples: list[Any]) -> None:
        super().step(record, examples)
        if record["step"] == 5:
            raise RuntimeError("crash")


@pytest.mark.long
@pytest.mark.parametrize("ahead", [1, 2, 3])
def test_a_resumed_run_trains_on_the_batches_that_were_drawn(ahead: int, model: Path, tmp_path: Path) -> None:
    """To the bit: metrics, rollouts, weights. After a crash at step 5, from the checkpoint of step 4."""
    keys = {"engine__kind": "vllm", "engine__async_steps": ahead, "run__steps": 7, "evaluation__every": 3}
    with serving(model) as (_, url):
        train(make_recipe(model, engine__url=[url], **keys), tmp_path / "whole")
    with serving(model) as (_, url):
        recipe = make_recipe(model, engine__url=[url], **keys)
        with pytest.raises(RuntimeError, match="crash"):
            train(recipe, tmp_path / "parts", observer=Dies())
    with serving(model) as (server, url):
        train(make_recipe(model, engine__url=[url], **keys), tmp_path / "parts", resume=True)
        responses = 8 * 4
        evaluated = 6 * 2  # after steps 6 and 7
        responses_drawn = [
            body
            for _, route, body in server.calls
            if route == COMPLETIONS
            and "prompt_logprobs" not in body
            and body["max_tokens"] == recipe.rollout.max_tokens
        ]
        assert len(responses_drawn) - evaluated == max(3 - ahead, 0) * responses, "what was drawn is not drawn again"
    whole, parts = contents(tmp_path / "whole"), contents(tmp_path / "parts")
    for name in whole.keys() - {"recipe.toml", "state.json"}:  # the addresses of the servers differ
        np.testing.assert_equal(parts[name], whole[name], name)


def batch(problems: list[Problem], version: int) -> RolloutBatch:
    """Two responses to each of two problems."""
    rng = np.random.default_rng(version)
    prompts = [np.array([1, 2]), np.array([3])]
    sequences = Sequences(tuple(p for p in prompts for _ in range(2)), rng.integers(0, 9, 6), starts_of([1, 2, 0, 3]))
    verdicts = (Verdict(0.1 + 0.2, True, None), Verdict(0.0, False, "timeout", {"a": 1 / 3}))
    return RolloutBatch(
        tuple(problems[place] for place in (2, 0)),
        sequences,
        ("a", "ü", "", "\n"),
        verdicts * 2,
        np.array([True, False, True, False]),
        rng.normal(size=6).astype(np.float32),
        version=version,
        engine_entropies=rng.normal(size=6).astype(np.float32) if version == 3 else None,
        draws=version,
    )


def test_batches_come_back_from_their_files_to_the_bit(tmp_path: Path) -> None:
    problems = [Problem(str(n), f"{n}?", str(n)) for n in range(3)]
    batches = [batch(problems, 3), batch(problems, 5)]
    unused_batches.save(tmp_path, batches, problems, version=8)
    found = unused_batches.load(tmp_path, problems, version=18)
    assert [each.version for each in found] == [13, 15], "as old as they were"
    for mine, theirs in zip(found, batches, strict=True):
        assert mine.problems == theirs.problems
        assert (mine.texts, mine.verdicts, mine.draws) == (theirs.texts, theirs.verdicts, theirs.draws)
        for name in ("truncated", "engine_logprobs", "engine_entropies"):
            np.testing.assert_array_equal(getattr(mine, name), getattr(theirs, name))
        for name in ("tokens", "starts"):
            np.testing.assert_array_equal(getattr(mine.sequences, name), getattr(theirs.sequences, name))
        assert [p.tolist() for p in mine.sequences.prompts] == [p.tolist() for p in theirs.sequences.prompts]
    assert unused_batches.load(tmp_path / "nothing", problems, version=1) == []


UNIT = 0.2  # seconds of drawing, of rewards, and of training, each


def slow_worker() -> Any:
    """Draws for one unit; verdicts come one unit after that."""

    def sample(problems: Any, sampling: Any, *given: Any, **named: Any) -> PendingRollout:
        time.sleep(UNIT)
        verdict: Future[Verdict] = Future()
        threading.Timer(UNIT, lambda: verdict.set_result(Verdict(1.0, True, None))).start()
        drawn = Completions(np.array([1]), np.array([0, 1]), np.zeros(1, np.float32), np.array([False]))
        return PendingRollout(
            tuple(problems), (np.array([1]),), sampling, np.array([0]), drawn, ("",), (verdict,), SOLO
        )

    tokenizer = SimpleNamespace(eos_ids=(0,), stop_text=lambda stop: None)
    return SimpleNamespace(ranks=SOLO, tokenizer=tokenizer, sample=sample, sampler=SimpleNamespace(version=0))


@pytest.mark.parametrize(("ahead", "most"), [(0, 3.2), (2, 1.1)])
def test_neither_drawing_nor_rewards_nor_training_waits_for_the_others(ahead: int, most: float) -> None:
    """Two steps ahead, a step takes as long as the longest of the three, not as their sum."""
    engine = ["engine.kind=vllm", "engine.launch=true", f"engine.async_steps={ahead}"]
    recipe = load_recipe(None, [*engine, "rollout.prompts=1", "rollout.responses=1", "method.preset=grpo",
                                "update.mini_batches=1"])  # fmt: skip
    learner: Any = SimpleNamespace(version=0)
    collector = BatchCollector(
        recipe, learner, slow_worker(), [Problem("1", "1?", "1")], Observer(), lambda: None, lambda: None
    )
    done, steps = [], 8
    for step in range(steps if ahead else 4):
        collector.take(step, step, PhaseClock())
        for each in collector.missing(step, steps):
            collector.start(each, None)
        time.sleep(UNIT)  # training
        done.append(time.perf_counter())
    collector.close()
    median = float(np.median(np.diff(done)[1:])) / UNIT
    assert median < most
    assert median > (0.95 if ahead else 2.95)


@pytest.mark.parametrize(("others", "kept"), [([3], 2), ([1], 1), ([0, 2], 0)])
def test_ranks_go_on_with_the_batches_that_all_of_them_find(
    others: list[int], kept: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A rank without the checkpoint's folder samples again, and so do the others: sampling takes all of them."""
    ranks = SimpleNamespace(size=1 + len(others), gather=lambda item: [item, *(-count for count in others)])
    worker: Any = SimpleNamespace(ranks=ranks)
    problems = [Problem("1", "1+1?", "2")]
    learner: Any = SimpleNamespace(version=3)
    recipe = load_recipe(None, ["engine.kind=vllm", "engine.launch=true", "engine.async_steps=2"])
    collector = BatchCollector(recipe, learner, worker, problems, Observer(), lambda: None, lambda: None)
    found = [SimpleNamespace(draws=1)] * 2
    monkeypatch.setattr(unused_batches, "load", lambda *_: found)
    collector.load(tmp_path, 3, 5)
    assert len(collector._ahead) == kept
    assert collector._draws == 5 + kept
