"""The PyTorch backend: serves ``cpu`` and ``cuda`` from one implementation on transformers' causal models."""

import os

# OpenMP's threads spin while they wait. On a machine with other work each spinning thread keeps a core from the thread
# it waits for: see benchmarks/results/busy.json. OpenMP reads the variable once, when torch loads.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# Micro-batches differ in size, and blocks of fixed segments would leave gaps that no later one fits.
if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")

import torch

from backends.collective import SOLO
from backends.interface import BackendError, Collective, Engine
from backends.settings import BackendSettings
from backends.torch.backend import TorchEngine
from backends.torch.collective import TorchCollective


def create(settings: BackendSettings, name: str, collective: Collective = SOLO) -> Engine:
    """Load a model onto ``cpu`` or ``cuda``. Raises BackendError with one line."""
    if name == "cuda" and not torch.cuda.is_available():
        raise BackendError(
            f"backend 'cuda' finds no usable NVIDIA GPU (torch {torch.__version__}); choose --backend cpu, "
            "or install a CUDA build of torch and check nvidia-smi"
        )
    return TorchEngine(settings, name, collective)


def join(name: str) -> Collective:
    """The ranks that were started together with this process."""
    return TorchCollective(name)
