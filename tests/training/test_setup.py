"""What a run checks and reports before its first step, and the text that the verifier gets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from delta_cli.data.tokenizer import Tokenizer
from delta_cli.rollout.worker import RolloutWorker
from delta_cli.runs.folder import RunFolder, read_lines
from tests.harness import Watcher, make_recipe, train


def test_gold_answers_that_the_verifier_refuses_are_reported_first(model: Path, tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    golds = ["4", "\\frac{1}{2}", "\\frac{1}{3", "7"] * 6
    data.write_text("".join(json.dumps({"question": f"q{i}", "answer": g}) + "\n" for i, g in enumerate(golds)))
    recipe = make_recipe(model, data__source=str(data), data__template="plain", data__limit=None, run__steps=1)
    watcher = train(recipe, tmp_path / "run")
    lines = [notice.text for notice in watcher.notices if notice.name == "gold_refused"]
    assert len(lines) == 1
    assert "not accepted as answers to themselves" in lines[0]
    assert "frac{1}{3" in lines[0]


def test_skipped_rows_are_reported_with_counts(model: Path, tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    rows = [{"question": f"q{i}", "answer": str(i)} for i in range(12)]
    rows += [
        {"question": "", "answer": "1"},
        {"question": "q1", "answer": "1"},
        {"question": "long " * 50, "answer": "1"},
    ]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    changes = {"data__source": str(data), "data__template": "plain", "data__limit": None}
    recipe = make_recipe(model, **changes, rollout__max_prompt_tokens=100, run__steps=1)
    watcher = train(recipe, tmp_path / "run")
    (line,) = [notice.text for notice in watcher.notices if notice.name == "rows_left_out"]
    assert "12 problems of 15 rows" in line
    assert "1 without a question, 1 with the question of an earlier row, 1 with too long a prompt" in line


def test_the_best_checkpoint_is_saved_when_it_is_made(model: Path, tmp_path: Path) -> None:
    changes = {"checkpoint__every": 100, "checkpoint__keep": 1, "checkpoint__keep_best": "reward_mean"}
    recipe = make_recipe(model, run__steps=5, **changes)
    train(recipe, tmp_path / "run")
    run = RunFolder(tmp_path / "run")
    rewards = [record["reward_mean"] for record in read_lines(run.metrics)]
    kept = {int(folder.name[5:]) for folder in run.checkpoints.glob("step-*")}
    assert kept == {1 + int(np.argmax(rewards)), 5}


def test_a_response_includes_the_part_that_the_prompt_began(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the template ends with <think>, the model writes the closing tag only."""
    template = "{question} <think>\n"
    seen: list[str] = []
    recipe = make_recipe(model, data__template=template, run__steps=1, evaluation__at_start=False)
    original = RolloutWorker.sample

    def spy(self: RolloutWorker, *arguments: Any, **more: Any) -> Any:
        drawn = original(self, *arguments, **more)
        seen.extend(drawn.texts)
        return drawn

    monkeypatch.setattr(RolloutWorker, "sample", spy)
    train(recipe, tmp_path / "run", observer=Watcher())
    assert seen
    assert all(text.startswith("<think>\n") for text in seen)
    record = next(read_lines(RunFolder(tmp_path / "run").rollout_file(1)))
    decoded = Tokenizer.load(str(model)).decode(record["tokens"])
    assert record["response"] == "<think>\n" + decoded
