"""The backend interface on an mlx-lm model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.utils import get_total_parameters
from numpy.typing import NDArray

from backends.batching import PaddedBatch, micro_batches, too_long
from backends.interface import (
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
from backends.mlx import adapters
from backends.mlx.checkpointing import checkpointed
from backends.mlx.export import export
from backends.mlx.features import FeatureStore, MlxFeatures
from backends.mlx.head import chunks, entropy, logprobs, pick, proxies, pullback
from backends.mlx.memory import MemoryLimits, peak
from backends.mlx.model import load
from backends.mlx.optimizer import AdamW
from backends.mlx.rollout import Rollout

BUCKET = 32  # on Metal widths are multiples of this: buffers of few sizes are reused, of many they pile up


class MlxBackend:
    """Rollout, log-probabilities and gradients of one mlx-lm model.

    The model computes in ``settings.dtype``; the optimizer holds what is trained in float32, and
    after a step the model gets the rounded copy.
    """

    def __init__(self, settings: BackendSettings, name: str) -> None:
        self.name = name
        self.settings = settings
        self.dtype = getattr(mx, settings.dtype)
        self.policy = load(settings.model)
        self.model = self.policy.model
        self.parameters = int(get_total_parameters(self.model))
        if settings.lora:
            self.model.set_dtype(self.dtype)
            adapters.attach(self.policy, settings.lora, settings.seed)
        elif self.policy.quantised:
            raise BackendError(
                f"the weights of {settings.model} are quantised and cannot be trained themselves; "
                "add [model.lora] to train adapters on them"
            )
        else:
            self.model.unfreeze()
        self.optimizer = AdamW(dict(tree_flatten(self.model.trainable_parameters())), settings.optimizer)
        self.trainable = sum(weight.size for weight in self.optimizer.weights.values())
        self._publish()
        # MLX arrays are values: holding on to the first ones costs memory only as training replaces them.
        self.loaded = self.model.parameters() if settings.keep_reference else None
        self.budget = settings.micro_batch_tokens  # shrinks where memory does not suffice
        self.shape: tuple[int, ...] = (1, 0)  # rows and width of the present micro-batch
        self.limits = MemoryLimits()  # last: where loading fails, nobody would restore them

    def rollout(self, prompts: Sequence[Ids], sampling: Sampling, on_finished: OnFinished | None = None) -> Completions:
        """Draw responses with mlx-lm's batch generator."""
        try:
            return Rollout(self.model, sampling, self.settings.rollout_batch).run(prompts, on_finished)
        finally:
            mx.clear_cache()

    def score(self, sequences: Sequences, proxy: Proxy | None = None) -> Scores:
        """One forward: log-probabilities, entropies and, with a proxy, features."""
        count = len(sequences.tokens)
        logps, entropies = np.zeros(count, np.float32), np.zeros(count, np.float32)
        head, temperature = self.policy.head(), sequences.temperature or 1.0
        store = FeatureStore(head.width, self.dtype, self.settings.feature_bytes)
        for batch in micro_batches(sequences, self.budget):
            positions = token_index(sequences.starts, batch.rows)
            hidden = self._hidden(batch).astype(self.dtype)
            mx.eval(hidden)  # what the trunk needed is freed before the first logits
            for part in chunks(len(positions), self.settings.head_chunk_tokens):
                targets = mx.array(batch.targets[part])
                log_softmax = head.log_softmax(hidden[part], temperature)
                logp, spread = pick(log_softmax, targets), entropy(log_softmax)
                if proxy:
                    store.append(proxies(head, hidden[part], targets, log_softmax, proxy), positions[part])
                logps[positions[part]], entropies[positions[part]] = np.array(logp), np.array(spread)
        return Scores(logps, entropies, MlxFeatures(store, 0, count) if proxy else None)

    def reference(self, sequences: Sequences) -> Floats:
        """Log-probabilities of the policy as it was loaded: without adapters, or of the weights kept then."""
        if self.loaded is None:
            raise BackendError("the reference policy was not kept; create the backend with keep_reference")
        current = self.model.parameters()
        self.model.update(self.loaded)
        try:
            return self.score(sequences).logprobs
        finally:
            self.model.update(current)

    def accumulate(self, sequences: Sequences, surrogate: Surrogate) -> float:
        """Forward and backward over all sequences; adds to the gradient. Returns the loss.

        Where memory runs out, it starts over with half the micro-batch.
        """
        before = dict(self.optimizer.gradient)
        while True:
            try:
                return self._attempt(sequences, surrogate)
            except RuntimeError as error:
                if "allocate" not in str(error):  # MLX's allocators have no error of their own
                    raise
                rows, width = self.shape
                if rows == 1:
                    raise too_long(width) from error
                self.budget = rows * width // 2
            self.optimizer.gradient = dict(before)
            mx.clear_cache()
            if hasattr(surrogate, "restart"):
                surrogate.restart()

    def _attempt(self, sequences: Sequences, surrogate: Surrogate) -> float:
        layers = self.policy.text.layers if self.settings.gradient_checkpointing else []
        temperature = sequences.temperature or 1.0
        with checkpointed(layers):
            loss = 0.0
            for batch in micro_batches(sequences, self.budget):
                self.shape = batch.ids.shape
                loss += self._accumulate(batch, surrogate, temperature)
        return loss

    def step(self, learning_rate: float, scale: float = 1.0) -> float:
        """Update the master weights and hand the model its copy. Returns the gradient's norm."""
        norm = self.optimizer.step(learning_rate, scale)
        self._publish()
        mx.clear_cache()
        return norm

    def save(self, folder: Path) -> None:
        """Write master weights (or adapters), moments and step count."""
        self.optimizer.save(folder)

    def load(self, folder: Path) -> None:
        """Restore what ``save`` wrote, bit for bit."""
        self.optimizer.load(folder)
        self._publish()

    def export(self, folder: Path) -> None:
        """Write a model folder, see ``export.export``; with adapters also ``adapter/`` in mlx-lm's format."""
        export(self.policy, folder, self.settings.dtype)
        if self.settings.lora:
            adapters.save(self.policy, self.settings.lora, folder / "adapter")

    def all_sum(self, array: NDArray[np.float64]) -> NDArray[np.float64]:
        """The array itself: there is one process."""
        return array

    def peak_memory(self) -> int:
        """Bytes: the most this process has used so far."""
        return peak()

    def close(self) -> None:
        """Drop the model and set MLX's memory limits to what they were. Closing twice is harmless."""
        for held in ("policy", "model", "optimizer", "loaded"):
            self.__dict__.pop(held, None)
        mx.clear_cache()
        self.limits.restore()

    def _publish(self) -> None:
        """Give the model the master weights: adapters in float32, others in the type of the compute."""
        dtype = mx.float32 if self.settings.lora else self.dtype
        weights = [(name, weight.astype(dtype)) for name, weight in self.optimizer.weights.items()]
        self.model.update(tree_unflatten(weights))
        mx.eval(self.model.parameters())

    def _hidden(self, batch: PaddedBatch) -> mx.array:
        """Hidden states of the positions that predict a response token, float32 [n, H]."""
        rows, width = batch.ids.shape
        wide = -width % BUCKET if mx.metal.is_available() else 0
        ids, predicts = (np.pad(array, ((0, 0), (0, wide))) for array in (batch.ids, batch.predicts))
        hidden = self.policy.trunk(mx.array(ids))
        return hidden.reshape(rows * (width + wide), -1)[mx.array(np.flatnonzero(predicts))].astype(mx.float32)

    def _accumulate(self, batch: PaddedBatch, surrogate: Surrogate, temperature: float) -> float:
        """The loss of one micro-batch; its gradient goes to the optimizer.

        MLX differentiates the trunk alone, as the sum of its hidden states weighted by what the head
        pulls back to them. The head, which needs their values for that, gets them from inside the
        trace. Evaluated there, though, they keep every intermediate array of the trunk, those of
        checkpointed layers included: with checkpointing they come from a forward ahead of the trace.
        """
        head = self.policy.head()  # with arrays from before the trace, so that nothing of the head is kept by it
        trained = self.model.trainable_parameters()
        targets, size = mx.array(batch.targets), self.settings.head_chunk_tokens
        loss, gradient = 0.0, {}

        def at_head(hidden: mx.array) -> mx.array:
            nonlocal loss
            known = mx.array(np.array(hidden)).astype(self.dtype)
            loss, dlogp = surrogate(logprobs(head, known, targets, temperature, size), batch.rows)
            slope = mx.array(dlogp.astype(np.float32))
            whole = head.name in self.optimizer.weights
            dhidden, dweight = pullback(head, known, targets, slope, temperature, size, weight=whole)
            if dweight is not None:
                gradient[head.name] = dweight
            return dhidden

        ahead = at_head(self._hidden(batch)) if self.settings.gradient_checkpointing else None

        def objective(parameters: dict[str, Any]) -> mx.array:
            self.model.update(parameters)
            hidden = self._hidden(batch)
            return mx.sum(hidden * (at_head(hidden) if ahead is None else ahead))

        try:
            self.optimizer.add(dict(tree_flatten(mx.grad(objective)(trained))))
        finally:
            self.model.update(trained)
        self.optimizer.add(gradient)
        return float(loss)
