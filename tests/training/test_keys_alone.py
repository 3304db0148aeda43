"""Keys that need a run of their own: each reaches the code that acts on it, with its own value."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tokenizers
from typer.testing import CliRunner

from backends.interface import BackendError
from backends.vllm.command import server_command
from delta_cli.assets import model_path
from delta_cli.cli import app
from delta_cli.credit import CORRECTIONS, MiniBatch, Surrogate
from delta_cli.credit.methods import PRESETS
from delta_cli.data.prompts import render
from delta_cli.data.tokenizer import Tokenizer
from delta_cli.errors import UserError
from delta_cli.recipe import load_recipe
from delta_cli.recipe.backend_settings import backend_settings
from delta_cli.reporting.trackers import with_tracking
from delta_cli.runs.folder import read_lines
from delta_cli.runs.observer import Observer
from delta_cli.training.setup import evaluation_settings, load_tokenizer

from .watched import one, recipe_of, run


def small(values: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    """A short run on the same model with ``section__key`` changes."""
    keys = {
        "model.path": values["model.path"],
        "run.steps": 1,
        "data.limit": 40,
        "data.held_out": 0.2,
        "rollout.prompts": 4,
        "rollout.responses": 4,
        "rollout.max_tokens": 8,
        "evaluation.at_start": False,
        "evaluation.problems": 2,
    }
    return keys | {name.replace("__", "."): value for name, value in changes.items()}


def test_a_custom_reward_on_a_data_file(values: dict[str, Any], tmp_path: Path) -> None:
    """The file, its function, the data's file, and which prompts are too long."""
    data, reward = tmp_path / "data.jsonl", tmp_path / "mine.py"
    rows = [{"question": "x" * length, "answer": "1"} for length in range(1, 31)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    reward.write_text("def own(response, problem):\n    return 0.5\n\ndef reward(response, problem):\n    return 0.0\n")
    own = {
        "data.source": str(data),
        "data.template": "{question}",
        "reward.kind": "custom",
        "reward.code": "share",
        "reward.custom_file": str(reward),
        "reward.custom_function": "own",
        "rollout.max_prompt_tokens": 20,
        "data.held_out": 0.1,
    }
    found = run(tmp_path / "run", small(values) | own)
    spec = one(found.rewards)
    assert (spec.kind, spec.code, spec.custom_file, spec.custom_function) == ("custom", "share", str(reward), "own")
    rows = list(read_lines(found.folder.rollout_file(1)))
    assert {row["reward"] for row in rows} == {0.5}
    assert any("20 problems of 30 rows; left out: 10 with too long a prompt" in text for text in found.notices)


@pytest.mark.parametrize(("dynamic", "draws"), [(True, 6), (False, 1)])
def test_a_batch_without_contrast_is_drawn_as_often_as_allowed(
    dynamic: bool, draws: int, values: dict[str, Any], tmp_path: Path
) -> None:
    found = run(tmp_path / "run", small(values, rollout__dynamic_sampling=dynamic, rollout__dynamic_sampling_limit=6))
    assert len(found.samplings("rollout")) == draws


def test_the_preset_and_truncated_responses(values: dict[str, Any], tmp_path: Path) -> None:
    found = run(
        tmp_path / "run",
        small(
            values,
            method__preset="rloo",
            correction__preset="sequence_mask",
            update__drop_truncated=True,
            reward__length_penalty=1.0,
        ),
    )
    assert found.the(Surrogate, "method") == PRESETS["rloo"]
    assert found.the(MiniBatch, "correction") == CORRECTIONS["sequence_mask"]
    assert all(each.kept is not None for each in found.made[MiniBatch])
    found = run(tmp_path / "other", small(values, reward__length_penalty=1.0))
    assert found.the(Surrogate, "method") == PRESETS["delta"]
    assert all(each.kept is None for each in found.made[MiniBatch])


def test_when_a_run_evaluates_saves_and_records(values: dict[str, Any], tmp_path: Path) -> None:
    keys = {"evaluation.every": 4, "checkpoint.every": 3, "checkpoint.keep": 5, "checkpoint.rollouts_every": 2}
    found = run(tmp_path / "run", small(values, run__steps=7) | keys)
    assert [record["step"] for record in read_lines(found.folder.evaluations)] == [4, 7]
    assert sorted(path.name for path in found.folder.checkpoints.iterdir()) == [f"step-00000{n}" for n in (3, 6, 7)]
    assert sorted(path.name[5:11] for path in found.folder.rollouts.iterdir()) == ["000002", "000004", "000006"]
    (tmp_path / "run").rename(tmp_path / "before")
    found = run(tmp_path / "run", small(values, run__steps=7) | keys | {"checkpoint.keep": 1})
    assert [path.name for path in found.folder.checkpoints.iterdir()] == ["step-000007"]


def test_a_run_that_never_evaluates_needs_nothing_held_out(values: dict[str, Any], tmp_path: Path) -> None:
    keys = {"evaluation.every": "never", "evaluation.at_start": True, "data.held_out": 0.0}
    found = run(tmp_path / "run", small(values, run__steps=2) | keys)
    assert not found.folder.evaluations.exists()
    assert [("eval_accuracy" in record) for record in found.records] == [False, False]
    with pytest.raises(UserError, match='"never" makes none'):
        load_recipe(None, ["evaluation.every=never", "checkpoint.keep_best=eval_accuracy"])


def test_the_system_message_and_thinking_reach_every_prompt() -> None:
    """In training and in evaluations; a template that has no place for them is refused."""
    path = model_path("tiny-base")
    template = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}{% if enable_thinking %}<t>{% endif %}"
    core = tokenizers.Tokenizer.from_file(f"{path}/tokenizer.json")
    configs = {name: {} for name in ("tokenizer_config.json", "config.json", "generation_config.json")}
    tokenizer = Tokenizer(core, configs, template).chatting("be brief", True)
    assert render("chat", "1+1?", tokenizer) == "system:be brief;user:1+1?;<t>"
    assert render("chat", "1+1?", tokenizer.chatting(None, False)) == "user:1+1?;"
    recipe = load_recipe(None, ["data.system=be brief", "data.template=chat"])
    settings = evaluation_settings(recipe)
    assert (settings.system, settings.thinking) == ("be brief", None)
    assert settings.identity() != evaluation_settings(load_recipe(None, ["data.template=chat"])).identity()
    assert load_tokenizer(recipe)._system == "be brief"
    with pytest.raises(UserError, match="has no switch enable_thinking"):
        load_tokenizer(load_recipe(None, ["data.thinking=true", "data.template=chat"]))
    with pytest.raises(UserError, match=r"the prompt template is paper; set data.template to chat or chat_boxed"):
        load_tokenizer(load_recipe(None, ["data.system=x", "data.template=paper"]))


def test_a_response_longer_than_the_model_reads_is_refused_before_the_start(
    values: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=r"rollout.max_tokens = 100000: the model reads \d+ tokens, .* at most \d+"):
        run(tmp_path / "run", small(values) | {"rollout.max_tokens": 100_000})


def test_the_metric_whose_best_checkpoint_is_kept(values: dict[str, Any], tmp_path: Path) -> None:
    """It keeps the best step by that metric, and no best step if no metric is named."""
    keys = small(values, run__steps=5, reward__length_penalty=10.0, checkpoint__every=50, checkpoint__keep=1)
    for metric in ("reward_mean", "accuracy"):
        found = run(tmp_path / metric, keys | {"checkpoint.keep_best": metric})
        state = json.loads((found.folder.checkpoints / "step-000005" / "state.json").read_text())
        best = [record[metric] for record in found.records]
        assert (state["best"], state["best_step"]) == (max(best), 1 + int(np.argmax(best)))


def test_the_suite_is_what_is_evaluated_on(values: dict[str, Any], tmp_path: Path) -> None:
    suite = tmp_path / "own.toml"
    limits = {"first": 2, "second": 5}
    parts = [f'[[benchmarks]]\nname = "{name}"\nsource = "arithmetic"\nlimit = {n}\n' for name, n in limits.items()]
    suite.write_text('name = "own"\n' + "".join(parts))
    found = run(tmp_path / "run", small(values, evaluation__suite=str(suite), evaluation__problems=3))
    assert [count for phase, count, _ in found.rollouts if phase == "evaluate"] == [2, 3], "the least of both limits"
    (record,) = read_lines(found.folder.evaluations)
    assert limits.keys() <= record.keys()


def test_as_many_processes_are_started(values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []
    monkeypatch.setattr("backends.launch.launch", lambda _, parallel, *__: started.append(parallel.processes) or 0)
    recipe = tmp_path / "recipe.toml"
    recipe.write_text("[parallel]\nprocesses = 3\n")
    for more, expected in (([], 3), (["--processes", "5"], 5)):
        result = CliRunner().invoke(app, ["train", str(recipe), "--run-dir", str(tmp_path / "run"), *more])
        assert (result.exit_code, started.pop()) == (0, expected)


def test_the_engines_settings(values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The settings of a vLLM sampler, up to the point at which it would start a server."""
    keys: dict[str, Any] = {
        "kind": "vllm",
        "launch": True,
        "python": "e-python",
        "arguments": ["--e-argument"],
        "memory": 0.37,
        "colocated": True,
        "concurrency": 53,
        "deadline": 91.5,
        "stall": 17.5,
        "tolerance": 0.043,
        "inbox": str(tmp_path / "e-inbox"),
    }
    made: list[tuple[Any, Any, Path]] = []

    def make(engine: Any, launcher: Any, *, inbox: Path, **given: Any) -> Any:
        made.append((engine, launcher, inbox))
        raise BackendError("far enough")

    monkeypatch.setattr("delta_cli.rollout.open_vllm.VllmSampler", make)
    monkeypatch.setattr("delta_cli.rollout.open_vllm.ServerLauncher.check", lambda launcher: None)
    for more in ({}, {"launch": False, "python": None, "arguments": [], "memory": None, "url": ["http://127.0.0.1"]}):
        changes = {f"engine__{name}": value for name, value in (keys | more).items() if value not in (None, [])}
        with pytest.raises(BackendError, match="far enough"):
            run(tmp_path / "run", small(values, **changes))
    network = {"url": ["http://127.0.0.1"], "kind": "vllm", "transfer": "nccl", "python": "e-python"}
    with pytest.raises(BackendError, match="far enough"):
        run(tmp_path / "run", small(values, **{f"engine__{name}": value for name, value in network.items()}))
    (engine, launcher, inbox), (other, nothing, _), (sent, *_) = made
    assert sent.transfer == "nccl"
    assert inbox == tmp_path / "e-inbox" / "model"
    assert launcher.engine is engine, "the section goes whole to whatever uses it"
    assert engine.model_dump(exclude={"url", "async_steps", "transfer", "in_flight"}) == keys | {
        "arguments": ("--e-argument",)
    }
    command = server_command("e-python", 1, launcher.served, engine, engine.memory, on_cpu=False)
    named = dict(pairwise(command))
    assert (named["--max-num-seqs"], named["--gpu-memory-utilization"]) == ("53", "0.37")
    assert "--enable-sleep-mode" in command
    assert command[-1] == "--e-argument"
    assert (other.url, nothing) == (("http://127.0.0.1",), None)


def test_the_tracker_and_its_project(values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[dict[str, Any]] = []
    package: Any = ModuleType("trackio")
    package.init = lambda **given: begun.append(given) or SimpleNamespace()
    monkeypatch.setitem(sys.modules, "trackio", package)
    keys = {"tracking.kind": "trackio", "tracking.project": "p-project"}
    with_tracking(Observer(), recipe_of(small(values) | keys), tmp_path).begin("title", 1, 0)
    assert [given["project"] for given in begun] == ["p-project"]
    assert with_tracking(observer := Observer(), recipe_of(small(values)), tmp_path) is observer


def test_adapters_to_start_from_and_four_bits_reach_the_backend() -> None:
    changes = ["model.lora={ rank = 3 }", "model.adapter=somebody/adapter", "model.load_in_4bit=true"]
    settings = backend_settings(load_recipe(None, changes))
    assert settings.model.load_in_4bit
    assert settings.model.adapter == "somebody/adapter"
    for alone in changes[1:]:
        with pytest.raises(UserError, match=r"is for runs that train adapters; add \[model.lora\]"):
            load_recipe(None, [alone])
