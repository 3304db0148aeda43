"""AdamW on float32 weights, and the files that weights and moments are kept in."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from backends.interface import BackendError, OptimizerSettings

_MOMENTS = ("exp_avg", "exp_avg_sq")


class Optimizer:
    """AdamW with a global norm clip. ``weights`` are the trained ones by name."""

    def __init__(self, weights: dict[str, nn.Parameter], settings: OptimizerSettings) -> None:
        self.weights = weights
        self._settings = settings
        self._adamw = torch.optim.AdamW(
            weights.values(),
            lr=0.0,  # given with every step
            betas=(settings.beta1, settings.beta2),
            eps=settings.epsilon,
            weight_decay=settings.weight_decay,
            fused=True,
        )

    def step(self, learning_rate: float, scale: float) -> float:
        """One update from ``scale`` times the gradient; returns that gradient's norm, before clipping.

        Nothing is updated where the norm is not finite. A weight without a gradient has a gradient of zero.
        """
        for weight in self.weights.values():
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
        gradients = [weight.grad for weight in self.weights.values() if weight.grad is not None]
        norm = abs(scale) * float(nn.utils.get_total_norm(gradients))
        if math.isfinite(norm):
            factor = scale * self._settings.clipping(norm)
            if factor != 1:
                for gradient in gradients:
                    gradient.mul_(factor)
            self._adamw.param_groups[0]["lr"] = learning_rate
            self._adamw.step()
        self._adamw.zero_grad(set_to_none=True)
        return norm

    def save(self, folder: Path) -> None:
        """Write weights and moments, float32, as two safetensors files."""
        save_file({name: weight.detach() for name, weight in self.weights.items()}, folder / "weights.safetensors")
        state = {
            f"{moment}.{name}": self._adamw.state[weight][moment]
            for name, weight in self.weights.items()
            for moment in _MOMENTS
            if weight in self._adamw.state
        }
        steps = [self._adamw.state[weight]["step"] for weight in self.weights.values() if weight in self._adamw.state]
        state["step"] = (steps or [torch.zeros(())])[0].cpu()
        save_file(state, folder / "moments.safetensors")

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        """Restore what ``save`` wrote, tensor by tensor; nothing changes if the files do not fit."""
        weights, moments = folder / "weights.safetensors", folder / "moments.safetensors"
        try:
            with safe_open(weights, "pt") as values, safe_open(moments, "pt") as state:
                _check(weights, values, self.weights)
                step = state.get_tensor("step")
                expected = {f"{moment}.{name}": w for name, w in self.weights.items() for moment in _MOMENTS}
                _check(moments, state, {**(expected if step > 0 else {}), "step": step})
                for name, weight in self.weights.items():
                    weight.copy_(values.get_tensor(name))
                self._restore_moments(step, state)
                self._adamw.zero_grad(set_to_none=True)
        except (SafetensorError, OSError) as error:
            raise BackendError(
                f"checkpoint in {folder} is missing or damaged ({error}); resume from another"
            ) from error

    def _restore_moments(self, step: Tensor, state: safe_open) -> None:
        self._adamw.state.clear()
        if step == 0:
            return
        for name, weight in self.weights.items():
            self._adamw.state[weight] = {"step": step.clone().to(weight.device)}
            for moment in _MOMENTS:
                self._adamw.state[weight][moment] = state.get_tensor(f"{moment}.{name}").to(weight.device)


def _check(file: Path, stored: safe_open, expected: Mapping[str, Tensor]) -> None:
    """Refuse a file whose names or shapes are not the expected ones."""
    differing = set(stored.keys()) ^ set(expected)
    differing |= {
        name
        for name, tensor in expected.items()
        if name not in differing and list(tensor.shape) != stored.get_slice(name).get_shape()
    }
    if differing:
        raise BackendError(
            f"{file} belongs to another model or other adapters: {len(differing)} tensors differ, "
            f"{min(differing)} among them; resume with the settings it was written with"
        )
