"""The parts of vLLM's weight transfer that ``send_weights.py`` and a server use, over gloo instead of NCCL.

Names, fields and the order of the calls are those of vLLM 0.32 and 0.33. ``install`` in ``server.py`` makes a package
named vllm of them; ``STAND_IN_VERSION`` in the environment chooses the version.
"""

from __future__ import annotations

import json
import os
import threading
import urllib.request
from collections.abc import Iterator
from dataclasses import KW_ONLY, asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore

NEWER = os.environ.get("STAND_IN_VERSION", "0.32").startswith("0.33")
GATHER_SECONDS = 20


def group(address: str, port: int, rank: int, world_size: int) -> Any:
    """The processes that weights travel between: rank 0 sends."""
    wait = timedelta(seconds=GATHER_SECONDS)
    store = TCPStore(address, port, world_size, is_master=rank == 0, timeout=wait, wait_for_workers=False)
    return ProcessGroupGloo(PrefixStore("weights", store), rank, world_size, wait)


def broadcast(processes: Any, tensor: torch.Tensor) -> None:
    """Send a tensor from rank 0 into those of the others."""
    options = torch.distributed.BroadcastOptions()
    options.rootRank = options.rootTensor = 0
    processes.broadcast([tensor], options).wait()


@dataclass(frozen=True)
class ParamMeta:
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class WeightSource:
    if NEWER:

        def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
            raise NotImplementedError


@dataclass
class NCCLTrainerInitInfo:
    master_address: str
    master_port: int
    world_size: int
    packed: bool = True
    _: KW_ONLY
    rank: int


class HTTPVLLMWeightSyncClient:
    def __init__(self, base_url: str, timeout: float = 300) -> None:
        self.base_url, self.timeout = base_url, timeout

    def post(self, path: str, body: Any = None) -> None:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.base_url}/{path}", data or b"", method="POST")
        urllib.request.urlopen(request, timeout=self.timeout).close()


class TrainerEngine:
    def __init__(self, client: HTTPVLLMWeightSyncClient, source: Any, processes: Any) -> None:
        self.client, self.source, self.group = client, source, processes

    def send_weights(self) -> None:
        meta = self.source.metadata if NEWER else self.source.metadata()
        names = {"names": [each.name for each in meta], "shapes": [list(each.shape) for each in meta]}
        names["dtype_names"] = [str(each.dtype).removeprefix("torch.") for each in meta]
        self.client.post("start_weight_update")
        receive = threading.Thread(target=self.client.post, args=("update_weights", {"update_info": names}))
        receive.start()
        for _, tensor in self.source.iter_full() if NEWER else iter(self.source):
            broadcast(self.group, tensor)
        receive.join()
        self.client.post("finish_weight_update")


class WeightTransferTrainerFactory:
    @staticmethod
    def trainer_init(info: NCCLTrainerInitInfo, *, client: HTTPVLLMWeightSyncClient, source: Any) -> TrainerEngine:
        worker = asdict(info) | {"rank_offset": 1}
        del worker["rank"]
        joining = threading.Thread(
            target=client.post, args=("init_weight_transfer_engine", {"init_info": worker}), daemon=True
        )
        joining.start()
        processes = group(info.master_address, info.master_port, 0, info.world_size)
        joining.join()
        return TrainerEngine(client, source, processes)


def load_general_plugins() -> None:
    """vLLM's hook for packages that extend it."""


class Receiver:
    """A server's side of the transfer. ``folder`` gets the weights that arrived."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.group: Any = None
        self.tensors: dict[str, torch.Tensor] | None = None  # between start and finish

    def join(self, init_info: dict[str, Any]) -> None:
        rank = init_info["rank_offset"]
        self.group = group(init_info["master_address"], init_info["master_port"], rank, init_info["world_size"])

    def start(self) -> None:
        assert self.tensors is None, "an update is under way"
        self.tensors = {}

    def update(self, update_info: dict[str, Any]) -> None:
        assert self.tensors is not None, "no update was started"
        parts = (update_info["names"], update_info["dtype_names"], update_info["shapes"])
        for name, dtype, shape in zip(*parts, strict=True):
            tensor = torch.empty(shape, dtype=getattr(torch, dtype))
            broadcast(self.group, tensor)
            self.tensors[name] = tensor

    def finish(self) -> Path:
        assert self.tensors is not None
        for file in self.folder.glob("*.safetensors"):
            file.unlink()
        save_file(self.tensors, self.folder / "model.safetensors", {"format": "pt"})
        self.tensors = None
        return self.folder
