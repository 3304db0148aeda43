"""AdamW on float32 weights or the masters of bfloat16 weights, and the files of both and of moments."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.optim.adamw import adamw

from backends.interface import BackendError, FileDigests, WriteState
from backends.local_engine import clip_factor
from backends.settings import Optimizer
from backends.torch import state_file
from backends.torch.head import dense_gradient
from backends.torch.moments import MOMENTS, AdamState, Piece
from backends.torch.sharding import DataParallel, local
from backends.torch.state_file import StoredState, TensorRows
from backends.weights import refuse_nonfinite


class TorchAdamW:
    """AdamW with a global norm clip. ``weights`` are the trained weights by name, whole or this rank's rows."""

    def __init__(self, weights: dict[str, nn.Parameter], settings: Optimizer, parallel: DataParallel) -> None:
        self.weights = weights
        self._settings = settings
        self._parallel = parallel
        self._steps = 0

    @cached_property
    def state(self) -> AdamState:
        """Allocated on first use: an engine that only samples or scores needs no memory for it."""
        return AdamState({name: local(weight) for name, weight in self.weights.items()}, self._settings)

    @property
    def _has_masters(self) -> bool:
        return any(weight.dtype == torch.bfloat16 for weight in self.weights.values())

    def samples(self, count: int) -> Tensor:
        """The first ``count`` numbers of every weight that updates change, float32 on the host."""
        masters = self.state.masters() if "state" in self.__dict__ else {}
        first = [masters.get(name, [local(weight).reshape(-1)])[0] for name, weight in self.weights.items()]
        with torch.no_grad():
            return torch.cat([numbers[:count].float().cpu() for numbers in first])

    def keep_gradient(self) -> Callable[[], None]:
        """Copy the present gradient; the result restores it as often as it is called."""
        weights = self.weights.values()
        before = [None if weight.grad is None else weight.grad.clone() for weight in weights]

        def restore() -> None:
            for weight, gradient in zip(weights, before, strict=True):
                weight.grad = None if gradient is None else gradient.clone()

        return restore

    def step(self, learning_rate: float, scale: float) -> float:
        """One update with ``scale`` times the gradient; returns that gradient's norm before clipping.

        Updates nothing if the norm is not finite. A missing gradient counts as zero.
        """
        for weight in self.weights.values():
            dense_gradient(weight)
        gradients = {name: local(weight.grad) for name, weight in self.weights.items() if weight.grad is not None}
        self._parallel.sum_gradients(gradients.values())
        norm = abs(scale) * self._parallel.norm(gradients.values())
        if math.isfinite(norm):
            factor = scale * clip_factor(norm, self._settings.max_grad_norm)
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

        def apply(pieces: list[Piece], weights: list[Tensor], moments: Tensor) -> None:
            steps = torch.full((len(pieces),), float(self._steps), device=moments.device)
            adamw(
                weights,
                [gradients[piece.name].reshape(-1)[piece.start : piece.stop] for piece in pieces],
                [moments[0, piece.inside] for piece in pieces],
                [moments[1, piece.inside] for piece in pieces],
                [],
                list(steps),  # adamw increments it, one per tensor
                fused=True,
                amsgrad=False,
                beta1=settings.beta1,
                beta2=settings.beta2,
                lr=learning_rate,
                weight_decay=settings.weight_decay,
                eps=settings.epsilon,
                maximize=False,
            )

        self.state.update(apply)
        self._steps += 1

    def save(self, folder: Path) -> FileDigests:
        """Write weights and moments as two safetensors files; if all ranks hold the same, the first one does."""
        return self._write(self._states(), folder)

    def copy_state(self, room: int) -> WriteState | None:
        """Copy what ``save`` writes to the host, if it fits into ``room`` bytes."""
        states = self._states()
        if sum(entry.nbytes for entries in states.values() for entry in entries.values()) > room:
            return None
        copied = {stem: {name: entry.copy() for name, entry in entries.items()} for stem, entries in states.items()}
        return partial(self._write, copied)

    def _states(self) -> dict[str, dict[str, TensorRows]]:
        """The arrays that this rank saves, by file and name; ranks beyond the first copy of the weights save none."""
        if self._parallel.collective.rank >= self._parallel.shards:
            return {}
        step = torch.tensor(float(self._steps))
        moments = {**self._moment_entries(step), "step": state_file.whole(step)}
        return {"weights": self._weight_entries(), "moments": moments}

    def _write(self, states: Mapping[str, Mapping[str, TensorRows]], folder: Path) -> FileDigests:
        place = self._parallel.collective.rank, self._parallel.shards
        files = {stem: state_file.file_of(folder, stem, *place) for stem in states}
        return {files[stem].name: state_file.write(files[stem], entries) for stem, entries in states.items()}

    def load(self, folder: Path) -> None:
        """Restore what any number of ranks saved, tensor by tensor; changes nothing if the files do not fit."""
        try:
            with state_file.stored(folder, "weights") as values, state_file.stored(folder, "moments") as state:
                values.check(self._weight_entries())
                step = state.scalar("step") if "step" in state.shapes else torch.tensor(0.0)
                entries = self._moment_entries(step)
                self._check_type(state, entries)
                state.check({**entries, "step": state_file.whole(step)})
                if step == 0:
                    self.__dict__.pop("state", None)  # gradients of steps that are undone
                values.read(self._weight_entries())
                state.read(entries)
                if self._has_masters:
                    self.state.round_weights()
                self._steps = int(step)
        except (SafetensorError, OSError) as error:
            raise BackendError(
                f"checkpoint in {folder} is missing or damaged ({error}); resume from another"
            ) from error
        broken = [name for name, weight in self.weights.items() if not local(weight).isfinite().all()]
        refuse_nonfinite(folder, broken)
        for weight in self.weights.values():
            weight.grad = None

    def _weight_entries(self) -> dict[str, TensorRows]:
        masters = self.state.masters() if self._has_masters else {}
        return {
            name: TensorRows(
                tuple(weight.shape),
                masters.get(name) or [local(weight.detach()).view(-1)],
                self._parallel.first_row(weight),
            )
            for name, weight in self.weights.items()
        }

    def _moment_entries(self, step: Tensor) -> dict[str, TensorRows]:
        """The moments to save; empty before the first step."""
        if step == 0:
            return {}
        found = self.state.moments()
        if not self._parallel.sharded:
            return found
        return {  # float32 only: other storage cannot be split by rows
            f"{moment}.{name}": TensorRows(
                tuple(weight.shape),
                found[f"{moment}.{name}"].parts if f"{moment}.{name}" in found else [],
                self._parallel.first_row(weight),
            )
            for name, weight in self.weights.items()
            for moment in MOMENTS
        }

    def _check_type(self, stored: StoredState, entries: Mapping[str, TensorRows]) -> None:
        """Refuse moments stored in another type than this run uses."""
        there, here = (any(name.endswith(".codes") for name in names) for names in (stored.shapes, entries))
        if there != here:
            names = {True: "int8", False: "float32"}
            raise BackendError(
                f'{stored.label} holds moments in {names[there]}, but update.moments is "{names[here]}"; '
                f'resume with update.moments = "{names[there]}"'
            )
