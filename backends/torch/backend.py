"""The backend interface on a transformers model."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from backends.batching import PackedBatch, packed_batches
from backends.errors import outdated_features, too_long
from backends.interface import (
    Backend,
    BackendError,
    BackendSettings,
    Completions,
    Floats,
    Ids,
    OnFinished,
    Proxy,
    Sampling,
    Scores,
    Sequences,
    Surrogate,
    token_index,
)
from backends.process import peak_resident
from backends.torch.export import export
from backends.torch.features import Rows, TorchFeatures
from backends.torch.head import Head
from backends.torch.memory import out_of_memory
from backends.torch.model import Policy, load_policy
from backends.torch.optimizer import Optimizer
from backends.torch.rollout import Rollout

Result = TypeVar("Result")

_GRADIENT = Proxy("hidden_exact")  # d logp / dh, up to the temperature


def create(settings: BackendSettings, name: str) -> Backend:
    """Load a model onto ``cpu`` or ``cuda``. Raises BackendError with a line a person can act on."""
    if name == "cuda" and not torch.cuda.is_available():
        raise BackendError(
            f"backend 'cuda' finds no usable NVIDIA GPU (torch {torch.__version__}); choose --backend cpu, "
            "or install a CUDA build of torch and check nvidia-smi"
        )
    return TorchBackend(settings, name)


class TorchBackend:
    """One model on one device. Every public method is that of :class:`backends.interface.Backend`."""

    def __init__(self, settings: BackendSettings, name: str) -> None:
        self.name = name
        self._settings = settings
        self._device = torch.device(name)
        self._policy = load_policy(settings, self._device)
        self._frozen = self._policy.frozen_copy() if settings.keep_reference and not settings.lora else None
        weights = {name: weight for name, weight in self._policy.causal.named_parameters() if weight.requires_grad}
        self._optimizer = Optimizer(weights, settings.optimizer)
        self._budget = settings.micro_batch_tokens  # shrinks where memory does not suffice
        self._room = sys.maxsize  # tokens in the cache of a rollout, at most; shrinks likewise
        self._size = 1, 0  # responses and tokens of the present micro-batch
        self._version = 0  # of the weights: how often they were updated or loaded
        self.parameters = sum(weight.numel() for weight in self._policy.causal.parameters())
        self.trainable = sum(weight.numel() for weight in weights.values())

    # ------------------------------------------------------------------------------- generating

    def rollout(self, prompts: Sequence[Ids], sampling: Sampling, on_finished: OnFinished | None = None) -> Completions:
        self._check(prompts, prompts)
        rollout = Rollout(
            self._policy,
            prompts,
            sampling,
            on_finished,
            slots=self._settings.rollout_batch,
            room=self._room,
            prefill_tokens=self._budget,
            head_chunk=self._settings.head_chunk_tokens,
        )
        try:
            return rollout.run()
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
            raise BackendError(
                f"out of memory on a single response, after {self._settings.rollout_batch} at a time were too many; "
                "lower max_tokens or choose a smaller model"
            ) from error
        finally:
            self._room = rollout.room
            self._free_cache()

    # ---------------------------------------------------------------------------------- scoring

    def score(self, sequences: Sequences, proxy: Proxy | None = None) -> Scores:
        return self._score(self._policy, sequences, proxy)

    def reference(self, sequences: Sequences) -> Floats:
        if not self._settings.keep_reference:
            raise BackendError("this run holds no reference policy; load the model with keep_reference = true")
        source: AbstractContextManager[Policy]
        source = self._policy.without_adapters() if self._frozen is None else nullcontext(self._frozen)
        with source as policy:
            return self._score(policy, sequences, None).logprobs

    def _score(self, policy: Policy, sequences: Sequences, proxy: Proxy | None) -> Scores:
        self._check(sequences.prompts, [sequences.tokens])
        features = self._allocate(sequences, proxy) if proxy else None

        @torch.no_grad()
        def attempt() -> Scores:
            logprobs = np.empty(len(sequences.tokens), dtype=np.float32)
            scores = Scores(logprobs, np.empty_like(logprobs), features)
            head = policy.head(self._settings.head_chunk_tokens)
            for batch in self._micro_batches(sequences):
                self._score_batch(policy, head, batch, sequences, proxy, scores)
            return scores

        return self._within_memory(attempt)

    def _score_batch(
        self,
        policy: Policy,
        head: Head,
        batch: PackedBatch,
        sequences: Sequences,
        proxy: Proxy | None,
        scores: Scores,
    ) -> None:
        """Fill in the tokens of one micro-batch."""
        at = token_index(sequences.starts, batch.rows)
        hidden, predicts, targets = self._hidden(policy, batch)
        hidden = hidden[predicts]
        found = head.statistics(hidden, targets, sequences.temperature or 1.0, entropies=True, proxy=proxy)
        assert found.entropies is not None
        scores.logprobs[at] = found.logprobs.cpu().numpy()
        scores.entropies[at] = found.entropies.cpu().numpy()
        if isinstance(scores.features, TorchFeatures):
            if found.directions is None:
                scores.features.put(at, hidden, scale=-torch.expm1(found.logprobs))
            else:
                scores.features.put(at, found.directions)

    def _allocate(self, sequences: Sequences, proxy: Proxy) -> TorchFeatures:
        policy, settings = self._policy, self._settings
        try:
            return TorchFeatures.allocate(
                len(sequences.tokens),
                policy.head_weight.shape[1],
                policy.dtype,
                self._device,
                (settings.feature_bytes, settings.feature_host_bytes),
                partial(self._recompute, sequences, proxy, self._version),
            )
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
            raise BackendError(
                f"out of memory for the features of {len(sequences.tokens)} tokens, with feature_bytes = "
                f"{settings.feature_bytes} and feature_host_bytes = {settings.feature_host_bytes}; lower the first "
                "where the device is full, the second where the host is"
            ) from error

    def _recompute(
        self, sequences: Sequences, proxy: Proxy, version: int, start: int, stop: int, reduce: Callable[[Rows], Tensor]
    ) -> Tensor:
        """``reduce`` of the rows of the tokens start:stop, scored under weights that must still be the present ones."""
        if version != self._version:
            raise outdated_features()

        @torch.no_grad()
        def attempt() -> Tensor:
            return reduce(self._rows(sequences, proxy, start, stop))

        return self._within_memory(attempt)

    def _rows(self, sequences: Sequences, proxy: Proxy, start: int, stop: int) -> Iterator[tuple[Ids, Tensor]]:
        """Flat positions and unscaled features of the tokens start:stop, a micro-batch at a time."""
        reached = np.flatnonzero((sequences.starts[1:] > start) & (sequences.starts[:-1] < stop))
        head = None if proxy.kind == "output_row" else self._policy.head(self._settings.head_chunk_tokens)
        for batch in self._micro_batches(sequences.select(reached)):
            at = token_index(sequences.starts, reached[batch.rows])
            inside = np.flatnonzero((at >= start) & (at < stop))
            hidden, predicts, targets = self._hidden(self._policy, batch)
            chosen = torch.from_numpy(inside).to(self._device)
            rows = hidden[predicts[chosen]]
            if head is not None:
                temperature = sequences.temperature or 1.0
                found = head.statistics(rows, targets[chosen], temperature, entropies=False, proxy=proxy)
                assert found.directions is not None
                rows = found.directions
            yield at[inside], rows

    # --------------------------------------------------------------------------------- training

    def accumulate(self, sequences: Sequences, surrogate: Surrogate) -> float:
        self._check(sequences.prompts, [sequences.tokens])
        weights = self._optimizer.weights.values()
        before = [None if weight.grad is None else weight.grad.clone() for weight in weights]

        def attempt() -> float:
            head = self._policy.head(self._settings.head_chunk_tokens)
            temperature = sequences.temperature or 1.0
            return sum(self._backward(head, batch, temperature, surrogate) for batch in self._micro_batches(sequences))

        def restart() -> None:
            for weight, gradient in zip(weights, before, strict=True):
                weight.grad = None if gradient is None else gradient.clone()
            if hasattr(surrogate, "restart"):
                surrogate.restart()

        return self._within_memory(attempt, restart)

    def _backward(self, head: Head, batch: PackedBatch, temperature: float, surrogate: Surrogate) -> float:
        """The loss of one micro-batch; its gradient is added to that of the weights."""
        with self._policy.checkpointing():
            hidden, predicts, targets = self._hidden(self._policy, batch)
            fixed = hidden.detach()[predicts]
            found = head.statistics(fixed, targets, temperature, entropies=False, proxy=_GRADIENT)
            loss, slopes = surrogate(found.logprobs.cpu().numpy(), batch.rows)
            if not np.any(slopes):
                return loss
            slope = torch.from_numpy(np.asarray(slopes, dtype=np.float32)).to(self._device)
            matrix = self._policy.head_weight
            if matrix.requires_grad:
                if matrix.grad is None:
                    matrix.grad = torch.zeros_like(matrix)
                head.add_weight_gradient(matrix.grad, fixed, targets, found.logsumexp, slope, temperature)
            assert found.directions is not None
            gradient = _add_at(hidden.shape, predicts, found.directions.mul_((slope / temperature)[:, None]))
            hidden.backward(gradient.to(hidden.dtype))
        return loss

    def step(self, learning_rate: float, scale: float = 1.0) -> float:
        self._version += 1
        try:
            return self._optimizer.step(learning_rate, scale)
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
            raise BackendError(
                "out of memory while the weights were updated, some of which have moved; go on from the last "
                'checkpoint with update.offload = true or update.moments = "int8", or train adapters (lora)'
            ) from error
        finally:
            self._free_cache()

    # ----------------------------------------------------------------------------------- keeping

    def save(self, folder: Path) -> None:
        self._optimizer.save(folder)

    def load(self, folder: Path) -> None:
        self._version += 1
        self._optimizer.load(folder)

    def export(self, folder: Path) -> None:
        export(self._policy, folder)

    def all_sum(self, array: NDArray[np.float64]) -> NDArray[np.float64]:
        return array

    def peak_memory(self) -> int:
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        return peak_resident()

    def close(self) -> None:
        for part in ("_policy", "_frozen", "_optimizer"):
            self.__dict__.pop(part, None)
        self._free_cache()

    # ----------------------------------------------------------------------------------- details

    def _hidden(self, policy: Policy, batch: PackedBatch) -> tuple[Tensor, Tensor, Tensor]:
        """A micro-batch's hidden states [T, H], which of them predict response tokens [n], and those tokens [n]."""
        with policy.compute():
            hidden = policy.packed_hidden(batch)
        predicts, targets = (torch.from_numpy(array).to(self._device) for array in (batch.predicts, batch.targets))
        return hidden, predicts, targets

    def _micro_batches(self, sequences: Sequences) -> Iterator[PackedBatch]:
        for batch in packed_batches(sequences, self._budget):
            self._size = len(batch.rows), len(batch.ids)
            yield batch

    def _within_memory(self, attempt: Callable[[], Result], restart: Callable[[], None] = lambda: None) -> Result:
        """``attempt()``; where memory runs out, once more from ``restart`` on with half the micro-batch."""
        while True:
            try:
                return attempt()
            except (RuntimeError, MemoryError) as error:
                if not out_of_memory(error):
                    raise
                responses, tokens = self._size
                if responses == 1:
                    raise too_long(tokens + 1) from error  # the last token is not in the row
                self._budget = tokens // 2
            finally:
                self._free_cache()
            restart()  # here, not above: an exception being handled keeps the failed attempt's tensors alive

    def _check(self, prompts: Sequence[Ids], ids: Sequence[Ids]) -> None:
        """Raise ValueError for an empty prompt or an id the model does not have."""
        for row, prompt in enumerate(prompts):
            if len(prompt) == 0:
                raise ValueError(f"prompt {row} is empty; a prompt has at least one token")
        size = self._policy.vocabulary
        for array in (*{id(prompt): prompt for prompt in prompts}.values(), *ids):
            if len(array) and not (array.min() >= 0 and array.max() < size):
                raise ValueError(
                    f"token id {int(array.max() if array.max() >= size else array.min())} is not in the model's "
                    f"vocabulary of {size}; the tokenizer does not belong to this model"
                )

    def _free_cache(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.empty_cache()


def _add_at(shape: Sequence[int], at: Tensor, rows: Tensor) -> Tensor:
    """Zeros of a shape [T, H] with rows [n, H] added at indices [n]: a prompt's end predicts several tokens.

    Each device has one way that adds in a fixed order: PyTorch's other one uses atomic sums.
    """
    total = rows.new_zeros(shape)
    if rows.device.type == "cuda":
        return total.index_put_((at,), rows, accumulate=True)
    return total.index_add_(0, at, rows)
