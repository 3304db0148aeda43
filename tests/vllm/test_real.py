"""The real vLLM, on a CPU: `make test-vllm`. Its environment's Python is in DELTA_VLLM_PYTHON."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from backends import registry
from backends.interface import Engine, RolloutRequest, Sampling, Sequences
from backends.settings import BackendSettings, EngineSection, Lora
from backends.vllm import ServedModel, ServerLauncher, VllmSampler
from delta_cli.data.tokenizer import Tokenizer
from tests.conformance.oracle import cut_down
from tests.conformance.test_episodes import Script
from tests.conformance.test_rollout import TRUNCATIONS, pvalue
from tests.harness import VOCABULARY, write_model

PYTHON = os.environ.get("DELTA_VLLM_PYTHON")
pytestmark = [
    pytest.mark.skipif(PYTHON is None, reason="make test-vllm runs it, with DELTA_VLLM_PYTHON"),
    pytest.mark.long,
]
EOS = VOCABULARY - 1
SYNCS, CLOSE = 10, 5e-6  # nats

rng = np.random.default_rng(0)
PROMPTS = tuple(rng.integers(1, 250, size=length) for length in (3, 9, 20, 1))
SAMPLING = Sampling(max_tokens=24, stop_ids=(EOS, 11, 12), samples=4, seed=3)
REQUEST = RolloutRequest(PROMPTS, SAMPLING)


@dataclass
class Setup:
    """A trainer, and the sampler that draws from what it publishes."""

    trainer: Engine
    sampler: VllmSampler
    tokenizer: Tokenizer
    close: float  # nats


@pytest.fixture(scope="module", params=["untied", "tied", "untied-lora", "tied-lora", "tied-dora"])
def setup(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    """A server launched for each kind of weights; heads of 32, which is the least that vLLM's CPU attention takes."""
    folder = tmp_path_factory.mktemp(request.param)
    wide = {"hidden": 64, "layers": 2, "head_dim": 32, "intermediate": 128, "scale": 0.1}
    model = str(write_model(folder / "model", tie=request.param.startswith("tied"), **wide))
    dora = request.param.endswith("dora")  # which vLLM does not know: it gets the whole model
    lora = Lora(rank=8, dora=dora) if dora or request.param.endswith("lora") else None
    trainer = registry.create("cpu", BackendSettings.of(model, lora=lora))
    engine = EngineSection(kind="vllm", launch=True, python=PYTHON, concurrency=64, tolerance=CLOSE)
    served = ServedModel(model, "float32", 512, lora_rank=lora.rank if lora and not dora else None)
    launcher = ServerLauncher(served, engine, folder / "vllm.log", print)
    launcher.check()
    sampler = VllmSampler(engine, launcher, inbox=folder / "inbox", vocabulary=VOCABULARY)
    sampler.load_weights(trainer.publish(sampler.inbox))
    yield Setup(trainer, sampler, Tokenizer.load(model), 2 * CLOSE if dora else CLOSE)  # merging rounds once more
    sampler.close()
    trainer.close()


def gap(setup: Setup, temperature: float) -> tuple[float, Sequences]:
    """The largest difference of a log-probability from the trainer's, nats, and the responses."""
    sampling = replace(SAMPLING, temperature=temperature)
    drawn = setup.sampler.rollout(RolloutRequest(PROMPTS, sampling))
    assert drawn.version == setup.trainer.version
    prompts = tuple(prompt for prompt in PROMPTS for _ in range(SAMPLING.samples))
    sequences = Sequences(prompts, drawn.tokens, drawn.starts, temperature)
    return float(np.abs(setup.trainer.score(sequences).logprobs - drawn.logprobs).max()), sequences


def test_a_stop_string_ends_a_response(setup: Setup) -> None:
    """The first two letters that follow each other in a response end it, wherever they first are in others; so does
    a piece of a special token's text. The tokens up to there are those that are drawn without strings."""
    sampling = replace(SAMPLING, stop_ids=(), max_tokens=64)
    whole = setup.sampler.rollout(RolloutRequest(PROMPTS, sampling))
    parts = [part.tolist() for part in np.split(whole.tokens, whole.starts[1:-1])]
    pairs = [re.search(r"[A-Za-z]{2}", setup.tokenizer.decode(part[8:])) for part in parts]
    strings = (*(found[0] for found in pairs[:3] if found), "|endof")
    stopping = replace(sampling, stop=setup.tokenizer.stop_text(strings))
    drawn = setup.sampler.rollout(RolloutRequest(PROMPTS, stopping))
    shorter = 0
    for row, part in enumerate(parts):
        texts = (setup.tokenizer.decode(part[:n], skip_special=False) for n in range(1, len(part) + 1))
        end = next((n for n, text in enumerate(texts, 1) if any(string in text for string in strings)), None)
        assert drawn.tokens[drawn.starts[row] : drawn.starts[row + 1]].tolist() == part[:end]
        assert drawn.truncated[row] == (end is None)
        shorter += end is not None and end < len(part)
    assert shorter > 0
    print(f"{strings} ended {shorter} of {len(parts)} responses before the limit")


def test_logprobs_before_and_after_ten_syncs(setup: Setup) -> None:
    largest = 0.0
    for sync in range(SYNCS + 1):
        gaps = [gap(setup, temperature) for temperature in (0.7, 1.0)]
        largest = max(largest, *(found for found, _ in gaps))
        assert largest < setup.close, f"after {sync} syncs"
        before = setup.trainer.score(gaps[0][1]).logprobs
        setup.trainer.accumulate(gaps[0][1], lambda logp, rows: (float(logp.sum()), np.ones_like(logp)))
        setup.trainer.step(0.01)
        assert np.abs(setup.trainer.score(gaps[0][1]).logprobs - before).max() > 1e-3
        setup.sampler.load_weights(setup.trainer.publish(setup.sampler.inbox))
    print(f"largest gap over {SYNCS + 1} versions: {largest:.2e} nats")


def test_responses_end_as_they_should(setup: Setup) -> None:
    drawn = setup.sampler.rollout(REQUEST)
    parts = [part.tolist() for part in np.split(drawn.tokens, drawn.starts[1:-1])]
    assert 0 < drawn.truncated.sum() < len(parts)
    for part, truncated in zip(parts, drawn.truncated, strict=True):
        assert not set(part[:-1]) & set(SAMPLING.stop_ids)
        assert truncated == (part[-1] not in SAMPLING.stop_ids)
        assert not truncated or len(part) == SAMPLING.max_tokens


def test_episodes_go_on_where_their_turns_ended(setup: Setup) -> None:
    """The ids of all turns are in one row, log-probabilities are those of one forward pass over it, twice the same."""
    sampling = replace(SAMPLING, stop_ids=(EOS, *range(10, 40)), max_tokens=60)
    found = []
    for delay in (0, 3):
        script = Script(delay, limit=sampling.max_tokens)
        found.append(setup.sampler.rollout(RolloutRequest(PROMPTS, sampling, turns=script)))
    one, other = found
    assert one.regions is not None
    assert other.regions is not None
    assert max(map(len, script.ended.values())) > 2
    np.testing.assert_array_equal(one.regions.ids, other.regions.ids)
    np.testing.assert_array_equal(one.regions.own, other.regions.own)
    prompts = tuple(prompt for prompt in PROMPTS for _ in range(sampling.samples))
    scored = setup.trainer.score(Sequences(prompts, one.tokens, one.starts, 1.0, one.regions)).logprobs
    largest = float(np.abs(scored - one.logprobs).max())
    print(f"{sum(map(len, script.ended.values()))} turns, largest gap {largest:.2e} nats")
    assert largest < setup.close


def test_prompts_that_are_more_than_a_batch_of_tokens(setup: Setup) -> None:
    """2,048 is a batch: on a CPU a prompt that is computed in parts, with a seed, ends the engine of 0.32."""
    prompts = tuple(np.random.default_rng(1).integers(1, 250, size=(24, 200)))
    url = setup.sampler._servers[0].api.url
    drawn = setup.sampler.rollout(RolloutRequest(prompts, replace(SAMPLING, max_tokens=4)))
    assert len(drawn.truncated) == 24 * SAMPLING.samples
    assert setup.sampler._servers[0].api.url == url, "the server was started again"


def test_the_seed_and_the_row_decide(setup: Setup) -> None:
    first, again = (setup.sampler.rollout(REQUEST) for _ in range(2))
    np.testing.assert_array_equal(first.tokens, again.tokens)
    rows = np.arange(8, 12)
    alone = setup.sampler.rollout(RolloutRequest(PROMPTS[2:3], SAMPLING, rows))
    np.testing.assert_array_equal(alone.tokens, first.tokens[first.starts[8] : first.starts[12]])
    other = setup.sampler.rollout(replace(REQUEST, sampling=replace(SAMPLING, seed=4)))
    assert other.tokens.tolist() != first.tokens.tolist()


def test_the_likeliest_token_is_the_trainers(setup: Setup) -> None:
    sampling = replace(SAMPLING, temperature=0.0, samples=1)
    drawn = setup.sampler.rollout(RolloutRequest(PROMPTS, sampling))
    own = setup.trainer.rollout(RolloutRequest(PROMPTS, sampling))
    np.testing.assert_array_equal(drawn.tokens, own.tokens)


@pytest.mark.parametrize("truncation", TRUNCATIONS, ids=str)
def test_what_truncates_leaves_what_it_leaves_locally(setup: Setup, truncation: dict[str, Any]) -> None:
    """Single tokens, by the oracle of the local engines on the trainer's distribution, sharp enough to tell orders."""
    temperature, count = 0.5, 400
    one = Sequences((PROMPTS[0],) * VOCABULARY, np.arange(VOCABULARY), np.arange(VOCABULARY + 1), temperature)
    p = cut_down(np.exp(setup.trainer.score(one).logprobs.astype(np.float64)), **truncation)
    sampling = replace(SAMPLING, max_tokens=1, temperature=temperature, samples=count, **truncation)
    counts = np.bincount(setup.sampler.rollout(RolloutRequest(PROMPTS[:1], sampling)).tokens, minlength=VOCABULARY)
    assert counts.sum() == count
    assert set(np.flatnonzero(counts)) <= set(np.flatnonzero(p))
    assert np.count_nonzero(p) < VOCABULARY / 2
    assert np.count_nonzero(p) == 1 or pvalue(counts[p > 0], p[p > 0]) > 1e-4


def test_a_stop_is_heard_while_the_server_draws(setup: Setup) -> None:
    class Stop(Exception):
        pass

    calls = 0

    def interrupt() -> None:
        nonlocal calls
        calls += 1
        if calls > 2:
            raise Stop

    long = replace(SAMPLING, stop_ids=(), max_tokens=400)
    with pytest.raises(Stop):
        setup.sampler.rollout(replace(REQUEST, sampling=long, interrupt=interrupt))
    assert gap(setup, 1.0)[0] < setup.close
