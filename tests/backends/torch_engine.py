"""Batches, an objective and gradients for the tests of the torch backend."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from backends.interface import Floats, Ids, Sequences, starts_of
from backends.torch.backend import TorchEngine


def random_sequences(lengths: Sequence[int], prompts: Sequence[int], each: int = 3) -> Sequences:
    """Random responses of these lengths, ``each`` of them to a prompt of each of the other lengths."""
    rng = np.random.default_rng(0)
    ids = [rng.integers(1, 31, size) for size in prompts]
    given = tuple(ids[row // each] for row in range(len(lengths)))
    return Sequences(given, rng.integers(0, 31, sum(lengths)), starts_of(lengths))


def summed(logp: Floats, _: Ids) -> tuple[float, Floats]:
    """The loss Σ logp."""
    return float(logp.sum()), np.ones(len(logp))


def gradients(engine: TorchEngine) -> dict[str, Tensor]:
    """A copy of every weight's gradient."""
    return {name: weight.grad.clone() for name, weight in engine._optimizer.weights.items() if weight.grad is not None}
