"""Which version of vLLM is known here, and the command line that starts a server of it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from backends.interface import BackendError
from backends.settings import EngineSection

SUPPORTED = ((0, 32), (0, 33))  # vLLM's calls change between minor versions
VERSION_SPANS = (0, 33)  # the first that says which weights drew each token
MODEL = "delta"  # the name under which a launched server offers its model
LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # the ranks that a server can reserve room for

# On a CPU, vLLM 0.32's engine crashes on a request with a seed whose prompt is computed in parts.
ON_CPU = ("--no-enable-chunked-prefill",)
ENVIRONMENT = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"}
_TORCHRUN = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"}


@dataclass(frozen=True)
class ServedModel:
    """The model that a launched server serves, and its sizes."""

    path: str  # a folder, or a name on the hub
    dtype: str  # of the weights in the server; "auto": the type that they are stored in
    max_tokens: int  # of prompt and response together
    lora_rank: int | None = None  # the server gets room for one adapter of this rank


def server_command(
    python: str, port: int, served: ServedModel, engine: EngineSection, memory: float | None, *, on_cpu: bool
) -> list[str]:
    """The command that starts a server; ``memory`` is the share of the device's memory, None for vLLM's default."""
    options: dict[str, Any] = {
        "--model": served.path,
        "--served-model-name": MODEL,
        "--host": "127.0.0.1",
        "--port": port,
        "--dtype": served.dtype,
        "--max-model-len": served.max_tokens,
        "--max-num-seqs": engine.concurrency,
        "--logprobs-mode": "processed_logprobs",  # those at the sampling temperature
        "--generation-config": "vllm",  # not the model's own top-k and top-p
    }
    if served.lora_rank is not None:
        rank = next((rank for rank in LORA_RANKS if rank >= served.lora_rank), None)
        if rank is None:
            raise BackendError(
                f"model.lora.rank = {served.lora_rank} is more than vLLM takes; set it to {LORA_RANKS[-1]} or less"
            )
        options |= {"--max-lora-rank": rank, "--max-loras": 1}
    if memory is not None:
        options["--gpu-memory-utilization"] = memory
    flags = ["--disable-uvicorn-access-log"]
    flags += ["--enable-lora"] if served.lora_rank is not None else []
    flags += ["--enable-sleep-mode"] if engine.colocated else []
    flags += ON_CPU if on_cpu else ()
    words = [str(word) for option in options.items() for word in option]
    return [python, "-m", "vllm.entrypoints.openai.api_server", *words, *flags, *engine.arguments]


def environment(own: Mapping[str, str]) -> dict[str, str]:
    """The environment of a server, made from that of the process which starts it.

    torchrun's variables are left out: with them vLLM would join the trainer's process group.
    """
    return {name: value for name, value in own.items() if name not in _TORCHRUN} | ENVIRONMENT


def how_to_start() -> str:
    """The options that a server needs beyond vLLM's defaults, for the person who starts it."""
    return " ".join([*(f"{name}={value}" for name, value in ENVIRONMENT.items()), "--logprobs-mode processed_logprobs"])


def check_version(version: str, where: str, *, in_flight: bool = False) -> None:
    """Raise BackendError unless the calls of this version of vLLM are known, and suffice for updates in flight."""
    found = re.match(r"(\d+)\.(\d+)\b", version)
    if found is None or (int(found[1]), int(found[2])) not in SUPPORTED:
        known = [".".join(map(str, numbers)) for numbers in SUPPORTED]
        raise BackendError(
            f"{where} is vLLM {version[:40]}, but only the calls of vLLM {' and '.join(known)} are known; install "
            f"vllm=={known[0]}.* in its environment"
        )
    if in_flight and (int(found[1]), int(found[2])) < VERSION_SPANS:
        needed = ".".join(map(str, VERSION_SPANS))
        raise BackendError(
            f"{where} is vLLM {version[:40]}, which does not say which weights drew a token; engine.in_flight needs "
            f"vLLM {needed}: install vllm=={needed}.*, or set engine.in_flight = false"
        )
