"""AdamW with gradient clipping, in float64."""

from __future__ import annotations

import math

import numpy as np

from backends.fake.qwen3 import NumpyWeights
from backends.settings import Optimizer


class FakeAdamW:
    """Adam with bias correction and decoupled weight decay on every weight (Loshchilov & Hutter 2019).

    Moments always are in host memory, so ``offload`` changes nothing.
    """

    def __init__(self, settings: Optimizer, weights: NumpyWeights) -> None:
        self.settings = settings
        self.steps = 0
        self.mean = {name: np.zeros_like(weight) for name, weight in weights.items()}
        self.square = {name: np.zeros_like(weight) for name, weight in weights.items()}

    def step(self, weights: NumpyWeights, grads: NumpyWeights, learning_rate: float, scale: float) -> float:
        """Update ``weights`` in place; returns the norm of ``scale`` times the gradient before clipping.

        Updates nothing if the norm is not finite.
        """
        settings = self.settings
        norm = abs(scale) * math.sqrt(sum(float(np.vdot(grad, grad)) for grad in grads.values()))
        if not math.isfinite(norm):
            return norm
        self.steps += 1
        factor = scale * settings.clip_factor(norm)
        bias1, bias2 = 1 - settings.beta1**self.steps, 1 - settings.beta2**self.steps
        for name, weight in weights.items():
            grad, mean, square = factor * grads[name], self.mean[name], self.square[name]
            mean += (1 - settings.beta1) * (grad - mean)
            square += (1 - settings.beta2) * (grad * grad - square)
            weight *= 1 - learning_rate * settings.weight_decay
            weight -= learning_rate * (mean / bias1) / (np.sqrt(square / bias2) + settings.epsilon)
        return norm
