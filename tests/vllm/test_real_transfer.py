"""vLLM's own weight transfer, on a CPU: `make test-vllm`. All of it is vLLM's but the transport, gloo for NCCL."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from backends import registry
from backends.interface import RolloutRequest, Sequences
from backends.settings import BackendSettings, EngineSection
from backends.vllm import ServedModel, ServerLauncher, VllmSampler
from tests.harness import VOCABULARY, write_model

from .conftest import move
from .test_real import CLOSE, PROMPTS, PYTHON, SAMPLING

pytestmark = [
    pytest.mark.skipif(PYTHON is None, reason="make test-vllm runs it, with DELTA_VLLM_PYTHON"),
    pytest.mark.long,
]

PLUGIN = """
import math, sys
from datetime import timedelta
import torch
from torch.distributed import BroadcastOptions, PrefixStore, ProcessGroupGloo, TCPStore
from vllm.distributed.weight_transfer import nccl_common, nccl_engine


class Gloo:
    def __init__(self, address, port, rank, world_size, device):
        wait = timedelta(seconds=60)
        store = TCPStore(address, port, world_size, is_master=rank == 0, timeout=wait, wait_for_workers=False)
        self.group = ProcessGroupGloo(PrefixStore("weights", store), rank, world_size, wait)

    def broadcast(self, tensor, src):
        options = BroadcastOptions()
        options.rootRank, options.rootTensor = src, 0
        self.group.broadcast([tensor], options).wait()

    def destroy(self):
        pass


def produce(iterator, group, src, post_iter_func, **buffers):
    for item in iterator:
        group.broadcast(post_iter_func(item).contiguous(), src)


def consume(iterator, group, src, post_unpack_func, **buffers):
    for name, (shape, dtype) in iterator:
        tensor = torch.empty(tuple(shape), dtype=dtype)
        group.broadcast(tensor, src)
        post_unpack_func([(name, tensor)])


def register():
    torch.accelerator.current_device_index = lambda: 0
    nccl_common.stateless_init_process_group = lambda *given, device=None: Gloo(*given[:4], device)
    nccl_engine.packed_nccl_broadcast_producer = produce
    nccl_engine.packed_nccl_broadcast_consumer = consume
"""


@pytest.fixture
def gloo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plugin that vLLM loads in every one of its processes."""
    folder = tmp_path / "plugin"
    info = folder / "delta_gloo-1.dist-info"
    info.mkdir(parents=True)
    (folder / "delta_gloo.py").write_text(PLUGIN)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: delta-gloo\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[vllm.general_plugins]\ndelta_gloo = delta_gloo:register\n")
    monkeypatch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")


@pytest.mark.parametrize("tie", [False, True], ids=["untied", "tied"])
def test_updates_arrive(tie: bool, gloo: None, tmp_path: Path) -> None:
    wide = {"hidden": 64, "layers": 2, "head_dim": 32, "intermediate": 128, "scale": 0.1}
    model = str(write_model(tmp_path / "model", tie=tie, **wide))
    trainer = registry.create("cpu", BackendSettings.of(model))
    words = ("--weight-transfer-config", '{"backend": "nccl"}')
    launched = EngineSection(kind="vllm", launch=True, python=PYTHON, concurrency=64, arguments=words)
    launcher = ServerLauncher(ServedModel(model, "float32", 512), launched, tmp_path / "server.log", print)
    launcher.check()
    url = launcher.start().url
    engine = EngineSection(
        kind="vllm", url=(url,), transfer="nccl", python=PYTHON, concurrency=64, tolerance=CLOSE, deadline=240.0
    )
    sampler = VllmSampler(engine, inbox=tmp_path / "inbox", log=tmp_path / "sender.log", vocabulary=VOCABULARY)
    try:
        sampler.connect()
        for _ in range(3):
            sampler.load_weights(trainer.publish(sampler.inbox))
            drawn = sampler.rollout(RolloutRequest(PROMPTS, SAMPLING))
            prompts = tuple(prompt for prompt in PROMPTS for _ in range(SAMPLING.samples))
            sequences = Sequences(prompts, drawn.tokens, drawn.starts, SAMPLING.temperature)
            gap = float(np.abs(trainer.score(sequences).logprobs - drawn.logprobs).max())
            print(f"version {trainer.version}: largest gap {gap:.2g} nats")
            assert gap < CLOSE
            move(trainer, 1e-2)
    finally:
        sampler.close()
        launcher.stop()
        trainer.close()
