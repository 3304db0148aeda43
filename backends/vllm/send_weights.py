"""Sends published weights to a vLLM server over NCCL, with vLLM's own trainer engine.

A script for the Python of vLLM's environment: ``send_weights.py URL ADDRESS PORT SECONDS``. For each line on standard
input, a folder with safetensors files, it writes a line of JSON on standard output: ``{"error": ""}`` once the server
has the weights. It ends after an error, and when its standard input closes. ADDRESS and PORT are where the server's
workers reach this process, and SECONDS is the longest wait for one of the server's answers.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import urllib.request
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo
from vllm.plugins import load_general_plugins


class Tensors:
    """The tensors of a folder's safetensors files, in the order of the files' names and of the names in each file."""

    folder: Path

    def declared(self) -> list[Any]:
        """Name, type and shape of each."""
        return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self.tensors("meta")]

    def tensors(self, device: torch.device | str) -> Iterator[tuple[str, torch.Tensor]]:
        """One at a time."""
        for file in sorted(self.folder.glob("*.safetensors")):
            with safe_open(file, "pt") as stored:
                for name in stored.keys():  # noqa: SIM118  # not a dictionary
                    yield name, stored.get_tensor(name).to(device)

    def whole(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Each tensor on the device that sends it."""
        return self.tensors(torch.accelerator.current_accelerator() or "cpu")


if hasattr(WeightSource, "iter_full"):  # vLLM 0.33

    class Source(Tensors, WeightSource):  # type: ignore[misc]  # vLLM is not in this environment
        """The source that vLLM's engine reads the weights from."""

        iter_full = Tensors.whole
        metadata = cached_property(Tensors.declared)

else:  # vLLM 0.32

    class Source(Tensors, WeightSource):  # type: ignore[misc, no-redef]
        """The source that vLLM's engine reads the weights from."""

        __iter__ = Tensors.whole
        metadata = Tensors.declared


def connect(url: str, address: str, port: int, seconds: float, source: Source) -> Any:
    """A trainer engine whose group of processes is this one, rank 0, and the server's workers."""
    with urllib.request.urlopen(f"{url}/get_world_size", timeout=seconds) as answer:
        workers = json.load(answer)["world_size"]
    where = NCCLTrainerInitInfo(master_address=address, master_port=port, world_size=workers + 1, rank=0)
    client = HTTPVLLMWeightSyncClient(url, timeout=seconds)
    return WeightTransferTrainerFactory.trainer_init(where, client=client, source=source)


def main(url: str, address: str, port: str, seconds: str) -> None:
    """Send what is asked for until standard input closes."""
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM writes its log on standard output
    folders: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(folders,), daemon=True).start()
    load_general_plugins()
    source, engine = Source(), None
    while True:
        source.folder = Path(folders.get())
        try:
            engine = engine or connect(url, address, int(port), float(seconds), source)
            engine.send_weights()
            error = ""
        except Exception as failed:
            error = f"{type(failed).__name__}: {failed}"
        print(json.dumps({"error": error}), file=output, flush=True)
        if error:
            os._exit(1)  # a thread of the engine may wait for the server's workers for good


def _read(folders: queue.SimpleQueue[str]) -> None:
    for line in sys.stdin:
        folders.put(line.rstrip("\n"))
    os._exit(0)  # even in the middle of a transfer: the trainer is gone


if __name__ == "__main__":
    main(*sys.argv[1:])
