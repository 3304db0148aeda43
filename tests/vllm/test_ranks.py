"""Two processes that train together and draw from one server: the run of one process, each response drawn once."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from backends.launch import torch_ranks
from backends.vllm.sampler import seed_of
from delta_cli.runs.folder import RunFolder, read_lines
from delta_cli.seeds import derive
from tests.harness import write_model
from tests.parallel.test_runs import ENVIRONMENT, KEYS, ROOT, assert_close, command
from tests.vllm.server import COMPLETIONS, LABEL, PAUSE, RELOAD, RESUME, SET_LABEL, TestServer, serving

Drawn = Counter[tuple[int, tuple[int, ...]]]
LOADING = {PAUSE, RELOAD, "/reset_prefix_cache", SET_LABEL, RESUME}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


def run(model: Path, folder: Path, ranks: list[dict[str, str]]) -> TestServer:
    """A run of these ranks, each with a key of its own; the server that they asked."""
    with serving(model) as (server, url):
        arguments = command(model, folder, 1, engine__kind="vllm", engine__url=[url])[1:]
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
