"""A trainer, a server that speaks vLLM's calls, and a sampler between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backends import registry
from backends.interface import Completions, Engine, RolloutRequest, Sampling
from backends.settings import BackendSettings, EngineSection
from backends.vllm import VllmSampler
from tests.conformance.tiny_model import EOS, VOCAB, write_model
from tests.vllm.server import VERSION, TestServer, serving

PROMPTS = (np.array([5, 6, 7, 8]), np.array([21]), np.array([3, EOS, 9]))
SAMPLING = Sampling(max_tokens=8, stop_ids=(EOS, 11), samples=3, seed=4, temperature=0.7)
REQUEST = RolloutRequest(PROMPTS, SAMPLING)


@pytest.fixture(params=[pytest.param("tied", marks=pytest.mark.long), "untied"], scope="session")
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / request.param, tie=request.param == "tied")


@pytest.fixture
def trainer(model: Path) -> Engine:
    return registry.create("fake", BackendSettings.of(str(model)))


@dataclass
class Pair:
    """A server and the sampler that draws from it."""

    server: TestServer
    sampler: VllmSampler
    url: str
    servers: list[TestServer]
    notices: list[str]

    def draw(self, **changes: Any) -> Completions:
        return self.sampler.rollout(replace(REQUEST, sampling=replace(SAMPLING, **changes)))


Connect = Callable[..., Pair]


def engine_at(*urls: str, **changes: Any) -> EngineSection:
    """The section [engine] with servers at these addresses."""
    return EngineSection(kind="vllm", url=urls, **({"deadline": 60.0} | changes))


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retries and looks that follow each other in hundredths of seconds."""
    monkeypatch.setattr("backends.vllm.request_pool.RETRY_SECONDS", (0.01, 0.02, 0.05))
    monkeypatch.setattr("backends.vllm.request_pool.TICK_SECONDS", 0.02)
    monkeypatch.setattr("backends.vllm.sampler.RETRY_SECONDS", 0.05)
    monkeypatch.setattr("backends.vllm.launcher.POLL_SECONDS", 0.05)


@pytest.fixture
def connect(model: Path, tmp_path: Path) -> Iterator[Connect]:
    """Start a server on ``model``, and a sampler with changed settings; both end with the test."""
    from contextlib import ExitStack

    with ExitStack() as stack:

        def make(servers: int = 1, version: str = VERSION, **changes: Any) -> Pair:
            started = [stack.enter_context(serving(model, version=version)) for _ in range(servers)]
            engine = engine_at(*(url for _, url in started), **changes)
            notices: list[str] = []
            sampler = VllmSampler(
                engine, inbox=tmp_path / "inbox", dtype="float32", vocabulary=VOCAB, on_notice=notices.append
            )
            sampler.connect()
            return Pair(started[0][0], sampler, started[0][1], [server for server, _ in started], notices)

        yield make


def move(trainer: Engine, rate: float = 0.05) -> None:
    """An update that changes every log-probability."""
    from backends.interface import Sequences

    rows = np.random.default_rng(trainer.version).integers(0, VOCAB, 12)
    batch = Sequences((rows[:2], rows[2:4]), rows[4:], np.array([0, 4, 8]))
    trainer.accumulate(batch, lambda logp, rows: (float(logp.sum()), np.ones_like(logp)))
    trainer.step(rate)


def publish(trainer: Engine, sampler: VllmSampler) -> None:
    """What the trainer does after an update."""
    sampler.load_weights(trainer.publish(sampler.inbox))


def same(one: Completions, other: Completions) -> bool:
    """Equal in everything."""
    return one.version == other.version and all(
        np.array_equal(getattr(one, name), getattr(other, name))
        for name in ("tokens", "starts", "logprobs", "truncated")
    )
