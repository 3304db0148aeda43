"""Prepares a published model folder for vLLM: a head that is tied to the embedding is written out."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

from backends.interface import BackendError

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
HEAD_FILE = "model-head.safetensors"


def servable(folder: Path) -> tuple[Path, bool]:
    """The path that a server must load from a folder of published weights, and whether it is an adapter."""
    if (folder / "config.json").is_file():
        untie(folder)
        return folder, False
    if (folder / "adapter" / "adapter_config.json").is_file():
        return folder / "adapter", True
    raise BackendError(f"{folder}: holds neither a model nor an adapter, so vLLM cannot load it")


def untie(folder: Path) -> None:
    """Write a head that is tied to the embedding as a matrix of its own. Other models are left as they are.

    A server that ties them may take a new embedding and keep the old head; on a CPU it does.
    """
    path = folder / "config.json"
    config = json.loads(path.read_text())
    if not config.get("tie_word_embeddings"):
        return
    for file in sorted(folder.glob("*.safetensors")):
        found = _tensor(file, EMBEDDING)
        if found is not None:
            _write(folder / HEAD_FILE, HEAD, *found)
            path.write_text(json.dumps(config | {"tie_word_embeddings": False}, indent=2) + "\n")
            return
    raise BackendError(
        f"{folder}: has no tensor {EMBEDDING}, to which config.json ties the head; vLLM cannot be given this model"
    )


def _tensor(file: Path, name: str) -> tuple[str, list[int], bytes] | None:
    """Type, shape and bytes of a tensor as the file has them; numpy would not know bfloat16."""
    with file.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        entry: dict[str, Any] | None = json.loads(stream.read(length)).get(name)
        if entry is None:
            return None
        first, last = entry["data_offsets"]
        stream.seek(8 + length + first)
        return entry["dtype"], entry["shape"], stream.read(last - first)


def _write(file: Path, name: str, dtype: str, shape: list[int], data: bytes) -> None:
    """A safetensors file of one tensor."""
    entry = {"dtype": dtype, "shape": shape, "data_offsets": [0, len(data)]}
    header = json.dumps({"__metadata__": {"format": "pt"}, name: entry}).encode()
    header += b" " * (-len(header) % 8)
    with file.open("wb") as stream:
        stream.write(struct.pack("<Q", len(header)) + header)
        stream.write(data)
