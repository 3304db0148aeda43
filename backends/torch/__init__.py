"""The PyTorch backend: serves ``cpu`` and ``cuda`` from one implementation on transformers' causal models."""

from backends.torch.backend import create, join

__all__ = ["create", "join"]
