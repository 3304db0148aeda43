"""Seconds that work takes on a GPU, under the assumptions in ``assumptions``. Pure functions."""

from __future__ import annotations

import math

from delta_cli.doctor import assumptions
from delta_cli.doctor.gpus import Gpu


def products(flops: float, gpu: Gpu) -> float:
    """Seconds of large matrix products."""
    return flops / (gpu.flops * assumptions.MFU)


def reading(count: float, gpu: Gpu) -> float:
    """Seconds to read or write bytes of the GPU's memory."""
    return count / (gpu.bandwidth * assumptions.BANDWIDTH)


def crossing(count: float, gpu: Gpu) -> float:
    """Seconds to copy bytes from or to host memory."""
    return count / (gpu.host * assumptions.LINK)


def gathering(count: float, pieces: int, processes: int, gpu: Gpu) -> float:
    """Seconds to gather ``count`` sharded bytes on every process, in ``pieces`` one after another.

    Summing and scattering takes as long. Inside a node, each GPU receives what the other GPUs of the node hold or
    forward; a node receives what other nodes hold once, over all its network cards. Both run at the same time.
    """
    if processes == 1:
        return 0.0
    inside, nodes = min(processes, gpu.node), math.ceil(processes / gpu.node)
    links = count * (inside - 1) / inside / gpu.link
    network = count * (nodes - 1) / nodes / gpu.network
    return max(links, network) / assumptions.LINK + pieces * assumptions.LATENCY * math.log2(processes)


def exposed(transfers: float, beside: float) -> float:
    """Seconds of transfers that ``beside`` seconds of simultaneous computing do not hide."""
    return transfers - assumptions.OVERLAP * min(transfers, beside)
