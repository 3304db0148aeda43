"""An environment of the package verifiers, with the real vLLM: `make test-vllm`."""

from __future__ import annotations

import json
import os
from importlib.util import find_spec
from pathlib import Path

import pytest

from delta_cli.assets.random_model import write_qwen3
from delta_cli.recipe import load_recipe
from delta_cli.runs.records import RecordedRun
from delta_cli.training.setup import open_trainer
from tests.environments.test_dialogue import FAMILIES, make_tokenizer
from tests.harness import Watcher

PYTHON = os.environ.get("DELTA_VLLM_PYTHON")
pytestmark = [
    pytest.mark.skipif(PYTHON is None, reason="make test-vllm runs it, with DELTA_VLLM_PYTHON"),
    pytest.mark.skipif(find_spec("verifiers") is None, reason="the package verifiers is not installed"),
    pytest.mark.filterwarnings("ignore"),  # of the package and what it imports
    pytest.mark.long,
]


def test_a_run_of_an_environment_of_verifiers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps: what was trained on is what vLLM sampled, to the rounding of its log-probabilities."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "environments"))
    (tmp_path / "game.toml").write_text('[agent.runtime]\ntype = "subprocess"\n')
    model, tokens = tmp_path / "model", FAMILIES["qwen3"][0]
    sizes = {"hidden": 64, "layers": 2, "heads": 2, "kv_heads": 1, "head_dim": 32, "intermediate": 128}
    write_qwen3(model, vocab_size=256 + len(tokens.split()), eos_id=256, **sizes)
    make_tokenizer(tokens)._core.save(str(model / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": tokens.split()[0]}
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    keys = {
        "model.path": str(model),
        "run.steps": 2,
        "data.template": "plain",
        "data.held_out": 0.25,
        "rollout.prompts": 4,
        "rollout.responses": 4,
        "rollout.max_tokens": 12,
        "rollout.max_prompt_tokens": 300,
        "environment.kind": "verifiers",
        "environment.id": "verifiers-game",
        "environment.file": str(tmp_path / "game.toml"),
        "environment.renderer": "qwen3",
        "reward.kind": "environment",
        "update.learning_rate": 0.01,
        "evaluation.every": "never",
        "engine.kind": "vllm",
        "engine.launch": True,
        "engine.python": PYTHON,
    }
    recipe = load_recipe(None, [f"{name}={json.dumps(value)}" for name, value in keys.items()])
    watcher = Watcher()
    with open_trainer(recipe, "cpu", tmp_path / "run", watcher) as trainer:
        trainer.run()
    run, whole = RecordedRun(tmp_path / "run"), 0
    for step in run.steps:
        for response in run.responses(step):
            if response.failure is None:
                assert response.own is not None
                assert len(response.coefficients) == len(response.tokens) == int(response.own.sum())
                assert response.episode["turns"] == 3
                whole += 1
    assert whole > 8
    gaps = [record["engine_gap_max"] for record in watcher.records if record["engine_gap_max"] is not None]
    assert gaps
    assert max(gaps) < 1e-5
    print(f"{whole} episodes of three turns, largest gap {max(gaps):.2e} nats")
