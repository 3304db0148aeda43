"""Two processes that train together and draw from one server: the run of one process, each response drawn once."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from backends.launch import torch_ranks
from backends.vllm.drafts import seed_of
from delta_cli.runs.folder import RunFolder, read_lines
from delta_cli.seeds import derive
from tests.harness import write_model
from tests.parallel.test_runs import ENVIRONMENT, KEYS, ROOT, assert_close, command, resume, until
from tests.vllm.server import COMPLETIONS, LABEL, PAUSE, RELOAD, RESUME, SET_LABEL, TestServer, serving

Drawn = Counter[tuple[int, tuple[int, ...]]]
LOADING = {PAUSE, RELOAD, "/reset_prefix_cache", SET_LABEL, RESUME}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


def run(model: Path, folder: Path, ranks: list[dict[str, str]], **keys: Any) -> TestServer:
    """Run these ranks, each with its own API key; return the server that they asked."""
    with serving(model) as (server, url):
        arguments = command(model, folder, 1, engine__kind="vllm", engine__url=[url], **keys)[1:]
        started = [
            subprocess.Popen(
                [sys.executable, *arguments],
                env=ENVIRONMENT | rank | {"VLLM_API_KEY": str(number)},
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
            for number, rank in enumerate(ranks)
        ]
        outputs = [child.communicate(timeout=300)[0].decode() for child in started]
    for child, output in zip(started, outputs, strict=True):
        assert child.returncode == 0, output[-3000:]
    return server


def drawn(server: TestServer, rank: int) -> Drawn:
    """Seeds and prompts of the responses that a rank asked for, those of the verification left out."""
    return Counter(
        (body["seed"], tuple(body["prompt"]))
        for key, route, body in server.calls
        if key == f"Bearer {rank}" and route == COMPLETIONS and "seed" in body and body["max_tokens"] > 1
    )


@pytest.mark.long
def test_two_ranks_draw_what_one_process_draws(model: Path, tmp_path: Path) -> None:
    alone = run(model, tmp_path / "alone", [{}])
    together = run(model, tmp_path / "together", torch_ranks(2))
    assert_close(tmp_path / "together", tmp_path / "alone")
    assert {record["staleness"] for record in read_lines(RunFolder(tmp_path / "together").metrics)} == {0}

    first, second = drawn(together, 0), drawn(together, 1)
    assert first + second == drawn(alone, 0), "the ranks do not ask for each response once"
    for number in range(KEYS["run.steps"]):  # evaluations, whose seeds repeat, aside
        seeds = {seed_of(derive(0, number, "rollout 0"), row) for row in range(32)}
        shares = [{seed for seed, _ in share} & seeds for share in (first, second)]
        assert not shares[0] & shares[1]
        assert sorted(map(len, shares)) == [16, 16], "each rank draws half of the rows of the whole batch"

    routes = [Counter(route for key, route, _ in together.calls if key == f"Bearer {rank}") for rank in (0, 1)]
    assert not LOADING & routes[1].keys(), "a rank other than the first loads weights"
    assert {routes[0][route] for route in LOADING} == {alone.seen.count(RELOAD)}
    assert LABEL not in routes[1], "one rank asks a server which weights it has"
    assert routes[0][LABEL] == alone.seen.count(LABEL) > 0
    assert not any("prompt_logprobs" in body for key, _, body in together.calls if key == "Bearer 1")


@pytest.mark.long
def test_two_ranks_that_draw_ahead_train_as_one_process_does(model: Path, tmp_path: Path) -> None:
    """The thread that draws the next batch and the updates exchange numbers at the same time, over groups of their own.

    Dynamic sampling makes the threads agree several times in a batch.
    """
    keys = {"engine__async_steps": 1, "rollout__dynamic_sampling": True, "run__steps": 5}
    run(model, tmp_path / "alone", [{}], **keys)
    run(model, tmp_path / "together", torch_ranks(2), **keys)
    assert_close(tmp_path / "together", tmp_path / "alone")
    records = list(read_lines(RunFolder(tmp_path / "together").metrics))
    assert [record["staleness"] for record in records] == [0, *(record["updates"] for record in records[:-1])]


@pytest.mark.long
def test_ranks_that_draw_ahead_stop_together_and_go_on(model: Path, tmp_path: Path) -> None:
    """The signal reaches one rank, between any two calls of either thread."""
    with serving(model) as (_, url):
        keys = {"engine__kind": "vllm", "engine__url": [url], "engine__async_steps": 1, "run__steps": 40}
        keys["checkpoint__keep"] = 50
        arguments = command(model, tmp_path / "run", 1, **keys)[1:]
        started = [
            subprocess.Popen([sys.executable, *arguments], env=ENVIRONMENT | rank, cwd=ROOT, stderr=subprocess.PIPE)
            for rank in torch_ranks(2)
        ]
        until((tmp_path / "run" / "checkpoints" / "step-000002").exists)
        started[1].send_signal(signal.SIGTERM)
        errors = [child.communicate(timeout=60)[1].decode() for child in started]
        assert [child.returncode for child in started] == [143, 143], errors
        assert "stopped after step" in errors[0]
        steps = int(max((tmp_path / "run" / "checkpoints").glob("step-*")).name[5:])
        resume(tmp_path / "run", 2, f"run.steps={steps + 2}")
    numbers = [record["step"] for record in read_lines(RunFolder(tmp_path / "run").metrics)]
    assert numbers == list(range(1, steps + 3))
