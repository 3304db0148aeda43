"""Runs with an environment: what is learned from, recorded and measured, failures, resume and several ranks."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from backends import registry
from backends.collective import SOLO
from backends.interface import Sampling, Sequences
from delta_cli.cli import app
from delta_cli.data import arithmetic
from delta_cli.data.problem import Problem
from delta_cli.data.tokenizer import Tokenizer
from delta_cli.environments.opened import Environments
from delta_cli.errors import UserError
from delta_cli.recipe import Recipe, load_recipe
from delta_cli.recipe.backend_settings import backend_settings
from delta_cli.recipe.data import Arithmetic
from delta_cli.recipe.environment import EnvironmentSection
from delta_cli.reporting.html_pages import inspection_page
from delta_cli.reporting.inspection import InspectedResponse, inspect_run, to_json
from delta_cli.reporting.inspection_text import render
from delta_cli.reporting.report import _cut, write_report
from delta_cli.rewards.grader import Verdict
from delta_cli.rollout.batch import RolloutBatch
from delta_cli.rollout.episodes import Episode, EpisodeDriver
from delta_cli.rollout.worker import RolloutWorker
from delta_cli.runs.folder import RunFolder, read_lines
from delta_cli.runs.records import RecordedResponse, RecordedRun
from delta_cli.training import setup
from delta_cli.training.setup import open_trainer

from ..credit.ranks import ThreadRanks, on_ranks
from ..environments.test_dialogue import FAMILIES, make_tokenizer
from ..harness import CLOCKS, Watcher

CALCULATOR = {
    "run.steps": 2,
    "rollout.prompts": 4,
    "rollout.responses": 4,
    "rollout.stop": ["="],
    "environment.kind": "text",
    "environment.file": "calculator",
    "evaluation.problems": 8,
    "evaluation.every": 2,
    "checkpoint.every": 1,
    "update.mini_batches": 2,
}
GAME = """
from delta_cli.environments import Turn

class Game:
    def reset(self, id, **row):
        self.left = 2
        self.bad = sum(map(ord, id)) % 3 == 0
        return None

    def step(self, text):
        self.left -= 1
        if self.bad and self.left == 0:
            raise RuntimeError("the board fell over")
        return Turn("+1", self.left <= 0, float(len(text) % 2))
"""


def recipe_with(**changes: Any) -> Recipe:
    keys = CALCULATOR | {name.replace("__", "."): value for name, value in changes.items()}
    return load_recipe(None, [f"{name}={json.dumps(value)}" for name, value in keys.items() if value is not None])


def train(recipe: Recipe, folder: Path, resume: bool = False, backend: str = "fake") -> Watcher:
    watcher = Watcher()
    with open_trainer(recipe, backend, folder, watcher) as trainer:
        trainer.run(resume)
    return watcher


def clockless(record: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in record.items() if not name.startswith(CLOCKS)}


def test_a_run_with_the_calculator(tmp_path: Path) -> None:
    """Every result of an equation is the environment's, exact, and has no coefficient; metrics count it."""
    watcher = train(recipe_with(), tmp_path / "run")
    run = RecordedRun(tmp_path / "run")
    results = 0
    for step, metrics in zip(run.steps, watcher.records, strict=True):
        responses = list(run.responses(step))
        for response in responses:
            assert response.region is not None
            assert response.own is not None
            np.testing.assert_array_equal(response.region[response.own], response.tokens)
            assert len(response.coefficients) == len(response.tokens) == int(response.own.sum())
            pieces = run.tokenizer.pieces(response.region)
            text = "".join(piece if own else f"<{piece}>" for piece, own in zip(pieces, response.own, strict=True))
            for part in text.replace("><", "").split()[:-1]:
                left, _, right = part.partition("=<")
                assert eval(left) == int(right.rstrip(">")), part
                results += 1
            assert response.episode["turns"] >= 2
        assert metrics["tokens"] == sum(len(response) for response in responses)
        written = sum(len(response.region) - len(response) for response in responses if response.region is not None)
        assert metrics["observation_tokens"] == written > 0
        turns = [response.episode["turns"] for response in responses]
        assert metrics["episode_turns_mean"] == pytest.approx(np.mean(turns))
        assert metrics["environment_calls"] == sum(turns)
        assert metrics["environment_failures"] == metrics["observations_cut"] == 0
        assert metrics["coefficient_mean"] == pytest.approx(1)
    assert results > 60
    (first, last) = read_lines(RunFolder(tmp_path / "run").evaluations)
    assert first["accuracy"] > 0.8, "about 0.4 without the calculator"
    assert last["step"] == 2


def test_what_inspect_shows(tmp_path: Path) -> None:
    """The environment's text stands between the tokens, without a coefficient; a turn has a mean of its own."""
    train(recipe_with(run__steps=1, evaluation__every="never"), tmp_path / "run")
    inspection = inspect_run(tmp_path / "run")
    for shown in inspection.responses:
        response = shown.response
        assert response.region is not None
        assert len(shown.pieces) == len(response) == len(shown.written) - 1
        together = "".join(text for pair in zip(shown.written, [*shown.pieces, ""], strict=True) for text in pair)
        assert together == "".join(Tokenizer.load(_tiny()).pieces(response.region))
        assert len(shown.turns) == response.episode["turns"]
        assert all(shown.pieces[turn.stop - 1] == "=" for turn in shown.turns[:-1])
        assert all(equation.holds for equation in shown.equations if "\\" not in equation.text)
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(render(inspection))
    printed = console.export_text()
    assert "turns 1." in printed or "turns 0." in printed
    page = inspection_page(inspection)
    texts = [text for inspected, _ in inspection.variants for text in inspected.written if text]
    assert page.count("written by the environment") == len(texts) > 0
    assert page.count('<div class="tokens"') == sum(shown.response.episode["turns"] for shown, _ in inspection.variants)
    assert "turn 2, mean coefficient" in page
    assert " turns, " in page
    assert json.loads(to_json(inspection))["responses"][0]["episode"]["turns"] > 1
    (report,) = write_report([tmp_path / "run"], tmp_path / "report.html")
    for title in ("Turns of an episode", "Calls of environments", "Failed episodes", "Waiting for environments"):
        assert title in report.read_text()
    assert "turn 2, mean coefficient" in report.read_text()


def test_a_long_episode_is_cut_for_a_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cut comes after tokens of the model and keeps the environment's text before them."""
    train(recipe_with(run__steps=1, evaluation__every="never"), tmp_path / "run")
    monkeypatch.setattr("delta_cli.reporting.report.RESPONSE_TOKENS", 7)
    write_report([tmp_path / "run"], tmp_path / "report.html")
    run = RecordedRun(tmp_path / "run")
    whole = max(run.responses(run.steps[0]), key=len)
    cut = _cut(whole)
    assert cut.own is not None
    assert cut.region is not None
    assert len(cut) == int(cut.own.sum()) == 7 < len(whole)
    np.testing.assert_array_equal(cut.region[cut.own], whole.tokens[:7])


def test_calls_of_a_chat_have_coefficients() -> None:
    """Calls in Qwen3's form, whose tags are special tokens, have coefficients; the other turn has no calls."""
    tokenizer = make_tokenizer(FAMILIES["qwen3"][0])
    turn = '<tool_call>\n{"name": "search", "arguments": {"query": "owl"}}\n</tool_call><|im_end|>'
    ids = [tokenizer.encode(part, special=False) for part in (turn, "<|im_start|>tool\nfound<|im_end|>", "an owl")]
    own = np.repeat([True, False, True], [len(part) for part in ids])
    region = np.concatenate(ids)
    coefficients = np.arange(int(own.sum()), dtype=float)
    names = ("group", "problem", "prompt", "answer", "text", "reward", "correct", "failure", "advantage", "truncated")
    plain = dict.fromkeys(names, 0) | {"failure": None}
    response = RecordedResponse(
        **plain,
        tokens=region[own],
        coefficients=coefficients,
        logprobs=-coefficients,
        entropies=coefficients,
        region=region,
        own=own,
        episode={"turns": 2},
    )
    (call,), none = InspectedResponse.of(response, tokenizer).calls
    assert none == []
    pieces = tokenizer.pieces(region[own])
    text = "".join(pieces)
    place = text.index('"owl"')
    ends = np.cumsum([len(piece) for piece in pieces])
    inside = (ends > place) & (ends - [len(piece) for piece in pieces] < place + 5)
    assert call.name == "search"
    assert call.arguments == {"query": pytest.approx(coefficients[inside].mean())}


def test_eval_and_chat_use_the_runs_environment(tmp_path: Path) -> None:
    train(recipe_with(run__steps=1, evaluation__at_start=False), tmp_path / "run")
    done = CliRunner().invoke(app, ["eval", str(tmp_path / "run"), "--backend", "fake", "--limit", "8", "--json"])
    assert done.exit_code == 0, done.output
    (benchmark,) = json.loads(done.stdout)["benchmarks"]
    assert benchmark["turns"] == benchmark["calls"] > 2
    assert benchmark["avg"]["mean"] > 0.7
    done = CliRunner().invoke(app, ["chat", str(tmp_path / "run"), "--backend", "fake", "--prompt", "47+38=?"])
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("7+8=15 4+3+1=8 ")


class Ranks(ThreadRanks):
    """Ranks as threads, which add up arrays of any type."""

    def sum(self, array: np.ndarray) -> np.ndarray:
        return np.asarray(np.sum(self.gather(array), axis=0))


def test_several_ranks_draw_the_episodes_of_one() -> None:
    """Regions, records and rewards have the same order whichever rank drew them; prompts of a group share an array."""
    recipe = recipe_with()
    tokenizer = Tokenizer.load(_tiny())
    problems = arithmetic.problems(Arithmetic(operation="add", digits=2), 5, 0)
    ends = tokenizer.stop_text(recipe.rollout.stop)
    sampling = Sampling(max_tokens=48, stop_ids=tokenizer.eos_ids, samples=3, seed=7, stop=ends)

    def work(ranks: Any) -> RolloutBatch:
        engine = registry.create("fake", backend_settings(recipe))
        with Environments(recipe.environment, tokenizer, "tiny") as environments, setup.make_grader(recipe) as grader:
            worker = RolloutWorker(engine, tokenizer, grader, "chat", ranks, environments=environments)
            return worker.sample(problems, sampling, entropies=True).result()

    alone = work(SOLO)
    assert alone.sequences.regions is not None
    for found in on_ranks(2, lambda ranks: work(Ranks(ranks.rank, ranks.size, ranks.meeting))):
        regions = found.sequences.regions
        np.testing.assert_array_equal(regions.ids, alone.sequences.regions.ids)
        np.testing.assert_array_equal(regions.own, alone.sequences.regions.own)
        np.testing.assert_array_equal(found.sequences.tokens, alone.sequences.tokens)
        np.testing.assert_array_equal(found.sequences.starts, alone.sequences.starts)
        np.testing.assert_allclose(found.engine_logprobs, alone.engine_logprobs, atol=1e-6)
        assert found.texts == alone.texts
        assert found.verdicts == alone.verdicts
        for one, other in zip(found.episodes, alone.episodes or (), strict=True):
            assert replace(one, seconds=0.0) == replace(other, seconds=0.0)
        for row, prompt in enumerate(found.sequences.prompts):
            assert prompt is found.sequences.prompts[row - row % 3]
            np.testing.assert_array_equal(prompt, alone.sequences.prompts[row])


def test_the_second_half_of_a_run_continues_the_first(tmp_path: Path) -> None:
    train(recipe_with(run__steps=2), tmp_path / "whole")
    train(recipe_with(run__steps=1, evaluation__every="never"), tmp_path / "half")
    train(recipe_with(run__steps=2), tmp_path / "half", resume=True)
    whole, half = (list(read_lines(RunFolder(tmp_path / name).metrics))[1] for name in ("whole", "half"))
    assert clockless(whole) == clockless(half)
    assert RunFolder(tmp_path / "whole").model.joinpath("model.safetensors").read_bytes() == (
        RunFolder(tmp_path / "half").model.joinpath("model.safetensors").read_bytes()
    )


def test_a_users_game_and_its_failures(tmp_path: Path) -> None:
    """Episodes that fail have no reward and no advantage; the run goes on and counts them."""
    file = tmp_path / "game.py"
    file.write_text(GAME)
    changes = {"environment__file": f"{file}:Game", "environment__errors": "fail", "reward__kind": "environment"}
    watcher = train(recipe_with(**changes, evaluation__every="never"), tmp_path / "run")
    run = RecordedRun(tmp_path / "run")
    responses = [response for step in run.steps for response in run.responses(step)]
    failed = [response for response in responses if response.failure is not None]
    assert 0 < len(failed) < len(responses)
    assert sum(metrics["environment_failures"] for metrics in watcher.records) == len(failed)
    assert all(metrics["reward_failures"] == 0 for metrics in watcher.records)
    for response in failed:
        assert response.failure == "environment: step raised RuntimeError: the board fell over"
        assert np.isnan(response.reward)
        assert response.advantage == 0
    for response in responses:
        if response.failure is None and not response.truncated:
            assert response.episode["reward"] == response.reward


def failed_batch(rewards: Sequence[float], failed: Sequence[bool]) -> RolloutBatch:
    """A batch of one group, of which some episodes failed."""
    count = len(rewards)
    episode = Episode(1, 1, 0, 0, 0, 0.0, "done", None, None)
    broken = Episode(1, 1, 0, 0, 0, 0.0, "failed", None, "it broke")
    return RolloutBatch(
        problems=(Problem("p", "", ""),),
        sequences=Sequences((np.ones(1, np.int64),) * count, np.ones(count, np.int64), np.arange(count + 1)),
        texts=("",) * count,
        verdicts=tuple(Verdict(reward, reward >= 1, None) for reward in rewards),
        truncated=np.zeros(count, bool),
        engine_logprobs=np.zeros(count),
        episodes=tuple(broken if each else episode for each in failed),
    )


def test_a_failed_episode_is_compared_with_no_other() -> None:
    batch = failed_batch([1, 0, 0, 1, 0], [False, False, True, False, True])
    found = batch.advantages("group_normalised")
    alone = failed_batch([1, 0, 1], [False, False, False])
    np.testing.assert_array_equal(found[[0, 1, 3]], alone.advantages("group_normalised"))
    assert found[2] == found[4] == 0
    assert batch.mixed_groups.tolist() == [0]
    assert failed_batch([1, 0, 1], [False, True, False]).mixed_groups.tolist() == []
    assert failed_batch([1, 0], [True, True]).mixed_groups.tolist() == []


def test_limits_end_episodes(tmp_path: Path) -> None:
    train(recipe_with(environment__turns=2, evaluation__every="never", run__steps=1), tmp_path / "turns")
    ends = {each.episode["ended"] for each in RecordedRun(tmp_path / "turns").responses(1)}
    assert "turns" in ends
    assert max(each.episode["turns"] for each in RecordedRun(tmp_path / "turns").responses(1)) == 2
    short = recipe_with(rollout__max_tokens=9, evaluation__every="never", run__steps=1)
    train(short, tmp_path / "tokens")
    for response in RecordedRun(tmp_path / "tokens").responses(1):
        assert response.region is not None
        assert len(response.region) <= 9
        assert response.truncated == (response.episode["ended"] == "tokens")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"environment__kind": None, "environment__file": "calculator"}, "needs environment.kind"),
        ({"environment__file": None}, "needs environment.file"),
        ({"environment__file": "game"}, "neither of the form FILE.py:NAME nor shipped"),
        ({"environment__kind": "tools", "environment__file": None}, "needs environment.tools"),
        ({"environment__tools": ["calculator"]}, 'for environment.kind = "tools"'),
        ({"environment__kind": None, "environment__file": None, "reward__kind": "environment"}, r"add \[environment\]"),
    ],
)
def test_recipes_that_make_no_sense(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        recipe_with(**changes)


def test_the_section_arrives_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What opens the environments gets the section itself, so that no key of it can get lost."""
    seen = []
    monkeypatch.setattr(setup, "Environments", lambda section, *_: seen.append(section) or Environments(section, *_))
    recipe = recipe_with(run__steps=1, evaluation__every="never", environment__seconds=3.5, environment__workers=3)
    with open_trainer(recipe, "fake", tmp_path / "run", Watcher()) as trainer:
        assert trainer.worker.environments is not None
        assert trainer.worker.environments.section is recipe.environment
    assert seen == [recipe.environment]


@pytest.mark.parametrize(("errors", "ended"), [("tell", "turns"), ("fail", "failed")])
def test_what_an_exception_becomes(tmp_path: Path, errors: str, ended: str) -> None:
    """An exception becomes text for the model or ends the episode; long text is cut and marked."""
    file = tmp_path / "game.py"
    file.write_text("class Game:\n    def step(self, text):\n        raise ValueError('1' * 500)\n")
    driver = EpisodeDriver(
        Environments(
            EnvironmentSection(kind="text", file=f"{file}:Game", errors=errors, turns=2, observation_tokens=20),
            Tokenizer.load(_tiny()),
            "tiny",
        ),
        Tokenizer.load(_tiny()),
        Sampling(max_tokens=200, stop_ids=(0,)),
        [Problem("p", "1+1=?", "2")],
    )
    driver.begin()
    driver.set_prompts([np.array([5, 6])])
    region = np.array([7, 8])
    for _ in range(2):
        driver.turn_ended(0, region)
        (found,) = driver.answers(wait=True) or driver.answers(wait=True)
        if found[1] is None:
            break
        assert 10 <= len(found[1]) <= 20
        region = np.concatenate([region, found[1], [7, 8]])
    done = driver.record(0)
    assert (done.ended, done.cut) == (ended, 1 if errors == "tell" else 0)
    assert done.failure is None if errors == "tell" else "ValueError" in str(done.failure)
    driver.close(now=True)
    driver.environments.close()


def test_special_tokens_in_observations_are_text() -> None:
    tokenizer = Tokenizer.load(_tiny())
    marked = next(iter(tokenizer._added))
    text = tokenizer.without_special(f"a{marked}b")
    assert not set(tokenizer.encode(text, special=False)) & set(tokenizer.eos_ids)
    assert EnvironmentSection().used is False


def _tiny() -> str:
    from delta_cli.assets import model_path

    return model_path("tiny-base")
