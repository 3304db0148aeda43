"""Responses from a server that speaks vLLM's calls: what the Sampler promises, and weights that really arrive."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backends.interface import BackendError, Engine, PublishedWeights, RolloutRequest, Sequences
from backends.vllm import VllmSampler
from backends.vllm.drafts import seed_of
from delta_cli.data.tokenizer import Tokenizer
from delta_cli.serving.request_queue import QueuedPrompt, RequestQueue
from tests.conformance.oracle import Oracle, cut_down
from tests.conformance.test_rollout import TRUNCATIONS, pvalue
from tests.conformance.tiny_model import VOCAB
from tests.vllm.conftest import PROMPTS, REQUEST, SAMPLING, Connect, engine_at, move, publish, same
from tests.vllm.server import COMPLETIONS, PAUSE, RELOAD, RESUME, SET_LABEL, Fault, serving


def sequences(drawn: object, sampling: object = SAMPLING) -> Sequences:
    prompts = tuple(prompt for prompt in PROMPTS for _ in range(SAMPLING.samples))
    return Sequences(prompts, drawn.tokens, drawn.starts, sampling.temperature)  # type: ignore[attr-defined]


@pytest.mark.parametrize("temperature", [0.7, pytest.param(1.0, marks=pytest.mark.long)])
def test_logprobs_are_the_trainers_through_ten_updates(connect: Connect, trainer: Engine, temperature: float) -> None:
    pair = connect()
    before = None
    for version in range(11):
        publish(trainer, pair.sampler)
        drawn = pair.draw(temperature=temperature)
        assert drawn.version == version
        scored = trainer.score(sequences(drawn, replace(SAMPLING, temperature=temperature))).logprobs
        np.testing.assert_allclose(drawn.logprobs, scored, atol=2e-6, rtol=0)
        assert before is None or not np.array_equal(before, drawn.logprobs)
        before = drawn.logprobs
        move(trainer)


def test_responses_end_as_they_should_and_are_reported_whole(connect: Connect, trainer: Engine) -> None:
    pair = connect()
    publish(trainer, pair.sampler)
    reported: dict[int, list[int]] = {}
    drawn = pair.sampler.rollout(REQUEST, lambda row, tokens: reported.update({row: tokens.tolist()}))
    parts = [part.tolist() for part in np.split(drawn.tokens, drawn.starts[1:-1])]
    assert [reported[row] for row in range(9)] == parts
    assert 0 < drawn.truncated.sum() < 9
    for part, truncated in zip(parts, drawn.truncated, strict=True):
        assert truncated == (part[-1] not in SAMPLING.stop_ids)
        assert not set(part[:-1]) & set(SAMPLING.stop_ids)


def test_a_stop_string_ends_a_response(connect: Connect, trainer: Engine, model: Path) -> None:
    """The tokens are those without it, up to the one that completes the first; it lies across two of them."""
    pair = connect()
    publish(trainer, pair.sampler)
    tokenizer = Tokenizer.load(str(model))
    strings = ("2 t", "7 t1")
    whole, drawn = pair.draw(), pair.draw(stop=tokenizer.stop_text(strings))
    shorter = 0
    for row, tokens in enumerate(np.split(whole.tokens, whole.starts[1:-1])):
        texts = [tokenizer.decode(tokens[:n]) for n in range(1, len(tokens) + 1)]
        end = next((n for n, text in enumerate(texts, 1) if any(string in text for string in strings)), None)
        assert drawn.tokens[drawn.starts[row] : drawn.starts[row + 1]].tolist() == tokens[:end].tolist()
        assert drawn.truncated[row] == (whole.truncated[row] and end is None)
        shorter += end is not None and end < len(tokens)
    assert 0 < shorter < 9


def test_a_server_that_goes_on_a_token_too_long_is_cut(connect: Connect, trainer: Engine, model: Path) -> None:
    """An engine's own decoder may hold a character back; what came after the string is not the response's."""
    pair = connect()
    publish(trainer, pair.sampler)
    api, stop = pair.sampler._servers[0].api, Tokenizer.load(str(model)).stop_text(("2 t", "7 t1"))
    expected = pair.draw(stop=stop)
    ask = api._complete
    api._complete = lambda request, *more, **named: ask({**request, "stop": []}, *more, **named)  # type: ignore[method-assign]
    assert same(pair.draw(stop=stop), expected)


def test_the_token_endpoint_of_a_run_can_draw_with_vllm(connect: Connect, trainer: Engine) -> None:
    """Environments of verifiers reach vLLM this way: calls of a batch are its requests, each with a seed of its own."""
    pair = connect()
    publish(trainer, pair.sampler)
    found = []
    for _ in range(2):
        queue, sampling = RequestQueue(16), replace(SAMPLING, samples=1)
        prompts = [QueuedPrompt(prompt, sampling, seed=7, logprobs=True) for prompt in PROMPTS]
        queue.submit(prompts)
        queue.run(pair.sampler, lambda: all(prompt.responses.done() for prompt in prompts))  # noqa: B023
        found.append([prompt.responses.result()[0] for prompt in prompts])
    for prompt, one, other in zip(PROMPTS, *found, strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)
        alone = Sequences((prompt,), one.tokens, np.array([0, len(one.tokens)]), SAMPLING.temperature)
        np.testing.assert_allclose(one.logprobs, trainer.score(alone).logprobs, atol=2e-6, rtol=0)


def test_noise_is_a_function_of_seed_and_global_row(connect: Connect, trainer: Engine) -> None:
    """Two ranks that draw their own rows draw what one draws, however many requests are out at a time."""
    pair = connect(servers=2, concurrency=2)
    publish(trainer, pair.sampler)
    whole = pair.draw()
    parts = []
    for rank in (0, 1):
        mine = [0, 2] if rank == 0 else [1]
        rows = np.concatenate([np.arange(3) + 3 * prompt for prompt in mine])
        parts.append(pair.sampler.rollout(RolloutRequest(tuple(PROMPTS[p] for p in mine), SAMPLING, rows)))
    first, second, third = np.split(whole.tokens, whole.starts[[3, 6]])
    assert parts[0].tokens.tolist() == [*first, *third]
    assert parts[1].tokens.tolist() == second.tolist()
    assert not same(whole, pair.draw(seed=5))
    assert len({seed_of(seed, row) for seed in range(50) for row in range(200)}) == 10_000


def test_weights_change_between_pause_and_resume(connect: Connect, trainer: Engine) -> None:
    pair = connect()
    publish(trainer, pair.sampler)
    routes = [route for route in pair.server.seen if route != COMPLETIONS]
    assert routes == ["/version", "/v1/models", PAUSE, RELOAD, "/reset_prefix_cache", SET_LABEL, RESUME]
    seen = len(pair.server.seen)
    publish(trainer, pair.sampler)
    assert len(pair.server.seen) == seen, "weights that are there already are loaded again"


def test_a_load_that_did_nothing_is_told_with_the_version_held(connect: Connect, trainer: Engine) -> None:
    pair = connect()
    publish(trainer, pair.sampler)
    move(trainer)
    pair.server.faults.append(Fault(RELOAD, "ignores"))
    with pytest.raises(BackendError, match=r"loaded version 1 of the weights, but .* are those of version 0"):
        publish(trainer, pair.sampler)
    assert pair.sampler.version == 0


def test_an_old_head_is_told_too(connect: Connect, trainer: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """What vLLM does on a CPU with tied embeddings: all arrives but the head."""
    pair = connect()
    publish(trainer, pair.sampler)
    load = pair.server._load
    old = pair.server.engine.model.weights["lm_head.weight"].copy()  # type: ignore[attr-defined]

    def partly(folder: str) -> Engine:
        engine = load(folder)
        engine.model.weights["lm_head.weight"][:] = old  # type: ignore[attr-defined]
        return engine

    monkeypatch.setattr(pair.server, "_load", partly)
    move(trainer)
    with pytest.raises(BackendError, match="belong to no version"):
        publish(trainer, pair.sampler)


def test_in_low_precision_answers_that_never_move_are_told(connect: Connect, trainer: Engine) -> None:
    """Each update is within the tolerance, and the engine takes none of them."""
    pair = connect(tolerance=0.5)
    publish(trainer, pair.sampler)
    pair.server.faults.append(Fault(RELOAD, "ignores", times=-1))

    def train() -> None:
        for _ in range(20):
            move(trainer, 0.005)
            publish(trainer, pair.sampler)

    with pytest.raises(BackendError, match="exactly those of version 0"):
        train()
    assert 0 < pair.sampler.version < 19


def test_the_wrong_kind_of_logprobs_is_refused(connect: Connect, trainer: Engine) -> None:
    pair = connect()
    pair.server.tempered = False
    with pytest.raises(BackendError, match="--logprobs-mode processed_logprobs"):
        publish(trainer, pair.sampler)


@pytest.mark.parametrize("truncation", [{"top_p": 0.8}, {"top_k": 5}, {"min_p": 0.1}], ids=str)
def test_logprobs_of_a_truncated_distribution_are_not_told(
    connect: Connect, trainer: Engine, truncation: dict[str, Any]
) -> None:
    pair = connect()
    publish(trainer, pair.sampler)
    assert np.isnan(pair.draw(**truncation).logprobs).all()


@pytest.mark.parametrize("model", ["tied"], indirect=True)
@pytest.mark.parametrize(
    "truncation",
    [pytest.param(each, marks=pytest.mark.long if len(each) > 1 else ()) for each in TRUNCATIONS],
    ids=str,
)
def test_what_truncates_arrives(connect: Connect, trainer: Engine, truncation: dict[str, Any]) -> None:
    """Single tokens, by the oracle of the local engines: what is taken away never comes, the rest as it should."""
    pair = connect()
    publish(trainer, pair.sampler)
    sampling = replace(SAMPLING, max_tokens=1, temperature=1.0, samples=150, **truncation)
    drawn = pair.sampler.rollout(RolloutRequest(PROMPTS[:1], sampling)).tokens
    counts = np.bincount(drawn, minlength=VOCAB)
    p = cut_down(Oracle(Path(pair.server.model)).next_token(PROMPTS[0].tolist()), **truncation)
    assert set(np.flatnonzero(counts)) <= set(np.flatnonzero(p))
    assert np.count_nonzero(p) == 1 or pvalue(counts[p > 0], p[p > 0]) > 1e-4


def test_other_versions_are_refused(model: Path) -> None:
    with serving(model, version="0.31.1") as (_, url), pytest.raises(BackendError, match=r"is vLLM 0\.31\.1.*0\.32"):
        VllmSampler(engine_at(url)).connect()


@pytest.mark.parametrize(("url", "said"), [("http://127.0.0.1:9", "no vLLM answers"), ("localhost:8000", "http://")])
def test_a_server_that_is_not_there(url: str, said: str) -> None:
    with pytest.raises(BackendError, match=said):
        VllmSampler(engine_at(url)).connect()


def test_a_stop_ends_the_drawing_at_once(connect: Connect, trainer: Engine) -> None:
    class Stop(Exception):
        pass

    def interrupt() -> None:
        if pair.server.seen.count(COMPLETIONS) > asked + 2:
            raise Stop

    pair = connect(concurrency=2, deadline=60.0)
    publish(trainer, pair.sampler)
    asked = pair.server.seen.count(COMPLETIONS)
    pair.server.faults.append(Fault(COMPLETIONS, "hang", after=3, times=-1))
    with pytest.raises(Stop):
        pair.sampler.rollout(replace(REQUEST, interrupt=interrupt))
    pair.server.faults.clear()
    assert len(pair.draw().truncated) == 9, "it cannot go on afterwards"


def test_colocated_it_sleeps_while_the_trainer_works(connect: Connect, trainer: Engine) -> None:
    pair = connect(colocated=True)
    publish(trainer, pair.sampler)
    first = pair.draw()
    assert pair.server.asleep
    assert same(first, pair.draw())
    move(trainer)
    publish(trainer, pair.sampler)
    assert not pair.server.asleep
    assert not same(first, pair.draw())
    assert pair.server.asleep


def test_weights_that_were_not_written_are_refused(connect: Connect) -> None:
    with pytest.raises(BackendError, match="inbox"):
        connect().sampler.load_weights(PublishedWeights(3))
    with pytest.raises(BackendError, match="before it was given weights"):
        VllmSampler(engine_at("http://127.0.0.1:9")).rollout(REQUEST)
