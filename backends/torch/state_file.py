"""Safetensors files that are written and read a tensor at a time.

``safetensors.torch.save_file`` copies everything that is on a GPU to the host before it writes the first
byte: for the float32 weights and moments of 8 billion parameters 98 GB, at the first checkpoint of a run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from backends.interface import BackendError

_TYPES = {torch.float32: "F32", torch.uint8: "U8"}


@dataclass(frozen=True)
class Entry:
    """A tensor of a file as flat parts in their order, which may be views of what is in use."""

    shape: tuple[int, ...]
    parts: list[Tensor]


def whole(tensor: Tensor) -> Entry:
    """An entry of one part."""
    return Entry(tuple(tensor.shape), [tensor.detach().reshape(-1)])


def write(file: Path, entries: Mapping[str, Entry]) -> None:
    """Write ``entries`` by name, in safetensors' format: the length of a JSON header, the header, and the numbers."""
    header, end = {}, 0
    ordered = sorted(entries.items(), key=lambda item: -item[1].parts[0].itemsize)  # so that all are aligned
    for name, entry in ordered:
        start, end = end, end + sum(part.nbytes for part in entry.parts)
        header[name] = {"dtype": _TYPES[entry.parts[0].dtype], "shape": entry.shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for _, entry in ordered:
            for part in entry.parts:
                stream.write(part.cpu().numpy().data)


def check(file: Path, stored: safe_open, expected: Mapping[str, Entry]) -> None:
    """Raise BackendError for a file whose names or shapes are not the expected ones."""
    differing = set(stored.keys()) ^ set(expected)
    differing |= {
        name
        for name, entry in expected.items()
        if name not in differing and list(entry.shape) != stored.get_slice(name).get_shape()
    }
    if differing:
        raise BackendError(
            f"{file} belongs to another model or other adapters: {len(differing)} tensors differ, "
            f"{min(differing)} among them; resume with the settings it was written with"
        )


@torch.no_grad()
def read(stored: safe_open, entries: Mapping[str, Entry]) -> None:
    """Fill the parts of ``entries`` from a file that :func:`check` has found to fit."""
    for name, entry in entries.items():
        values = stored.get_tensor(name).view(-1).split([part.numel() for part in entry.parts])
        for part, new in zip(entry.parts, values, strict=True):
            part.copy_(new)
