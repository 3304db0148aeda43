"""Seconds that work takes on a GPU, under the assumptions of ``assumed``. Pure functions."""

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
    """Seconds for bytes from or to the host's memory."""
    return count / (gpu.host * assumptions.LINK)


def gathering(count: float, pieces: int, processes: int, gpu: Gpu) -> float:
    """Seconds to gather ``count`` bytes, held in parts, on every process, in so many ``pieces`` one after another.

    Also those of the opposite, summing and scattering. Inside a node each GPU takes in what the others of
    the node hold, or forward; a node takes in what other nodes hold once, over all its network cards. The two
    go on at the same time.
    """
    if processes == 1:
        return 0.0
    inside, nodes = min(processes, gpu.node), math.ceil(processes / gpu.node)
    links = count * (inside - 1) / inside / gpu.link
    network = count * (nodes - 1) / nodes / gpu.network
    return max(links, network) / assumptions.LINK + pieces * assumptions.LATENCY * math.log2(processes)


def exposed(transfers: float, beside: float) -> float:
    """Seconds of transfers that the computing ``beside`` them, in seconds, does not hide."""
    return transfers - assumptions.OVERLAP * min(transfers, beside)
