"""CUDA graphs: the kernels of a function, recorded once and launched together from then on.

A forward pass of one token launches two thousand small kernels, which takes the host longer than the GPU needs to run
them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from backends.interface import GraphUse
from backends.torch.device import out_of_memory


@dataclass(frozen=True)
class _Recording:
    """A recorded function with the buffers of its inputs and results."""

    graph: torch.cuda.CUDAGraph
    inputs: Any
    results: Any


class GraphRunner:
    """Runs functions of tensors, on CUDA as graphs.

    A recording belongs to a function's name and the shapes of its inputs; everything else that the function reads must
    stay at its address until ``forget``. A shape is recorded the second time it occurs. If a function does something
    that cannot be recorded, nothing is recorded any more, and ``fault`` says why.
    """

    def __init__(self, device: torch.device) -> None:
        self.records = device.type == "cuda"
        self.fault: str | None = None
        self.replays = self.launches = 0  # functions that ran as a graph, and kernel by kernel
        self._seen: dict[tuple[Any, ...], _Recording | None] = {}
        self._pool: Any = None  # the memory pool that recordings share

    def use(self) -> GraphUse | None:
        """How often functions ran as graphs; None if the device has none."""
        return GraphUse(self.replays, self.launches, self.fault) if self.records or self.fault else None

    def forget(self) -> None:
        """Drop all recordings, because something that they read has moved."""
        self._seen, self._pool = {}, None

    def rows(self, count: int, most: int) -> int:
        """The number of rows, at least ``count``, that a step is padded to so that its shape recurs."""
        return min(most, count + -count % grain(count, 2)) if self.records else count

    def run(self, name: str, function: Callable[..., Any], *inputs: Any) -> Any:
        """``function(*inputs)``; the next call may overwrite the result."""
        shape = (name, *(tensor.shape for tensor in tree_leaves(inputs)))
        recording = self._seen.get(shape)
        if recording is None and self.records and shape in self._seen:
            recording = self._seen[shape] = self._record(function, inputs)
        self._seen.setdefault(shape, None)
        if recording is None:
            self.launches += 1
            return function(*inputs)
        for place, value in zip(tree_leaves(recording.inputs), tree_leaves(inputs), strict=True):
            place.copy_(value)
        recording.graph.replay()
        self.replays += 1
        return recording.results

    def _record(self, function: Callable[..., Any], inputs: Any) -> _Recording | None:
        """Record a function without running it; None if it cannot be recorded. Out of memory is raised."""
        own = tree_map(torch.clone, inputs)
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        try:
            graph, results = _recorded(lambda: function(*own), self._pool)
        except (RuntimeError, NotImplementedError) as error:
            _recorded(lambda: torch.zeros(1, device="cuda"))  # a capture that succeeds releases the random generator
            if out_of_memory(error):
                raise
            self.records = False
            self.fault = f"CUDA graphs cannot be recorded ({str(error).strip().splitlines()[0]})"
            return None
        return _Recording(graph, own, results)


def grain(size: int, parts: int) -> int:
    """The rounding step for ``size``: a fraction of the next power of two."""
    return max(1, (1 << size.bit_length() - 1) // parts)


@cache
def _side_stream(device: int) -> torch.cuda.Stream:
    """The stream that records; the default stream cannot."""
    return torch.cuda.Stream(device)


def _recorded(function: Callable[[], Any], pool: Any = None) -> tuple[torch.cuda.CUDAGraph, Any]:
    """Record the kernels that a function launches; returns the graph and its results. Raises RuntimeError.

    ``torch.cuda.graph`` would first collect garbage and empty the allocator's cache, every time.
    """
    graph, present = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    aside = _side_stream(torch.cuda.current_device())
    aside.wait_stream(present)
    with torch.cuda.stream(aside):
        graph.capture_begin(pool, capture_error_mode="thread_local")
        try:
            result = function()
        finally:
            graph.capture_end()
    present.wait_stream(aside)
    return graph, result
