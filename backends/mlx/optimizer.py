"""AdamW on float32 master weights, step for step that of torch.optim.AdamW."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from safetensors.numpy import save_file

from backends.collective import SOLO, from_first
from backends.interface import BackendError, Collective, FileDigests, WriteState
from backends.local_engine import clip_factor
from backends.mlx.arrays import NamedArrays
from backends.mlx.collective import MlxCollective
from backends.mlx.model import nonfinite
from backends.settings import Optimizer
from backends.weights import refuse_nonfinite

WEIGHTS, MOMENTS = "weights.safetensors", "optimizer.safetensors"  # the files of the training state
TOGETHER = 2**26  # bytes of weights that are updated at a time; each evaluation waits for the device


class MlxAdamW:
    """Master weights, moments and the accumulated gradient by parameter name, all float32.

    Not ``mlx.optimizers.AdamW``: that computes 1 − β^t in float32, which at β = 0.999 puts the
    first update 3e-5 off, and stores what it updates in the type of the compute.
    Every rank holds all of it and gets the same gradient, that of all ranks.
    Raises BackendError for moments that are to be stored otherwise.
    """

    def __init__(
        self,
        weights: Mapping[str, mx.array],
        settings: Optimizer,
        collective: Collective = SOLO,
    ) -> None:
        if settings.offload:
            raise BackendError(
                "update.offload saves nothing with the mlx backend: on a Mac the GPU and its host share one memory; "
                "set it to false"
            )
        if settings.moments != "float32":
            raise BackendError(
                f'update.moments = "{settings.moments}": the mlx backend keeps moments in float32; set that, and for '
                "less memory train adapters with [model.lora]"
            )
        self.settings = settings
        self.collective = collective
        self.weights = {name: weight.astype(mx.float32) for name, weight in weights.items()}
        self.first = {name: mx.zeros_like(weight) for name, weight in self.weights.items()}  # not yet in memory
        self.second = {name: mx.zeros_like(weight) for name, weight in self.weights.items()}
        self.steps = 0
        self.gradient: NamedArrays = {}

    def add(self, gradient: Mapping[str, mx.array]) -> None:
        """Add to the accumulated gradient."""
        for name, part in gradient.items():
            part = part.astype(mx.float32)
            self.gradient[name] = self.gradient[name] + part if name in self.gradient else part
        mx.eval(self.gradient)

    def keep_gradient(self) -> Callable[[], None]:
        """Copy the present gradient; the result restores it as often as it is called."""
        before = dict(self.gradient)

        def restore() -> None:
            self.gradient = dict(before)

        return restore

    def step(self, learning_rate: float, scale: float) -> float:
        """Sum the gradient over ranks, scale, clip and apply it, then drop it. Returns its norm before clipping.

        Where the norm is not finite, or no rank has a gradient, nothing is updated.
        """
        gradient, self.gradient = self.gradient, {}
        if self.collective.size > 1:
            assert isinstance(self.collective, MlxCollective)  # what backends.mlx.join gives
            gradient = self.collective.sum_gradient(gradient, self.weights)
        if not gradient:
            return 0.0
        squares = mx.stack([mx.sum(mx.square(part)) for part in gradient.values()])
        # Of the first rank: sums of the same numbers may differ in their last bit between generations of GPUs.
        total = from_first(self.collective, np.array(squares, dtype=np.float64).sum())
        norm = abs(scale) * math.sqrt(total)
        if not math.isfinite(norm):
            return norm
        factor = scale * clip_factor(norm, self.settings.max_grad_norm)
        self.steps += 1
        pending: list[str] = []
        for name in list(gradient):
            self._update(name, factor * gradient.pop(name), learning_rate)
            pending.append(name)
            if sum(self.weights[each].nbytes for each in pending) >= TOGETHER:
                self._evaluate(pending)
                pending = []
        self._evaluate(pending)
        return norm

    def _evaluate(self, names: list[str]) -> None:
        """Compute some parameters before the next: what lies between exists for them alone."""
        mx.eval([arrays[name] for name in names for arrays in (self.first, self.second, self.weights)])

    def _update(self, name: str, gradient: mx.array, learning_rate: float) -> None:
        beta1, beta2 = self.settings.beta1, self.settings.beta2
        first = beta1 * self.first[name] + (1 - beta1) * gradient
        second = beta2 * self.second[name] + (1 - beta2) * mx.square(gradient)
        denominator = mx.sqrt(second) / math.sqrt(1 - beta2**self.steps) + self.settings.epsilon
        decayed = (1 - learning_rate * self.settings.weight_decay) * self.weights[name]
        weight = decayed - (learning_rate / (1 - beta1**self.steps)) * (first / denominator)
        self.first[name], self.second[name], self.weights[name] = first, second, weight

    def save(self, folder: Path) -> None:
        """Write weights, moments and the number of steps into ``folder``; the first rank does, as all have the same."""
        if self.collective.rank:
            return
        mx.save_safetensors(str(folder / WEIGHTS), self.weights)
        mx.save_safetensors(str(folder / MOMENTS), self._moments(), {"steps": str(self.steps)})

    def _moments(self) -> NamedArrays:
        found = {f"first.{name}": value for name, value in self.first.items()}
        return found | {f"second.{name}": value for name, value in self.second.items()}

    def copy_state(self, room: int) -> WriteState | None:
        """Copy what ``save`` writes, if it fits into ``room`` bytes, to numpy: MLX should compute in one thread."""
        if self.collective.rank:
            return lambda folder: {}
        moments, steps = self._moments(), str(self.steps)
        if sum(value.nbytes for arrays in (self.weights, moments) for value in arrays.values()) > room:
            return None
        copies = [{name: np.array(value) for name, value in arrays.items()} for arrays in (self.weights, moments)]

        def write(folder: Path) -> FileDigests:
            save_file(copies[0], folder / WEIGHTS)
            save_file(copies[1], folder / MOMENTS, {"steps": steps})
            return {}

        return write

    def load(self, folder: Path) -> None:
        """Restore what ``save`` wrote, bit for bit. Raises BackendError where it does not fit.

        The first rank reads it and sends it to the others, who may be machines that do not share its disk.
        """
        if self.collective.rank == 0:
            self._read(folder)
        self.steps = from_first(self.collective, self.steps)
        if self.collective.size > 1:
            assert isinstance(self.collective, MlxCollective)
            self.weights, self.first, self.second = (
                self.collective.from_first(arrays) for arrays in (self.weights, self.first, self.second)
            )
        self.gradient = {}

    def _read(self, folder: Path) -> None:
        """Restore weights, moments and the number of steps from files."""
        try:
            weights, _ = _load(folder / WEIGHTS)
            moments, metadata = _load(folder / MOMENTS)
        except (OSError, RuntimeError) as error:
            reason = str(error).splitlines()[0]
            raise BackendError(f"cannot read the training state in {folder}: {reason}") from error
        for name in sorted(self.weights.keys() | weights.keys()):
            if name not in weights or name not in self.weights or weights[name].shape != self.weights[name].shape:
                raise BackendError(
                    f"the training state in {folder} is of another model or other adapters: '{name}' does not fit; "
                    "resume with the [model] settings it was saved with"
                )
        refuse_nonfinite(folder, nonfinite(weights))
        self.weights = {name: weights[name] for name in self.weights}  # in the order that ranks agree on
        self.first = {name: moments[f"first.{name}"] for name in self.weights}
        self.second = {name: moments[f"second.{name}"] for name in self.weights}
        self.steps = int(metadata["steps"])


def _load(path: Path) -> tuple[NamedArrays, dict[str, str]]:
    """Arrays and metadata of a safetensors file, read now: the file may be replaced later."""
    loaded: Any = mx.load(str(path), return_metadata=True)
    arrays, metadata = loaded
    mx.eval(arrays)
    return arrays, metadata
