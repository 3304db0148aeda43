"""NVIDIA GPUs by their data sheets, and the machines they come in."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from delta_cli.errors import UserError


@dataclass(frozen=True)
class Gpu:
    """One GPU, as part of a node of eight. Bytes a second are decimal; links are one way."""

    name: str
    memory: float  # bytes
    flops: float  # bfloat16 products a second, times two, dense, summed in float32
    bandwidth: float  # of its memory
    link: float  # to the other GPUs of its node
    host: float  # to the host's memory: PCIe
    network: float  # of the whole node, to other nodes
    node: int = 8  # GPUs


_GIGA, _TERA, _MIB = 1e9, 1e12, 2.0**20

# Memory: the total that NVIDIA's driver reports; a sheet's "141 GB" is a round name for 143,771 MiB.
# Arithmetic, bandwidth and links: NVIDIA's data sheets of the SXM or PCIe board named. A sheet's
# figure "with sparsity" is twice the dense one, and its NVLink and PCIe figures count both directions.
# Network: of the DGX of that generation, eight ConnectX-7 of 400 Gb/s (A100: eight ConnectX-6 of 200 Gb/s);
# cards that come in no DGX: 100 Gb/s a node, as rented machines commonly have.
GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("h100", 81559 * _MIB, 989 * _TERA, 3.35 * _TERA, 450 * _GIGA, 64 * _GIGA, 400 * _GIGA),  # SXM5, HBM3
        Gpu("h200", 143771 * _MIB, 989 * _TERA, 4.8 * _TERA, 450 * _GIGA, 64 * _GIGA, 400 * _GIGA),  # SXM5, HBM3e
        Gpu("b200", 183359 * _MIB, 2250 * _TERA, 8.0 * _TERA, 900 * _GIGA, 64 * _GIGA, 400 * _GIGA),  # DGX B200
        Gpu("a100", 81920 * _MIB, 312 * _TERA, 2.039 * _TERA, 300 * _GIGA, 32 * _GIGA, 200 * _GIGA),  # SXM4, 80 GB
        # PCIe, without NVLink:
        Gpu("l40s", 46068 * _MIB, 362 * _TERA, 0.864 * _TERA, 32 * _GIGA, 32 * _GIGA, 12.5 * _GIGA),
        Gpu("rtx4090", 24564 * _MIB, 165 * _TERA, 1.008 * _TERA, 32 * _GIGA, 32 * _GIGA, 12.5 * _GIGA),
    )
}


def find_gpu(name: str) -> Gpu:
    """The GPU of that name, in any case. Raises UserError, with the nearest name, where there is none."""
    if name.lower() in GPUS:
        return GPUS[name.lower()]
    close = difflib.get_close_matches(name.lower(), GPUS, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]}? Known" if close else "known"
    raise UserError(f"--gpu {name}: {hint} are {', '.join(GPUS)}")
