"""Environments of the package verifiers: the tokens that are trained on are those that were sampled, bit for bit."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from backends import registry
from backends.collective import SOLO
from backends.interface import Collective, Completions, Engine, OnFinished, RolloutRequest, Sampling
from backends.settings import BackendSettings
from delta_cli.assets.random_model import write_qwen3
from delta_cli.data.tokenizer import Tokenizer
from delta_cli.environments.verifiers_host import VerifiersHost, load_tasks, task_problems
from delta_cli.environments.verifiers_trace import failed, played
from delta_cli.errors import UserError
from delta_cli.recipe import Recipe, load_recipe
from delta_cli.recipe.environment import EnvironmentSection
from delta_cli.rollout.batch import RolloutBatch
from delta_cli.rollout.worker import RolloutWorker
from delta_cli.runs.folder import RunFolder, read_lines
from delta_cli.runs.records import RecordedRun
from delta_cli.training.setup import open_trainer

from ..credit.ranks import on_ranks
from ..harness import CLOCKS, EarnedGrader, Watcher
from ..training.test_episodes import Ranks
from .test_dialogue import FAMILIES, make_tokenizer

needs_package = pytest.mark.skipif(find_spec("verifiers") is None, reason="the package verifiers is not installed")
quiet = pytest.mark.filterwarnings("ignore")  # of the package and what it imports
# Random weights open a <think> now and then and end their turn in it, after which nothing can be appended safely.
BROKEN = re.compile("the board fell over|could not be extended")
GAME = "verifiers-game"  # the module beside this one


# ------------------------------------------------------------------------------- without the package


def trace(**changes: Any) -> SimpleNamespace:
    """A trace of two turns: a prompt of two tokens, a turn, two tokens of the environment, a turn, one token more."""
    branch = SimpleNamespace(
        trainable=True,
        token_ids=[1, 2, 3, 4, 5, 6, 7, 8],
        sampled_mask=[False, False, True, True, False, False, True, False],
        logprobs=[0.0, 0.0, -0.5, -0.25, 0.0, 0.0, -2.0, 0.0],
    )
    found: dict[str, Any] = {
        "agent": SimpleNamespace(trainable=True),
        "branches": [branch],
        "rewards": {"odd": SimpleNamespace()},
        "reward": 0.5,
        "num_turns": 2,
        "tool_messages": [],
        "stop_condition": "agent_completed",
        "is_truncated": False,
        "errors": [],
        "timing": SimpleNamespace(
            agent=SimpleNamespace(harness=SimpleNamespace(duration=1.0)), scoring=SimpleNamespace(duration=0.5)
        ),
    }
    return SimpleNamespace(**(found | changes))


def episode(*traces: SimpleNamespace, ok: bool = True, errors: Any = ()) -> Any:
    return SimpleNamespace(ok=ok, errors=list(errors), traces=list(traces))


def test_a_trace_becomes_a_prompt_and_a_region() -> None:
    found = played(episode(trace()))
    assert found.failure is None
    assert found.prompt.tolist() == [1, 2]
    assert found.region.tolist() == [3, 4, 5, 6, 7]
    assert found.own.tolist() == [True, True, False, False, True]
    assert found.logprobs.tolist() == [-0.5, -0.25, -2.0]
    assert found.last_turn.tolist() == [7]
    assert (found.reward, found.turns, found.seconds, found.ended) == (0.5, 2, 1.5, "done")
    assert played(episode(trace(rewards={}))).reward is None
    assert played(episode(trace(stop_condition="max_turns", is_truncated=True))).ended == "turns"
    assert played(episode(trace(is_truncated=True))).ended == "tokens"


def test_what_cannot_be_trained_on_token_by_token_has_failed() -> None:
    two = trace().branches * 2
    error = SimpleNamespace(type="TaskError", message="the board\nfell over")
    wrong = [
        (episode(trace(branches=two)), "2 versions"),
        (episode(trace(), trace()), "2 agents"),
        (episode(), "0 agents"),
        (episode(trace(reward=float("nan"))), "its reward is nan"),
        (episode(trace(errors=[error]), ok=False), "TaskError: the board fell over"),
        (episode(ok=False), "does not say why"),
        (episode(trace(branches=[SimpleNamespace(trainable=True, token_ids=[1], sampled_mask=[False])])), "not asked"),
    ]
    for given, reason in wrong:
        found = played(given)
        assert reason in (found.failure or "")
        assert len(found.region) == len(found.own) == len(found.logprobs) == 0
    assert failed("x\ny " * 200).failure == ("x y " * 200)[:300]
    judge = trace(agent=SimpleNamespace(trainable=False))
    assert played(episode(judge, trace())).failure is None


def test_recipes_say_which_environment() -> None:
    section = {"kind": "verifiers", "id": "some-game", "file": "game.toml", "turns": 4}
    assert EnvironmentSection.model_validate(section).used
    for wrong, word in (
        ({"kind": "verifiers"}, "environment.id"),
        ({"kind": "verifiers", "id": "x", "tools": ("python",)}, "no environment.tools"),
        ({"kind": "text", "id": "x"}, 'environment.kind = "verifiers"'),
    ):
        with pytest.raises(ValueError, match=word):
            EnvironmentSection.model_validate(wrong)
    with pytest.raises(UserError, match=r'environment\.kind = "verifiers" does not return'):
        load_recipe(None, ['environment.kind="verifiers"', 'environment.id="x"', 'update.old_logprobs="rollout"'])


@pytest.mark.skipif(find_spec("verifiers") is not None, reason="the package verifiers is installed")
def test_without_the_package_the_error_says_what_to_install() -> None:
    with pytest.raises(UserError, match=r"pip install 'delta-rlvr\[verifiers\]'"):
        task_problems(EnvironmentSection(kind="verifiers", id="some-game"))


# ---------------------------------------------------------------------------------- with the package


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with the special tokens of Qwen3."""
    folder = tmp_path_factory.mktemp("qwen3")
    tokens = FAMILIES["qwen3"][0]
    make_tokenizer(tokens)._core.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": tokens.split()[0]}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    sizes = {"hidden": 16, "layers": 1, "heads": 2, "kv_heads": 1, "head_dim": 8, "intermediate": 32}
    write_qwen3(folder, vocab_size=256 + len(tokens.split()), eos_id=256, **sizes)
    return folder


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The environment's own settings: its program needs no sandbox."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    (tmp_path / "game.toml").write_text('[agent.runtime]\ntype = "subprocess"\n')
    return str(tmp_path / "game.toml")


class Listening:
    """An engine that keeps every response it has drawn, tokens and log-probabilities, by its prompt."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.version, self.inbox = engine, 0, None
        self.drawn: dict[bytes, list[tuple[bytes, bytes]]] = {}

    def rollout(self, request: RolloutRequest, on_finished: OnFinished | None = None) -> Completions:
        found = self.engine.rollout(request, on_finished)
        for place, prompt in enumerate(request.prompts):
            part = slice(found.starts[place], found.starts[place + 1])
            response = found.tokens[part].tobytes(), found.logprobs[part].tobytes()
            self.drawn.setdefault(prompt.tobytes(), []).append(response)
        return found

    def load_weights(self, weights: object) -> None:
        raise NotImplementedError


@needs_package
@quiet
@pytest.mark.long
def test_every_token_is_the_one_that_was_sampled_after_its_context(folder: Path, settings: str) -> None:
    engine = registry.create("fake", BackendSettings.of(str(folder), frozen=True))
    tokenizer = Tokenizer.load(str(folder))
    section = EnvironmentSection(kind="verifiers", id=GAME, file=settings, renderer="qwen3", workers=7)
    sampler, rows = Listening(engine), np.arange(12)
    with VerifiersHost(section, tokenizer, str(folder), 400) as host:
        problems = [problem for problem in task_problems(section)[:6] for _ in range(2)]
        sampling = Sampling(12, tokenizer.eos_ids, temperature=0.9, seed=5)
        first, again = (
            host.play(problems, rows, sampling, sampler, lambda: None, lambda row, episode: None) for _ in range(2)
        )
    spans = 0
    for problem, one, other in zip(problems, first, again, strict=True):
        assert one.failure == other.failure
        if int(problem.id) % 5 == 4:
            assert BROKEN.search(one.failure or "")
        if one.failure is not None:
            assert BROKEN.search(one.failure)
            continue
        for name in ("prompt", "region", "own", "logprobs"):
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
        assert one.reward == other.reward
        assert one.reward in (0, 1)
        ids, at, used = np.concatenate([one.prompt, one.region]), len(one.prompt), 0
        marks = np.concatenate([np.zeros(at, bool), one.own, [False]])
        while at < len(ids):
            end = at + int(np.argmin(marks[at:]))
            logprobs = one.logprobs[used : used + end - at]
            assert (ids[at:end].tobytes(), logprobs.tobytes()) in sampler.drawn[ids[:at].tobytes()]
            used += end - at
            spans += 1
            at = end + int(np.argmax(marks[end:])) if marks[end:].any() else len(ids)
    assert spans > 20
    assert host.waited > 0
    assert len({episode.region.tobytes() for episode in first if episode.failure is None}) >= 8


def recipe_with(folder: Path, settings: str, **changes: Any) -> Recipe:
    keys = {
        "model.path": str(folder),
        "run.steps": 2,
        "data.template": "plain",
        "data.held_out": 0.25,
        "rollout.prompts": 4,
        "rollout.responses": 4,
        "rollout.max_tokens": 12,
        "rollout.max_prompt_tokens": 300,
        "environment.kind": "verifiers",
        "environment.id": GAME,
        "environment.file": settings,
        "environment.renderer": "qwen3",
        "reward.kind": "environment",
        "update.mini_batches": 2,
        "update.learning_rate": 0.01,
        "update.old_logprobs": "recompute",
        "evaluation.problems": 3,
        "evaluation.every": 2,
        "checkpoint.every": 1,
    } | {name.replace("__", "."): value for name, value in changes.items()}
    return load_recipe(None, [f"{name}={json.dumps(value)}" for name, value in keys.items()])


def train(recipe: Recipe, folder: Path, resume: bool = False, backend: str = "fake") -> list[dict[str, Any]]:
    watcher = Watcher()
    with open_trainer(recipe, backend, folder, watcher) as trainer:
        trainer.run(resume)
    return [
        {name: value for name, value in record.items() if not name.startswith(CLOCKS)} for record in watcher.records
    ]


@needs_package
@quiet
@pytest.mark.long
@pytest.mark.parametrize("backend", ["fake", "cpu"])
def test_a_run_learns_from_the_episodes_and_resumes(folder: Path, settings: str, tmp_path: Path, backend: str) -> None:
    """On torch, too: the environment drives the turns, so the engine needs to know nothing of them."""
    whole = train(recipe_with(folder, settings), tmp_path / "whole", backend=backend)
    run = RecordedRun(tmp_path / "whole")
    failures = 0
    for step, metrics in zip(run.steps, whole, strict=True):
        responses = list(run.responses(step))
        failures += metrics["environment_failures"]
        for response in responses:
            if response.failure is None:
                assert response.region is not None
                assert len(response.coefficients) == len(response.tokens) == int(response.own.sum())
                assert response.episode["turns"] == 3
                assert response.episode["reward"] == response.reward
            else:
                assert BROKEN.search(response.failure)
                assert response.advantage == 0
        assert metrics["engine_gap_max"] < 1e-5, (
            "a forward pass over whole episodes gives the sampled log-probabilities"
        )
        assert metrics["observation_tokens"] > 100
    assert failures > 0
    train(recipe_with(folder, settings, run__steps=1, evaluation__every="never"), tmp_path / "half", backend=backend)
    train(recipe_with(folder, settings), tmp_path / "half", resume=True, backend=backend)
    second = list(read_lines(RunFolder(tmp_path / "half").metrics))[1]
    # Which calls share a batch depends on when they arrive, and with it the rounding of torch's log-probabilities.
    same = [name for name in whole[1] if backend == "fake" or not name.startswith(("engine_gap", "ess"))]
    assert {name: second[name] for name in same} == {name: whole[1][name] for name in same}


@needs_package
@quiet
@pytest.mark.long
def test_what_is_wrong_is_one_line(folder: Path, settings: str, tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(str(folder))
    (tmp_path / "broken.toml").write_text("x = ")
    (tmp_path / "wrong.toml").write_text("[agent]\nmax_turn = 3\n")
    for changes, words in (
        ({"id": "no-such-game"}, "no-such-game.*install its package"),
        ({"file": str(tmp_path / "broken.toml")}, "broken.toml.*TOML file"),
        ({"file": str(tmp_path / "absent.toml")}, "absent.toml"),
        ({"file": str(tmp_path / "wrong.toml")}, "max_turn"),
    ):
        section = EnvironmentSection.model_validate(
            {"kind": "verifiers", "id": GAME, "file": settings, "renderer": "qwen3"} | changes
        )
        with pytest.raises(UserError, match=words):
            load_tasks(section)
    template = EnvironmentSection(kind="verifiers", id=GAME, file=settings, renderer="template")
    engine = registry.create("fake", BackendSettings.of(str(folder), frozen=True))
    with VerifiersHost(template, tokenizer, str(folder), 400) as host:
        worker = RolloutWorker(engine, tokenizer, EarnedGrader(), "plain", environments=host)  # type: ignore[arg-type]
        with pytest.raises(UserError, match="every episode"):
            worker.sample(task_problems(template)[:2], Sampling(8, tokenizer.eos_ids))


@needs_package
@quiet
@pytest.mark.long
def test_two_ranks_play_the_episodes_of_one(folder: Path, settings: str) -> None:
    """Each plays its own share; all get the same batch. A rank all of whose episodes fail stops nothing."""
    tokenizer = Tokenizer.load(str(folder))
    section = EnvironmentSection(kind="verifiers", id=GAME, file=settings, renderer="qwen3", workers=4)
    problems = task_problems(section)[3:5]  # every episode of the second breaks
    sampling = Sampling(12, tokenizer.eos_ids, temperature=0.9, samples=2, seed=5)

    def work(ranks: Collective) -> RolloutBatch:
        engine = registry.create("fake", BackendSettings.of(str(folder), frozen=True))
        with VerifiersHost(section, tokenizer, str(folder), 400) as host:
            worker = RolloutWorker(engine, tokenizer, EarnedGrader(), "plain", ranks, environments=host)  # type: ignore[arg-type]
            return worker.sample(problems, sampling).result()

    alone = work(SOLO)
    assert alone.failed.tolist()[2:] == [True, True]
    for found in on_ranks(2, lambda ranks: work(Ranks(ranks.rank, ranks.size, ranks.meeting))):
        for name in ("ids", "own", "starts"):
            expected = getattr(alone.sequences.regions, name)
            np.testing.assert_array_equal(getattr(found.sequences.regions, name), expected)
        np.testing.assert_array_equal(found.engine_logprobs, alone.engine_logprobs)
        assert found.verdicts == alone.verdicts
        assert [each.ended for each in found.episodes or ()] == [each.ended for each in alone.episodes or ()]
