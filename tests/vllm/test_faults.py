"""Everything that can go wrong with a server: the same batch as without, or one line; never later than the deadline."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from backends.interface import BackendError, Engine
from tests.vllm.conftest import Connect, move, publish, same
from tests.vllm.server import COMPLETIONS, PAUSE, RELOAD, RESUME, Fault

DEADLINE = 2.0  # of the fixtures: for a response, and for a server to come back
SHORT = 1.0  # where a fault lasts, and each of four rounds waits for it in vain
LATEST = 4 * 2 * DEADLINE + 6.0  # four rounds, in each a response and a server waited for, and the slowest machine

PASSING = [
    "reset", "cut", "status 500", "status 503 overloaded", "not json", "a list", "no choice", "two choices", "no ids",
    "no tokens", "no logprobs", "fewer tokens", "fewer logprobs", "more tokens", "foreign id", "positive logprob",
    "not a number", "impossible token", "restart", "quiet restart",
]  # fmt: skip
LASTING = {
    "reset": "could not be drawn|did not come back",
    "status 500 CUDA out of memory": "out of memory",
    "status 400 the prompt is too long": "refused /v1/completions: the prompt is too long",
    "hang": "brought no answer within [12] s",
    "drip": "brought no answer within [12] s|did not come back",
    "fewer tokens": "broke off|0 tokens",
    "not json": "no JSON",
}


@pytest.mark.parametrize("kind", PASSING)
def test_a_fault_that_passes_changes_nothing(connect: Connect, trainer: Engine, kind: str) -> None:
    """The server is two updates past what it was started with, so that old weights would show."""
    pair = connect()
    for _ in range(3):
        publish(trainer, pair.sampler)
        move(trainer)
    expected = pair.draw()
    pair.server.faults.append(Fault(COMPLETIONS, kind, after=4))
    begun = time.monotonic()
    assert same(pair.draw(), expected)
    assert time.monotonic() - begun < LATEST
    assert not pair.server.faults[0].times, "the fault did not happen"


@pytest.mark.parametrize("kind", LASTING)
def test_a_fault_that_lasts_ends_in_a_line(connect: Connect, trainer: Engine, kind: str) -> None:
    pair = connect()
    publish(trainer, pair.sampler)
    pair.sampler.settings = replace(pair.sampler.settings, deadline=SHORT, return_seconds=SHORT)
    pair.server.faults.append(Fault(COMPLETIONS, kind, after=4, times=-1))
    begun = time.monotonic()
    with pytest.raises(BackendError, match=LASTING[kind]) as caught:
        pair.draw()
    assert "\n" not in str(caught.value)
    assert time.monotonic() - begun < 4 * 2 * SHORT + 6.0


@pytest.mark.parametrize("route", [PAUSE, RELOAD, "/reset_prefix_cache", RESUME])
@pytest.mark.parametrize("kind", ["reset", "status 500 out of memory"])
def test_a_load_that_fails_once_is_made_again(connect: Connect, trainer: Engine, route: str, kind: str) -> None:
    pair = connect()
    publish(trainer, pair.sampler)
    old = pair.draw()
    move(trainer)
    pair.server.faults.append(Fault(route, kind))
    publish(trainer, pair.sampler)
    assert pair.sampler.version == 1
    assert not same(pair.draw(), old)


@pytest.mark.parametrize("kind", ["reset", "status 500 out of memory"])
def test_a_load_that_keeps_failing_ends_in_a_line(connect: Connect, trainer: Engine, kind: str) -> None:
    pair = connect()
    pair.server.faults.append(Fault(RELOAD, kind, times=-1))
    with pytest.raises(BackendError, match="did not come back within 2 s"):
        publish(trainer, pair.sampler)


def test_another_server_takes_over(connect: Connect, trainer: Engine) -> None:
    pair = connect(servers=2)
    publish(trainer, pair.sampler)
    expected = pair.draw()
    pair.server.faults.append(Fault(COMPLETIONS, "reset", after=2, times=-1))
    assert same(pair.draw(), expected)
    pair.server.faults.clear()
    move(trainer)
    publish(trainer, pair.sampler)
    pair.server.seen.clear()
    assert not same(pair.draw(), expected)
    assert pair.server.seen.count(COMPLETIONS) > 4, "a server that came back is not used again"


def test_a_restart_after_the_last_response_is_found_too(connect: Connect, trainer: Engine) -> None:
    """Nothing was drawn from old weights, but the server has them now."""
    pair = connect()
    move(trainer)
    publish(trainer, pair.sampler)
    expected = pair.draw()
    pair.server.restart()
    assert same(pair.draw(), expected)


def test_routes_that_are_not_there_say_how_to_start_the_server(connect: Connect, trainer: Engine) -> None:
    pair = connect()
    pair.server.faults.append(Fault(PAUSE, "status 404", times=-1))
    pair.server.faults.append(Fault(RESUME, "status 404", times=-1))
    with pytest.raises(BackendError, match="VLLM_SERVER_DEV_MODE=1"):
        publish(trainer, pair.sampler)
