"""AdamW on float32 weights, and the files that weights and moments are kept in."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.optim.adamw import adamw

from backends.interface import BackendError, OptimizerSettings
from backends.torch import state_file
from backends.torch.moments import Moments, Piece
from backends.torch.state_file import Entry


class Optimizer:
    """AdamW with a global norm clip. ``weights`` are the trained ones by name."""

    def __init__(self, weights: dict[str, nn.Parameter], settings: OptimizerSettings) -> None:
        self.weights = weights
        self._settings = settings
        self._steps = 0

    @cached_property
    def moments(self) -> Moments:
        """Made when they are first needed: who only draws or scores has no use for their memory."""
        return Moments(self.weights, self._settings)

    def step(self, learning_rate: float, scale: float) -> float:
        """One update from ``scale`` times the gradient; returns that gradient's norm, before clipping.

        Nothing is updated where the norm is not finite. A weight without a gradient has a gradient of zero.
        """
        for weight in self.weights.values():
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
        gradients = {name: weight.grad for name, weight in self.weights.items() if weight.grad is not None}
        norm = abs(scale) * float(nn.utils.get_total_norm(list(gradients.values())))
        if math.isfinite(norm):
            factor = scale * self._settings.clipping(norm)
            if factor != 1:
                for gradient in gradients.values():
                    gradient.mul_(factor)
            self._update(gradients, learning_rate)
        for weight in self.weights.values():
            weight.grad = None
        return norm

    @torch.no_grad()
    def _update(self, gradients: Mapping[str, Tensor], learning_rate: float) -> None:
        settings = self._settings

        def apply(pieces: list[Piece], moments: Tensor) -> None:
            steps = torch.full((len(pieces),), float(self._steps), device=moments.device)
            adamw(
                [self.weights[piece.name].view(-1)[piece.start : piece.stop] for piece in pieces],
                [gradients[piece.name].reshape(-1)[piece.start : piece.stop] for piece in pieces],
                [moments[0, piece.inside] for piece in pieces],
                [moments[1, piece.inside] for piece in pieces],
                [],
                list(steps),  # which adamw counts up itself, one for each tensor
                fused=True,
                amsgrad=False,
                beta1=settings.beta1,
                beta2=settings.beta2,
                lr=learning_rate,
                weight_decay=settings.weight_decay,
                eps=settings.epsilon,
                maximize=False,
            )

        self.moments.update(apply)
        self._steps += 1

    def save(self, folder: Path) -> None:
        """Write weights and moments as two safetensors files."""
        state_file.write(folder / "weights.safetensors", self._weight_entries())
        step = torch.tensor(float(self._steps))
        state_file.write(folder / "moments.safetensors", {**self._moment_entries(step), "step": state_file.whole(step)})

    def load(self, folder: Path) -> None:
        """Restore what ``save`` wrote, tensor by tensor; nothing changes if the files do not fit."""
        weights, moments = folder / "weights.safetensors", folder / "moments.safetensors"
        try:
            with safe_open(weights, "pt") as values, safe_open(moments, "pt") as state:
                state_file.check(weights, values, self._weight_entries())
                step = state.get_tensor("step")
                entries = self._moment_entries(step)
                self._check_type(moments, state, entries)
                state_file.check(moments, state, {**entries, "step": state_file.whole(step)})
                state_file.read(values, self._weight_entries())
                if step == 0:
                    self.__dict__.pop("moments", None)  # those of steps that are undone
                state_file.read(state, entries)
                self._steps = int(step)
        except (SafetensorError, OSError) as error:
            raise BackendError(
                f"checkpoint in {folder} is missing or damaged ({error}); resume from another"
            ) from error
        for weight in self.weights.values():
            weight.grad = None

    def _weight_entries(self) -> dict[str, Entry]:
        return {name: Entry(tuple(w.shape), [w.detach().view(-1)]) for name, w in self.weights.items()}

    def _moment_entries(self, step: Tensor) -> dict[str, Entry]:
        """Before the first step there are none."""
        return self.moments.entries() if step > 0 else {}

    def _check_type(self, file: Path, stored: safe_open, entries: Mapping[str, Entry]) -> None:
        """Refuse moments of another type than this run's, which are the right ones of the right model."""
        there, here = (any(name.endswith(".codes") for name in names) for names in (stored.keys(), entries))
        if there != here:
            names = {True: "int8", False: "float32"}
            raise BackendError(
                f'{file} holds moments in {names[there]}, but update.moments is "{names[here]}"; '
                f'resume with update.moments = "{names[there]}"'
            )
