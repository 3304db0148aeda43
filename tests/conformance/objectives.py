"""Objectives for the tests, in numpy for the backends and in torch for the oracle."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from safetensors.numpy import load_file

from backends.interface import Engine, Floats, Ids, Sequences, token_index

if TYPE_CHECKING:
    import torch

Weights = dict[str, np.ndarray]

LOW, HIGH = 0.2, 0.28


class Clipped:
    """−(1/N) Σ min(r·A, clip(r)·A), with old log-probabilities far enough away that some tokens clip.

    ``old`` is where the ratio is 1. ``factor`` multiplies the loss.
    """

    def __init__(self, sequences: Sequences, logprobs: Floats, spread: float = 0.3, factor: float = 1.0) -> None:
        rng = np.random.default_rng(1)
        count = len(sequences.tokens)
        self.starts = sequences.starts
        self.old = np.asarray(logprobs, dtype=np.float64) + spread * rng.standard_normal(count)
        self.advantages = np.repeat(rng.standard_normal(len(sequences)), sequences.lengths)
        self.factor = factor / count
        self.rows_seen: list[int] = []

    def __call__(self, logp: Floats, rows: Ids) -> tuple[float, Floats]:
        self.rows_seen += rows.tolist()
        index = token_index(self.starts, rows)
        ratio, advantage = np.exp(logp - self.old[index]), self.advantages[index]
        free, bound = ratio * advantage, np.clip(ratio, 1 - LOW, 1 + HIGH) * advantage
        gradient = np.where(free <= bound, free, 0.0)
        return float(-self.factor * np.minimum(free, bound).sum()), -self.factor * gradient

    def torch(self, logp: torch.Tensor) -> torch.Tensor:
        import torch  # the ranks of MLX's ring use this module too, and would wait seconds for it

        ratio, advantage = (logp - torch.from_numpy(self.old)).exp(), torch.from_numpy(self.advantages)
        return -self.factor * torch.minimum(ratio * advantage, ratio.clamp(1 - LOW, 1 + HIGH) * advantage).sum()


class Linear:
    """−Σ c·logp with a coefficient for every token: REINFORCE, when c is the advantage."""

    def __init__(self, starts: Ids, coefficients: Floats) -> None:
        self.starts = starts
        self.coefficients = coefficients  # [N]

    def __call__(self, logp: Floats, rows: Ids) -> tuple[float, Floats]:
        c = self.coefficients[token_index(self.starts, rows)]
        return float(-(c * logp).sum()), -c


def exported(backend: Engine, folder: Path) -> Weights:
    """The backend's weights, read from the model folder that it writes."""
    folder.mkdir()
    backend.export(folder)
    return load_file(folder / "model.safetensors")


def largest_difference(found: Weights, expected: Weights) -> float:
    """The largest difference of any weight; every expected name must be there."""
    return float(max(np.abs(found[name] - expected[name]).max() for name in expected))
