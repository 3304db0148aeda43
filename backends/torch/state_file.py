"""Safetensors files of a checkpoint, written and read tensor by tensor, by any number of ranks.

Each rank writes the rows of every tensor that it holds, with the number of the first row and the whole shape. Any
number of ranks can read them, each the rows it needs. torch.distributed.checkpoint does something similar, but its
index is a pickle, which can run code when it is opened, and it would copy moments that are stored in buckets.
``safetensors.torch.save_file`` copies everything from the GPU to the host before it writes the first byte: 98 GB for
the float32 weights and moments of 8 billion parameters.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from backends.interface import BackendError

_TYPES = {torch.float32: "F32", torch.uint8: "U8"}
_PLACES = "rows"  # metadata of a file: the first row and the whole shape of each tensor that it holds in part


@dataclass(frozen=True)
class TensorRows:
    """Rows of a tensor as flat parts in order, which may be views of memory in use."""

    shape: tuple[int, ...]  # of the whole tensor
    parts: list[Tensor]
    first: int = 0  # the first row of the parts

    @property
    def held(self) -> tuple[int, ...]:
        """The shape of the rows that the parts hold."""
        width = math.prod(self.shape[1:])
        rows = sum(part.numel() for part in self.parts) // width if width else self.shape[0]
        return (rows, *self.shape[1:]) if self.shape else ()

    @property
    def nbytes(self) -> int:
        """The bytes of the parts."""
        return sum(part.nbytes for part in self.parts)

    def copy(self) -> TensorRows:
        """The same numbers in host memory of their own."""
        parts = [torch.empty(part.shape, dtype=part.dtype).copy_(part) for part in self.parts]
        return TensorRows(self.shape, parts, self.first)


def whole(tensor: Tensor) -> TensorRows:
    """An entry of one part that holds the whole tensor."""
    return TensorRows(tuple(tensor.shape), [tensor.detach().reshape(-1)])


def file_of(folder: Path, stem: str, rank: int = 0, ranks: int = 1) -> Path:
    """The file name of one rank, among those that hold a part; a single one has a plain name."""
    return folder / (f"{stem}.safetensors" if ranks == 1 else f"{stem}-{rank + 1:05d}-of-{ranks:05d}.safetensors")


def write(file: Path, entries: Mapping[str, TensorRows]) -> str:
    """Write ``entries`` by name in the safetensors format: the length of a JSON header, the header, and the numbers.

    Returns the SHA-256 of the file, which is on disk by then. Hashing it here saves reading it again; a thread does so
    while this one writes.
    """
    places = {name: [entry.first, *entry.shape] for name, entry in entries.items() if entry.held != entry.shape}
    header: dict[str, Any] = {"__metadata__": {_PLACES: json.dumps(places)}} if places else {}
    end = 0
    types = {name: entry.parts[0].dtype if entry.parts else torch.float32 for name, entry in entries.items()}
    ordered = sorted(entries.items(), key=lambda item: -types[item[0]].itemsize)  # aligns all tensors
    for name, entry in ordered:
        start, end = end, end + sum(part.nbytes for part in entry.parts)
        header[name] = {"dtype": _TYPES[types[name]], "shape": entry.held, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()
    with file.open("wb") as stream, ThreadPoolExecutor(1, "digest") as hashing:
        for data in chain([len(text).to_bytes(8, "little") + text], _numbers(entry for _, entry in ordered)):
            hashed = hashing.submit(digest.update, data)
            stream.write(data)
            hashed.result()
        stream.flush()
        os.fsync(stream.fileno())
    return digest.hexdigest()


def _numbers(entries: Iterable[TensorRows]) -> Iterator[bytes | memoryview]:
    """Yield the numbers of tensors, with one part on the host at a time."""
    for entry in entries:
        for part in entry.parts:
            yield part.cpu().numpy().data


@dataclass(frozen=True)
class _Stored:
    """Some rows of a tensor in one of the files."""

    file: safe_open
    first: int
    rows: int


class StoredState:
    """The tensors of a checkpoint, in any number of files."""

    def __init__(self, folder: Path, stem: str, files: Mapping[Path, safe_open]) -> None:
        self.label = file_of(folder, stem)
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._parts: dict[str, list[_Stored]] = {}
        for file in files.values():
            places = json.loads((file.metadata() or {}).get(_PLACES, "{}"))
            for name in file.keys():  # noqa: SIM118 - no mapping
                shape = tuple(file.get_slice(name).get_shape())
                first, *whole_shape = places.get(name, [0, *shape])
                self.shapes[name] = tuple(whole_shape)
                self._parts.setdefault(name, []).append(_Stored(file, first, shape[0] if shape else 1))

    def check(self, expected: Mapping[str, TensorRows]) -> None:
        """Raise BackendError unless names and shapes are the expected ones."""
        differing = set(self.shapes) ^ set(expected)
        differing |= {name for name, entry in expected.items() if self.shapes.get(name, entry.shape) != entry.shape}
        if differing:
            raise BackendError(
                f"{self.label} belongs to another model or other adapters: {len(differing)} tensors differ, "
                f"{min(differing)} among them; resume with the settings it was written with"
            )

    def scalar(self, name: str) -> Tensor:
        """A tensor that every file holds whole."""
        found: Tensor = self._parts[name][0].file.get_tensor(name)
        return found

    @torch.no_grad()
    def read(self, entries: Mapping[str, TensorRows]) -> None:
        """Fill the parts of ``entries``, which must have passed :meth:`check`."""
        for name, entry in entries.items():
            values = self._rows(name, entry).reshape(-1).split([part.numel() for part in entry.parts])
            for part, new in zip(entry.parts, values, strict=True):
                part.copy_(new)

    def _rows(self, name: str, entry: TensorRows) -> Tensor:
        """The rows that an entry holds; raises BackendError if no file has them."""
        if not entry.shape:
            return self.scalar(name)
        first, last = entry.first, entry.first + entry.held[0]
        found = []
        for part in sorted(self._parts[name], key=lambda part: part.first):
            start, stop = max(first, part.first), min(last, part.first + part.rows)
            if start < stop:
                found.append(part.file.get_slice(name)[start - part.first : stop - part.first])
                first = stop
        if first < last:
            raise BackendError(f"{self.label}: row {first} of {name} is in none of its files; resume from another")
        return torch.cat(found) if found else torch.empty(0)


@contextmanager
def stored(folder: Path, stem: str) -> Iterator[StoredState]:
    """The array that one or several ranks wrote under a name; raises OSError or SafetensorError if it is damaged."""
    single = file_of(folder, stem)
    paths = sorted(folder.glob(f"{stem}-*-of-*.safetensors")) or [single]
    with ExitStack() as stack:
        yield StoredState(folder, stem, {path: stack.enter_context(safe_open(path, "pt")) for path in paths})
