"""Episodes from servers that speak vLLM's calls: one request a turn, with the ids as they are."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from backends.interface import Completions, Engine, RolloutRequest, Sequences
from backends.vllm.drafts import seed_of
from delta_cli.assets import model_path
from delta_cli.data.problem import Problem
from delta_cli.data.tokenizer import Tokenizer
from delta_cli.environments.opened import Environments
from delta_cli.recipe import load_recipe
from delta_cli.recipe.environment import EnvironmentSection
from delta_cli.rollout.episodes import EpisodeDriver
from delta_cli.runs.folder import RunFolder, read_lines
from delta_cli.runs.records import RecordedRun
from tests.conformance.test_episodes import PROMPTS, SAMPLING, Script
from tests.harness import Watcher, open_trainer, write_model
from tests.vllm.conftest import Connect, Pair, move, publish, same
from tests.vllm.server import COMPLETIONS, Fault, serving

ROWS = len(PROMPTS) * SAMPLING.samples

CALCULATOR = {
    "rollout.prompts": 4,
    "rollout.responses": 4,
    "rollout.stop": ["="],
    "environment.kind": "text",
    "environment.file": "calculator",
    "evaluation.problems": 4,
    "evaluation.every": 2,
    "checkpoint.every": 1,
}
GAME = """
import os
from delta_cli.environments import Turn

class Game:
    def reset(self, id, **row):
        self.turns = 0
        return f" {os.getpid()}" if id == "random" else " go"

    def step(self, text):
        self.turns += 1
        return Turn(f" turn {self.turns}", self.turns > 2, 0.5)
"""


def drawn(pair: Pair, script: Script) -> Completions:
    return pair.sampler.rollout(RolloutRequest(PROMPTS, SAMPLING, turns=script))


def same_regions(one: Completions, other: Completions) -> bool:
    assert one.regions is not None
    assert other.regions is not None
    names = ("ids", "own", "starts")
    equal = (np.array_equal(getattr(one.regions, name), getattr(other.regions, name)) for name in names)
    return same(one, other) and all(equal)


def test_every_turn_is_one_request_with_all_ids_before_it(connect: Connect, trainer: Engine) -> None:
    """Its seed is that of row and turn, its limit what is left; log-probabilities are those of one forward pass."""
    pair, script = connect(), Script()
    publish(trainer, pair.sampler)
    pair.server.calls.clear()
    found = drawn(pair, script)
    assert found.regions is not None
    assert max(map(len, script.ended.values())) > 2, "the seed should show several turns"
    prompts = tuple(prompt for prompt in PROMPTS for _ in range(SAMPLING.samples))
    expected = []
    for row, prompt in enumerate(prompts):
        ids, own = found.regions.region(row)
        begins = [place for place in range(len(ids)) if own[place] and (place == 0 or not own[place - 1])]
        for turn, place in enumerate(begins):
            seed = seed_of(SAMPLING.seed, row, turn)
            expected.append(([*prompt.tolist(), *ids[:place].tolist()], seed, SAMPLING.max_tokens - place))
    asked = [
        (body["prompt"], body["seed"], body["max_tokens"])
        for _, route, body in pair.server.calls
        if route == COMPLETIONS and "stop_token_ids" in body
    ]
    assert sorted(asked) == sorted(expected)
    scored = trainer.score(Sequences(prompts, found.tokens, found.starts, SAMPLING.temperature, found.regions))
    np.testing.assert_allclose(found.logprobs, scored.logprobs, atol=2e-6, rtol=0)
    for row, truncated in enumerate(found.truncated):
        ids, own = found.regions.region(row)
        assert truncated == (len(ids) == SAMPLING.max_tokens and not (own[-1] and ids[-1] in SAMPLING.stop_ids))


def test_tokens_depend_on_neither_servers_nor_environments(connect: Connect, trainer: Engine) -> None:
    """Late answers, two servers, one request at a time, another rank's share: the same; one report for each."""
    one, two = connect(), connect(servers=2, concurrency=1)
    publish(trainer, one.sampler)
    two.sampler.load_weights(trainer.publish(two.sampler.inbox))
    expected = drawn(one, Script())
    reported: dict[int, list[int]] = {}
    request = RolloutRequest(PROMPTS, SAMPLING, turns=Script(3))
    found = two.sampler.rollout(request, lambda row, ids: reported.update({row: ids.tolist()}))
    assert same_regions(found, expected)
    assert expected.regions is not None
    assert [reported[row] for row in range(ROWS)] == [expected.regions.region(row)[0].tolist() for row in range(ROWS)]
    plain = one.sampler.rollout(RolloutRequest(PROMPTS, SAMPLING))
    assert same(plain, drawn(one, Script(turns=1))), "episodes of one turn are responses"
    assert plain.regions is None


def test_the_turns_of_an_episode_stay_on_one_server(connect: Connect, trainer: Engine) -> None:
    """Its prefix cache holds the turns before."""
    pair = connect(servers=2)
    publish(trainer, pair.sampler)
    script = Script()
    drawn(pair, script)
    of_row: dict[int, set[int]] = {}
    for number, server in enumerate(pair.servers):
        for _, route, body in server.calls:
            if route == COMPLETIONS and "stop_token_ids" in body:
                row = next(row for row in range(ROWS) for turn in range(5) if seed_of(4, row, turn) == body["seed"])
                of_row.setdefault(row, set()).add(number)
    assert max(map(len, script.ended.values())) > 2
    assert {len(servers) for servers in of_row.values()} == {1}
    assert set.union(*of_row.values()) == {0, 1}


@pytest.mark.parametrize("kind", ["reset", "not json", "fewer tokens", "status 500"])
def test_a_turn_that_fails_is_asked_for_again(connect: Connect, trainer: Engine, kind: str) -> None:
    pair = connect()
    publish(trainer, pair.sampler)
    expected = drawn(pair, Script())
    script = Script()
    pair.server.faults.append(Fault(COMPLETIONS, kind, after=ROWS + 2))
    assert same_regions(drawn(pair, script), expected)
    assert not script.restarted


def test_a_server_that_hangs_does_not_hold_up_its_episodes(
    connect: Connect, trainer: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("backends.vllm.server.RESPONSE_SECONDS", 0.3)
    pair = connect(servers=2, stall=0.4, deadline=600.0)
    publish(trainer, pair.sampler)
    expected = drawn(pair, Script())
    pair.server.faults.append(Fault(COMPLETIONS, "hang", after=6, times=-1))
    script = Script()
    assert same_regions(drawn(pair, script), expected)
    assert len(pair.notices) == 1
    assert script.restarted, "turns of a server that does not say which weights it has are used"


def test_episodes_of_doubtful_weights_begin_again(connect: Connect, trainer: Engine) -> None:
    """A server that was started again in between has drawn turns from other weights: their environments start over."""
    pair = connect()
    publish(trainer, pair.sampler)
    move(trainer)
    publish(trainer, pair.sampler)
    expected = drawn(pair, Script())
    pair.server.faults.append(Fault(COMPLETIONS, "quiet restart", after=ROWS + 3))
    script = Script()
    assert same_regions(drawn(pair, script), expected)
    assert sorted(script.restarted) == list(range(ROWS))
    assert "was started again" in pair.notices[0]


def test_the_driver_begins_an_episode_again(tmp_path: Path) -> None:
    """With a new environment, in which nothing of the first attempt is left; another greeting is a failure."""
    (tmp_path / "game.py").write_text(GAME)
    section = EnvironmentSection(kind="text", file=f"{tmp_path}/game.py:Game")
    tokenizer = Tokenizer.load(str(write_model(tmp_path / "model")))
    problems = [Problem("p0", "1+1=", "2"), Problem("random", "1+1=", "2")]
    sampling = replace(SAMPLING, samples=1, stop_ids=())
    with Environments(section, tokenizer, "") as environments:
        driver = EpisodeDriver(environments, tokenizer, sampling, problems)
        assert driver.begin()[0] == " go"
        driver.set_prompts([np.array([1]), np.array([1])])
        region = tokenizer.encode("7?", special=False)
        for _ in range(2):
            driver.turn_ended(0, region)
            answer = next(ids for _ in range(50) for _, ids in driver.answers(wait=True))
            assert answer is not None
            assert tokenizer.decode(answer) == " turn 1"
            driver.restart(0)
        driver.restart(1)
        assert driver.record(0).failure is None
        assert driver.record(0).turns == 0
        assert "reset gave another text" in str(driver.record(1).failure)
        driver.close(now=True)


@pytest.mark.long
@pytest.mark.parametrize("ahead", [0, 1])
def test_a_run_of_the_calculator_with_vllm(tmp_path: Path, ahead: int) -> None:
    """It records what a local run records, and a resumed run trains on the episodes that were drawn before."""
    folders = [tmp_path / name for name in ("whole", "halves")]
    records = []
    with serving(Path(model_path("tiny-base"))) as (_, url):
        changes = {**CALCULATOR, "engine.kind": "vllm", "engine.url": [url], "engine.async_steps": ahead}
        for folder, stops in zip(folders, ((2,), (1, 2)), strict=True):
            for number, steps in enumerate(stops):
                keys = changes | {"run.steps": steps}
                recipe = load_recipe(None, [f"{key}={json.dumps(value)}" for key, value in keys.items()])
                watcher = Watcher()
                with open_trainer(recipe, "fake", folder, watcher) as trainer:
                    trainer.run(number > 0)
            records.append(list(read_lines(RunFolder(folder).metrics)))
    run = RecordedRun(folders[0])
    for step in run.steps:
        for response in run.responses(step):
            assert response.region is not None
            assert response.own is not None
            np.testing.assert_array_equal(response.region[response.own], response.tokens)
            assert len(response.coefficients) == len(response.tokens)
    halves = RecordedRun(folders[1])
    for step in run.steps:
        pairs = zip(run.responses(step), halves.responses(step), strict=True)
        assert all(np.array_equal(one.whole_region[0], other.whole_region[0]) for one, other in pairs)
    for one, other in zip(*records, strict=True):
        assert one["observation_tokens"] == other["observation_tokens"] > 0
        assert one["episode_turns_mean"] == other["episode_turns_mean"] > 1
        assert one["reward_mean"] == other["reward_mean"]
