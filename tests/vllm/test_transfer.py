"""Weights that are sent to a server which cannot read the trainer's folder."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from backends import registry
from backends.interface import BackendError, Engine
from backends.settings import BackendSettings, EngineSection, Lora
from backends.vllm.api import ServerError
from backends.vllm.weight_sender import WeightSender
from delta_cli.recipe import load_recipe
from delta_cli.recipe.backend_settings import backend_settings

from .conftest import Connect, Pair, move, publish
from .server import RELOAD, Fault, install

pytest.importorskip("torch")
UPDATE, FINISH = "/update_weights", "/finish_weight_update"


@pytest.fixture(autouse=True)
def environment(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Python with a vLLM whose version is the test's parameter."""
    monkeypatch.setenv("PYTHONPATH", str(install(tmp_path / "environment")))
    monkeypatch.setenv("STAND_IN_VERSION", getattr(request, "param", "0.33"))
    monkeypatch.setattr("tests.vllm.transfer.GATHER_SECONDS", 5)


@pytest.fixture
def pair(connect: Connect) -> Iterator[Pair]:
    """A server that gets its weights over the network."""
    found = connect(transfer="nccl", python=sys.executable, deadline=15.0)
    yield found
    found.sampler.close()


@pytest.mark.parametrize(
    ("model", "environment"),
    [
        ("untied", "0.33"),
        *(pytest.param(*each, marks=pytest.mark.long) for each in (("tied", "0.33"), ("tied", "0.32"))),
    ],
    indirect=True,
)
def test_a_server_gets_the_weights_to_the_bit(pair: Pair, trainer: Engine) -> None:
    for _ in range(2):
        publish(trainer, pair.sampler)
        assert pair.draw().version == trainer.version
        own, sent = trainer.model.weights, pair.server.engine.model.weights  # type: ignore[attr-defined]
        assert all(np.array_equal(sent[name], np.float32(weight)) for name, weight in own.items())
        move(trainer)
    assert pair.server.seen.count("/init_weight_transfer_engine") == 1, "one group serves all updates"
    assert RELOAD not in pair.server.seen


@pytest.mark.long
@pytest.mark.parametrize("model", ["untied"], indirect=True)
@pytest.mark.parametrize(
    "fault", [Fault("/start_weight_update", "reset"), Fault(UPDATE, "status 500"), Fault(FINISH, "reset")], ids=str
)
def test_a_transfer_that_fails_is_made_again_in_a_new_group(fault: Fault, pair: Pair, trainer: Engine) -> None:
    pair.server.faults.append(fault)
    publish(trainer, pair.sampler)
    assert pair.draw().version == trainer.version
    assert pair.server.seen.count("/init_weight_transfer_engine") == 2
    assert "did not get the weights over NCCL" in pair.notices[0]


@pytest.mark.long
@pytest.mark.parametrize("model", ["untied"], indirect=True)
def test_a_server_that_keeps_its_old_weights_is_found_out(pair: Pair, trainer: Engine) -> None:
    publish(trainer, pair.sampler)
    move(trainer)
    pair.server.faults.append(Fault(FINISH, "ignores"))
    with pytest.raises(BackendError, match=r"reported that it loaded version 1 of the weights, but .* of version 0"):
        publish(trainer, pair.sampler)


@pytest.mark.parametrize("model", ["untied"], indirect=True)
def test_a_server_without_the_transfer_is_named_with_what_it_needs(
    connect: Connect, trainer: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = connect(transfer="nccl", python=sys.executable, deadline=0.5)
    pair.server.faults.append(Fault("/get_world_size", "status 404", times=99))
    with pytest.raises(BackendError, match=r"did not get the weights over NCCL .*--weight-transfer-config") as refused:
        publish(trainer, pair.sampler)
    assert "\n" not in str(refused.value)
    pair.sampler.close()


def test_a_sender_that_does_not_answer_is_ended(tmp_path: Path) -> None:
    """Its Python is ``sleep``, so to speak: a script that reads and never answers."""
    silent = tmp_path / "python"
    silent.write_text("#!/bin/sh\nexec sleep 60\n")
    silent.chmod(0o755)
    engine = EngineSection(kind="vllm", url=("http://127.0.0.1:9",), transfer="nccl", python=str(silent), deadline=0.2)
    sender = WeightSender("http://127.0.0.1:9", engine, tmp_path / "log")
    with pytest.raises(ServerError, match=r"no answer within 0\.2 s"):
        sender.send(tmp_path)
    assert sender._process is None


@pytest.mark.parametrize("changes", [{"launch": True, "url": ()}, {"python": None}, {"colocated": True}])
def test_where_it_cannot_be_used_it_is_refused(changes: dict[str, Any]) -> None:
    keys = {"kind": "vllm", "url": ("http://10.0.0.1:8000",), "transfer": "nccl", "python": "python"} | changes
    with pytest.raises(ValueError, match=r'engine\.transfer = "nccl" is for servers on other GPUs'):
        EngineSection(**keys)


@pytest.mark.long
@pytest.mark.parametrize("model", ["untied"], indirect=True)
def test_adapters_are_merged_into_what_is_sent(pair: Pair, model: Path, tmp_path: Path) -> None:
    """The server holds the exported model to the bit, and that is not the base."""
    lora = Lora(rank=2, scale=8.0)
    trainer = registry.create("cpu", BackendSettings.of(str(model), lora=lora, publish_adapters=False))
    base = load_file(model / "model.safetensors")
    publish(trainer, pair.sampler)
    move(trainer)
    publish(trainer, pair.sampler)
    trainer.export(tmp_path / "merged")
    merged, sent = load_file(tmp_path / "merged" / "model.safetensors"), pair.server.engine.model.weights  # type: ignore[attr-defined]
    assert merged.keys() == sent.keys()
    assert all(np.array_equal(sent[name], weight) for name, weight in merged.items())
    assert not all(np.array_equal(base[name], weight) for name, weight in merged.items())
    trainer.close()


@pytest.mark.parametrize(("transfer", "merged"), [("folder", False), ("nccl", True)])
def test_only_a_folder_gets_adapters_alone(transfer: str, merged: bool) -> None:
    keys = ["model.lora.rank=2", f'engine.transfer="{transfer}"', 'engine.python="python"', 'engine.kind="vllm"']
    recipe = load_recipe(None, ['engine.url=["http://127.0.0.1:9"]', *keys])
    assert backend_settings(recipe).publish_adapters is not merged
