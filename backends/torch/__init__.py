"""The PyTorch backend: serves ``cpu`` and ``cuda`` from one implementation on transformers' causal models."""

import os

# OpenMP's threads spin while they wait. On a machine with other work each spinning thread keeps a core from the thread
# it waits for: see benchmarks/results/busy.json. OpenMP reads the variable once, when torch loads.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# Micro-batches differ in size, and blocks of fixed segments would leave gaps that no later one fits.
if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")

from backends.torch.backend import create, join

__all__ = ["create", "join"]
