"""Whatever goes wrong with a server, the batch is the same as without, or the run ends with one true line in time."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from backends.interface import BackendError, Engine
from tests.vllm.conftest import Connect, move, publish, same
from tests.vllm.server import (
    COMPLETIONS,
    LABEL,
    METRICS,
    PAUSE,
    RELOAD,
    RESUME,
    SET_LABEL,
    SPOILT,
    Fault,
)

pytestmark = pytest.mark.parametrize("model", ["tied"], indirect=True)  # the kind that is prepared for the server
BACK = 0.5  # seconds in which a server must come back
SHORT = 0.8  # seconds for a response that never comes
SLOW = 20.0  # seconds that the slowest machine takes beyond what a test waits

PASSING = [
    "reset", "cut", "status 500", "status 503 overloaded", "not json", "a list", "deep json", "no choice",
    "two choices", "restart", "quiet restart", *(kind for kind in SPOILT if kind != "no top logprobs"),
]  # fmt: skip
LASTING = {
    "reset": "did not come back",
    "status 500 CUDA out of memory": "out of memory",
    "status 400 the prompt is too long": "refused /v1/completions: the prompt is too long",
    "hang": "no answer within",
    "drip": "no answer within",
    "fewer tokens": "broke off after|token_ids is",
    "not json": "cannot be read",
    "huge id": r"completions: field choices\[0\]\.token_ids\[0\] is 1180591620717411303424: ",
    "id as text": r"field choices\[0\]\.token_ids\[0\] is 7: Input should be a valid integer",
    "foreign id": r"field choices\[0\]\.token_ids\[0\] is 1000000: the trainer's model has 23 ids",
    "endless logprob": r"field choices\[0\]\.logprobs\.token_logprobs\[0\] is -10+…: Input should be a finite number",
    "logprob in a list": r"field choices\[0\]\.logprobs\.token_logprobs\[0\] is \[-1\.0\]: ",
    "no logprobs": r"field choices\[0\]\.logprobs is None: ",
    "two choices": r"field choices is .*at most 1 item",
}
IN_SHORT = ("reset", "restart", "status 503 overloaded", "hang", "fewer tokens", "two choices")  # those of `make test`


def tiered(kinds: Iterable[str]) -> list[Any]:
    return [pytest.param(kind, marks=() if kind in IN_SHORT else pytest.mark.long) for kind in kinds]


@pytest.fixture(autouse=True)
def little_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("backends.vllm.sampler.RETURN_SECONDS", BACK)
    monkeypatch.setattr("backends.vllm.server.RESPONSE_SECONDS", SHORT)


@pytest.fixture(autouse=True)
def no_tracebacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception that ends a thread fails the test."""

    def fail(given: threading.ExceptHookArgs) -> None:
        pytest.fail(f"an exception ended a thread: {given.exc_value!r}")

    monkeypatch.setattr(threading, "excepthook", fail)


@pytest.mark.parametrize("kind", tiered(PASSING))
def test_a_fault_that_passes_changes_nothing(connect: Connect, trainer: Engine, kind: str) -> None:
    """The server is two updates past what it was started with, so that old weights would show."""
    pair = connect()
    for _ in range(3):
        publish(trainer, pair.sampler)
        move(trainer)
    expected = pair.draw()
    pair.server.faults.append(Fault(COMPLETIONS, kind, after=4))
    assert same(pair.draw(), expected)
    assert not pair.server.faults[0].times, "the fault did not happen"


@pytest.mark.parametrize("kind", tiered(LASTING))
def test_a_fault_that_lasts_ends_in_a_line(connect: Connect, trainer: Engine, kind: str) -> None:
    """The line says which server, and what was wrong with its answer."""
    pair = connect(deadline=SHORT) if kind in ("hang", "drip") else connect()
    publish(trainer, pair.sampler)
    pair.server.faults.append(Fault(COMPLETIONS, kind, after=4, times=-1))
    begun = time.monotonic()
    with pytest.raises(BackendError, match=LASTING[kind]) as caught:
        pair.draw()
    assert pair.url in str(caught.value)
    assert "\n" not in str(caught.value)
    assert time.monotonic() - begun < 4 * (SHORT + BACK) + SLOW, (
        "four rounds, in each a response and a server waited for"
    )


@pytest.mark.parametrize(
    ("kind", "field"),
    [
        ("no top logprobs", r"field choices\[0\]\.logprobs\.top_logprobs is \[\]"),
        ("strange prompt logprobs", r"field choices\[0\]\.prompt_logprobs\[1\] has no entry for token \d+"),
    ],
)
def test_a_probe_that_is_not_answered_names_the_field(connect: Connect, trainer: Engine, kind: str, field: str) -> None:
    pair = connect()
    pair.server.faults.append(Fault(COMPLETIONS, kind, times=-1))
    with pytest.raises(BackendError, match=field):
        publish(trainer, pair.sampler)


@pytest.mark.parametrize("route", [PAUSE, RELOAD, "/reset_prefix_cache", SET_LABEL, RESUME])
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
    with pytest.raises(BackendError, match=r"did not come back within 0\.5 s .*can the server read .*engine\.inbox"):
        publish(trainer, pair.sampler)


@pytest.mark.parametrize(
    ("faults", "said"),
    [
        ([Fault(COMPLETIONS, "reset", 2, -1)], "completions: "),
        ([Fault(COMPLETIONS, "hang", 2, -1)], r"no progress for 0\.4 s, with \d requests open"),
        ([Fault(COMPLETIONS, "hang", 2, -1), Fault(METRICS, "hang", 0, -1)], r"no progress for 0\.4 s"),
        ([Fault(COMPLETIONS, "hang", 2, -1), Fault(METRICS, "status 404", 0, -1)], r"no progress for 0\.\d+ s"),
    ],
    ids=["killed", "engine hangs", "all hangs", "hangs and does not count"],
)
def test_another_server_takes_over(connect: Connect, trainer: Engine, faults: list[Fault], said: str) -> None:
    """Long before the deadline of a response, with a notice; the server is used again once it works."""
    pair = connect(servers=2, stall=0.4, deadline=600.0)
    publish(trainer, pair.sampler)
    expected = pair.draw()
    pair.server.faults += [replace(fault) for fault in faults]
    begun = time.monotonic()
    assert same(pair.draw(), expected)
    assert time.monotonic() - begun < SLOW
    assert [notice.startswith(pair.url) for notice in pair.notices].count(True) == 1
    pair.server.faults.clear()
    pair.server.released.set()
    move(trainer)
    publish(trainer, pair.sampler)
    assert "draws again" in pair.notices[-1]
    pair.server.seen.clear()
    assert not same(pair.draw(), expected)
    assert pair.server.seen.count(COMPLETIONS) > 4, "a server that came back is not used again"


def test_a_slow_server_is_not_left(connect: Connect, trainer: Engine) -> None:
    """Its count of tokens moves, though no response is complete for longer than the stall."""
    pair = connect(stall=0.3, deadline=60.0, concurrency=1)
    publish(trainer, pair.sampler)
    expected = pair.draw()
    pair.server.faults.append(Fault(COMPLETIONS, "slow", after=1))
    assert same(pair.draw(), expected)
    assert not pair.notices


def test_a_server_that_hangs_does_not_hold_up_the_weights(connect: Connect, trainer: Engine) -> None:
    pair = connect(servers=2, stall=0.4, deadline=600.0)
    publish(trainer, pair.sampler)
    pair.server.faults += [Fault(route, "hang", times=-1) for route in (COMPLETIONS, PAUSE)]
    pair.draw()
    begun = time.monotonic()
    for _ in range(2):
        move(trainer)
        publish(trainer, pair.sampler)
    assert time.monotonic() - begun < 2 * SHORT + SLOW
    assert [server.version for server in pair.sampler._servers] == [None, 2]
    assert len(pair.notices) == 1, "one notice for one loss"


def test_a_restart_after_the_last_response_is_found_too(connect: Connect, trainer: Engine) -> None:
    """Nothing was drawn from old weights, but the server has them now."""
    pair = connect()
    move(trainer)
    publish(trainer, pair.sampler)
    expected = pair.draw()
    pair.server.restart()
    assert same(pair.draw(), expected)
    assert "was started again meanwhile" in pair.notices[0]


def test_in_low_precision_a_restart_shows_though_the_weights_are_near(connect: Connect, trainer: Engine) -> None:
    """The log-probabilities of the weights that it was started with are within the tolerance."""
    pair = connect(tolerance=10.0)
    publish(trainer, pair.sampler)
    move(trainer, 0.01)
    publish(trainer, pair.sampler)
    expected = pair.draw()
    pair.server.faults.append(Fault(COMPLETIONS, "quiet restart", after=4))
    drawn = pair.draw()
    assert same(drawn, expected)
    np.testing.assert_array_equal(pair.draw().logprobs, expected.logprobs)
    assert len([notice for notice in pair.notices if "was started again" in notice]) == 1


@pytest.mark.parametrize("labelled", [True, False])
def test_weights_that_somebody_else_loads_are_noticed(connect: Connect, trainer: Engine, labelled: bool) -> None:
    """By their label, or by the log-probabilities if the other client sets none."""
    pair = connect()
    publish(trainer, pair.sampler)
    move(trainer)
    publish(trainer, pair.sampler)
    expected = pair.draw()
    label = pair.server.label
    pair.server.restart()
    pair.server.label = "somebody's" if labelled else label
    assert same(pair.draw(), expected)
    said = "weights that another client loaded meanwhile (labelled 'somebody's')" if labelled else "of version 0"
    assert said in pair.notices[0]
    assert pair.url in pair.notices[0]


def test_a_server_that_lost_its_adapter_is_loaded_again(connect: Connect, trainer: Engine) -> None:
    """Started again, it does not know the adapter's name: no reason to end the run."""
    pair = connect()
    publish(trainer, pair.sampler)
    expected = pair.draw()
    pair.server.faults.append(Fault(COMPLETIONS, "status 404 The model `delta-adapter` does not exist.", after=4))
    assert same(pair.draw(), expected)


def test_routes_that_are_not_there_say_how_to_start_the_server(connect: Connect, trainer: Engine) -> None:
    pair = connect()
    pair.server.faults += [Fault(route, "status 404", times=-1) for route in (PAUSE, RESUME, LABEL)]
    with pytest.raises(BackendError, match="VLLM_SERVER_DEV_MODE=1"):
        publish(trainer, pair.sampler)
