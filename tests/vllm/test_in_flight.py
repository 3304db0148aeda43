"""Weights that change while responses are drawn: every token is known by the weights that drew it."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from backends import registry
from backends.interface import BackendError, Completions, Engine, Sequences
from backends.settings import BackendSettings, EngineSection
from backends.vllm.api import CHANGING
from delta_cli.errors import UserError
from delta_cli.recipe import load_recipe
from delta_cli.rollout import unused_batches
from delta_cli.rollout.open_vllm import refuse_unreachable
from delta_cli.runs.folder import RunFolder, read_lines
from tests.harness import make_recipe, train
from tests.harness import write_model as write_run_model
from tests.vllm.conftest import PROMPTS, REQUEST, SAMPLING, Connect, Pair, move, publish
from tests.vllm.in_flight import Hold
from tests.vllm.server import PAUSE, RELOAD, RESUME, Fault, serving

HELD = 3  # tokens of a response before the weights change
NEWER = "0.33.0"


def drawn_during_a_load(pair: Pair, trainer: Engine) -> Completions:
    """A rollout during which, with each response at its third token, the trainer's weights are loaded."""
    hold = Hold(pair.server, HELD)
    request = replace(REQUEST, sampling=replace(SAMPLING, stop_ids=()))
    found: list[Completions] = []
    rollout = threading.Thread(target=lambda: found.append(pair.sampler.rollout(request)))
    rollout.start()
    end = time.monotonic() + 10
    while hold.held < len(request) and time.monotonic() < end:
        time.sleep(0.01)
    assert hold.held == len(request)
    publish(trainer, pair.sampler)
    rollout.join(20)
    return found[0]


def policy_logprobs(folder: Path, drawn: Completions) -> np.ndarray:
    """Log-probabilities of what was drawn under exported weights."""
    prompts = tuple(prompt for prompt in PROMPTS for _ in range(SAMPLING.samples))
    sequences = Sequences(prompts, drawn.tokens, drawn.starts, SAMPLING.temperature)
    return np.asarray(registry.create("fake", BackendSettings.of(str(folder))).score(sequences).logprobs)


@pytest.mark.parametrize("model", ["untied"], indirect=True)
class TestSampler:
    def test_a_response_spans_versions_and_each_token_has_its_own(
        self, connect: Connect, trainer: Engine, tmp_path: Path
    ) -> None:
        pair = connect(version=NEWER, in_flight=True, async_steps=1)
        publish(trainer, pair.sampler)
        trainer.export(tmp_path / "old")
        move(trainer)
        trainer.export(tmp_path / "new")
        drawn = drawn_during_a_load(pair, trainer)
        assert drawn.versions is not None
        place = np.concatenate([np.arange(length) for length in np.diff(drawn.starts)])
        assert drawn.versions.tolist() == np.where(place < HELD, 0, 1).tolist()
        assert drawn.version == 0, "the oldest"
        old, new = (policy_logprobs(tmp_path / name, drawn) for name in ("old", "new"))
        np.testing.assert_allclose(drawn.logprobs, np.where(place < HELD, old, new), atol=1e-5)
        assert np.abs(old - new).max() > 0.01, "the two versions can be told apart"
        order = [route for route in pair.server.seen if route.startswith((PAUSE, "/reset", RESUME, RELOAD))]
        each = [f"{PAUSE}?mode=keep", RELOAD, "/reset_prefix_cache?reset_running_requests=true", RESUME]
        assert order == each * 2
        assert not pair.notices

    def test_what_is_drawn_after_a_failed_load_is_drawn_again(
        self, connect: Connect, trainer: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The server goes on with weights of which nobody knows what they are; none of these tokens is used."""
        monkeypatch.setattr("backends.vllm.sampler.RETRY_SECONDS", 0.2)
        pair = connect(version=NEWER, in_flight=True, async_steps=1)
        publish(trainer, pair.sampler)
        trainer.export(tmp_path / "old")
        move(trainer)
        trainer.export(tmp_path / "new")
        pair.server.faults.append(Fault(RELOAD, "status 500 out of memory"))
        drawn = drawn_during_a_load(pair, trainer)
        assert CHANGING in pair.server.labels_drawn, "nothing was drawn in between"
        assert set(drawn.versions.tolist()) <= {0, 1}
        old, new = (policy_logprobs(tmp_path / name, drawn) for name in ("old", "new"))
        np.testing.assert_allclose(drawn.logprobs, np.where(drawn.versions == 0, old, new), atol=1e-5)

    def test_an_older_vllm_is_refused(self, connect: Connect) -> None:
        with pytest.raises(
            BackendError, match=r"is vLLM 0\.32\.0, which does not say .* engine\.in_flight needs vLLM 0\.33"
        ):
            connect(in_flight=True, async_steps=1)


def test_it_needs_batches_that_are_drawn_ahead() -> None:
    with pytest.raises(ValueError, match=r"set engine\.async_steps to 1 or more"):
        EngineSection(kind="vllm", url=("http://10.0.0.1:8000",), in_flight=True)


@pytest.mark.parametrize("ahead", [pytest.param(1, marks=pytest.mark.long), pytest.param(2, marks=pytest.mark.long)])
def test_a_run_records_the_version_of_every_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead: int) -> None:
    """Nothing is older than allowed, and what waits in a checkpoint keeps its versions."""
    model = write_run_model(tmp_path / "model")
    kept: list[list[int]] = []
    save, load = unused_batches.save, unused_batches.load

    def saving(folder, batches, problems, version):  # type: ignore[no-untyped-def]
        save(folder, batches, problems, version)
        for one, other in zip(load(folder, problems, version), batches, strict=True):
            kept.append(one.token_versions.tolist())
            assert kept[-1] == other.token_versions.tolist()

    monkeypatch.setattr(unused_batches, "save", saving)
    with serving(model, version=NEWER) as (server, url):
        changes = {
            "engine__kind": "vllm",
            "engine__url": [url],
            "engine__async_steps": ahead,
            "run__steps": 3,
            "evaluation__every": "never",
        }
        recipe = make_recipe(model, **changes, engine__in_flight=True, rollout__max_tokens=48)
        Hold(server, 1, free=recipe.rollout.prompts * recipe.rollout.responses)
        train(recipe, tmp_path / "run")
        assert f"{PAUSE}?mode=keep" in server.seen
    assert kept, "no batch waited in a checkpoint"
    records = list(read_lines(RunFolder(tmp_path / "run").metrics))
    second = [row["weight_versions"] for row in read_lines(RunFolder(tmp_path / "run").rollout_file(2))]
    newer = records[0]["updates"]
    for spans in second:  # a response that the server begins late is drawn by the newer weights alone
        assert [span["version"] for span in spans] in ([0], [0, newer], [newer])
    assert any(len(spans) > 1 for spans in second)
    updates = np.cumsum([0, *(record["updates"] for record in records)])
    for step, record in enumerate(records):
        assert 0 <= record["staleness_mean"] <= record["staleness"] <= updates[step] - updates[max(step - ahead, 0)]
        tokens = stale = 0
        for row in read_lines(RunFolder(tmp_path / "run").rollout_file(step + 1)):
            spans = row["weight_versions"]
            assert spans[0]["start"] == 0
            assert spans[-1]["end"] == len(row["tokens"])
            assert all(one["end"] == other["start"] for one, other in pairwise(spans))
            tokens += len(row["tokens"])
            stale += sum((updates[step] - span["version"]) * (span["end"] - span["start"]) for span in spans)
        assert record["staleness_mean"] == pytest.approx(stale / tokens)


def test_episodes_that_keep_no_versions_are_refused() -> None:
    keys = ['engine.kind="vllm"', 'engine.url=["http://127.0.0.1:9"]', "engine.async_steps=1", "engine.in_flight=true"]
    with pytest.raises(UserError, match=r"engine\.in_flight needs the version of every token"):
        load_recipe(None, [*keys, 'environment.kind="verifiers"', 'environment.id="wordle"'])


def test_several_training_processes_are_refused() -> None:
    engine = EngineSection(kind="vllm", url=("http://127.0.0.1:9",), in_flight=True, async_steps=1)
    with pytest.raises(UserError, match="works with one training process, and there are 2"):
        refuse_unreachable(engine, SimpleNamespace(size=2))  # type: ignore[arg-type]
