"""`delta eval` through vLLM's stand-in: the command, and that a run's own engine is used again."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from delta_cli.cli import app
from delta_cli.errors import UserError
from tests.harness import make_recipe, train, write_model
from tests.vllm.server import COMPLETIONS, install, serving


def evaluate(*arguments: object) -> None:
    result = CliRunner().invoke(app, ["eval", *map(str, arguments), "--quiet"], catch_exceptions=False)
    assert result.exit_code == 0


def outcome(folder: Path) -> dict[str, object]:
    found = json.loads(next(folder.rglob("evaluation.json")).read_text())
    assert isinstance(found, dict)
    return found


def test_a_server_is_started_for_an_evaluation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = write_model(tmp_path / "model")
    monkeypatch.setenv("PYTHONPATH", str(install(tmp_path / "site")))
    (tmp_path / "data.jsonl").write_text(json.dumps({"question": "1+1=?", "answer": "2"}) + "\n")
    common = (
        "--data",
        tmp_path / "data.jsonl",
        "--max-tokens",
        8,
        "--samples",
        4,
        "--top-p",
        0.7,
        "--template",
        "plain",
    )
    evaluate(model, *common, "--engine", "vllm", "--engine-python", sys.executable, "--out", tmp_path / "launched")
    assert outcome(tmp_path / "launched")["backend"] == "vllm"
    with serving(model) as (server, url):
        evaluate(model, *common, "--engine", url, "--out", tmp_path / "url")
        assert server.seen.count(COMPLETIONS) == 4
    assert outcome(tmp_path / "launched")["benchmarks"] == outcome(tmp_path / "url")["benchmarks"]


def test_a_run_is_evaluated_with_the_engine_that_drew_it(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    with serving(model) as (server, url):
        train(make_recipe(model, engine__kind="vllm", engine__url=[url], run__steps=1), tmp_path / "run")
        before = server.seen.count(COMPLETIONS)
        evaluate(tmp_path / "run", "--limit", 2, "--backend", "fake")
        assert server.seen.count(COMPLETIONS) == before + 2
        evaluate(tmp_path / "run", "--limit", 2, "--backend", "fake", "--engine", "local", "--out", tmp_path / "local")
    assert outcome(tmp_path / "local")["backend"] == "fake"


def test_a_word_that_is_no_engine(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--engine sglang: choose local, vllm"):
        evaluate(write_model(tmp_path / "model"), "--suite", "math500", "--engine", "sglang")
