"""The PyTorch backend: serves ``cpu`` and ``cuda`` from one implementation on transformers' causal models."""

from backends.torch.backend import create

__all__ = ["create"]
