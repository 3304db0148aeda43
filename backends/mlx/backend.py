"""The backend interface on an mlx-lm model."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.utils import get_total_parameters

from backends.batching import SharedPromptBatch, micro_batches, response_chunks, shared_batches
from backends.collective import SOLO
from backends.interface import (
    BackendError,
    Collective,
    Completions,
    FileDigests,
    Floats,
    Ids,
    Objective,
    OnFinished,
    Proxy,
    RolloutRequest,
    Scores,
    Sequences,
    WriteState,
    token_index,
)
from backends.local_engine import LocalEngine
from backends.mlx import adapters, attention, recurrence
from backends.mlx.attention import CausalAttention
from backends.mlx.checkpointing import checkpointed, differentiable
from backends.mlx.export import export
from backends.mlx.features import MlxFeatureCollector, MlxFeatures, MlxFeatureStore
from backends.mlx.generator_check import check_generator
from backends.mlx.head import MlxHead, chunks, computed_ahead, entropy, loss_scale, pick, proxies, pullback
from backends.mlx.layerwise import LayerwiseGradient, is_chain
from backends.mlx.memory import MlxMemoryLimits, exhausted, peak
from backends.mlx.model import load
from backends.mlx.optimizer import MlxAdamW
from backends.mlx.predicting_positions import MlxMicroBatch, padded_width, predicting_positions
from backends.mlx.recurrence import DeltaRule
from backends.mlx.rollout import MlxRollout
from backends.mlx.shared_prompts import call_trunk, can_share_prompts
from backends.settings import BackendSettings

HeadChunk = tuple[Ids, mx.array, mx.array]  # flat positions [n], hidden states [n, H], token ids [n]

WORTH_SHARING = 0.9  # of the tokens that sharing prompts must leave: masks and the copies of keys cost something, too


class MlxEngine(LocalEngine):
    """Rollout, log-probabilities and gradients of one mlx-lm model; see ``backends.interface.Engine``.

    The model computes in ``settings.model.dtype``; the optimizer holds what is trained in float32, and
    after a step the model gets the rounded copy.
    """

    def __init__(self, settings: BackendSettings, name: str, collective: Collective = SOLO) -> None:
        super().__init__(settings, name, exhausted, mx.clear_cache)
        self._rollout_batch = settings.rollout_batch  # shrinks where memory does not suffice
        if settings.parallel.sharding not in ("auto", "none") and collective.size > 1:
            raise BackendError(
                f'parallel.sharding = "{settings.parallel.sharding}": the mlx backend holds the whole model on every '
                "Mac; "
                'set it to "none", and where that does not fit train adapters with [model.lora]'
            )
        self.collective = collective
        self.dtype = getattr(mx, settings.model.dtype)
        self.policy = load(settings.model.path, settings.model.load_in_4bit)
        self.model = self.policy.model
        self.vocabulary = self.policy.vocabulary
        self.parameters = int(get_total_parameters(self.model))
        if settings.model.dtype == "float16" and not (settings.model.lora or settings.frozen):
            raise BackendError(
                'model.dtype = "float16" is for adapters, whose gradients are float32: those of whole models could '
                'overflow; add [model.lora], or choose "float32" or "bfloat16"'
            )
        self._find_capabilities()
        if settings.model.lora:
            self.policy.cast(self.dtype)
            adapters.attach(self.policy, settings.model.lora, settings.model.adapter, settings.seed)
        elif settings.frozen:
            self.policy.cast(self.dtype)
            self.model.freeze()
        elif self.policy.quantised:
            raise BackendError(
                f"the weights of {settings.model.path} are quantised and cannot be trained themselves; "
                "add [model.lora] to train adapters on them"
            )
        else:
            self.model.unfreeze()
        self.optimizer = MlxAdamW(dict(tree_flatten(self.model.trainable_parameters())), settings.optimizer, collective)
        self.trainable = sum(weight.size for weight in self.optimizer.weights.values())
        self._update_model()
        check_generator(self.policy, self.dtype)
        # MLX arrays are values: holding on to the first ones costs memory only as training replaces them.
        self.loaded = self.model.parameters() if settings.keep_reference else None
        self.limits = MlxMemoryLimits()  # last: if loading failed before, the limits would not be restored

    def _find_capabilities(self) -> None:
        """Find out what can be done with this model: gradients a layer at a time, prompts once for all responses.

        ``mx.checkpoint`` knows of no gradient through what its function has from elsewhere, as a response's keys are.
        """
        self._by_layer = self.settings.model.gradient_checkpointing and is_chain(self.model, self.policy)
        no_attention = attention.why_not_fused(*self.policy.attention_shape, self.dtype)
        shape = self.policy.recurrence_shape
        no_recurrence = recurrence.why_not_fused(*shape) if shape else None
        self.attention = CausalAttention(fused=no_attention is None)
        self.delta_rule = DeltaRule(fused=no_recurrence is None)
        if (reason := no_attention or no_recurrence) and mx.default_device() == mx.gpu:  # no CPU has these kernels
            kind = "attention" if no_attention else "the recurrence"
            self.slower_path = f"{kind} is computed by plain operations, block by block: {reason}"
        possible = self._by_layer or not self.settings.model.gradient_checkpointing
        with self.attention.active():
            # Some models compute with the mask, so it must be an array.
            self._array_masks = not can_share_prompts(self.policy, array_masks=False)
            self.shares_prompts = possible and (
                not self._array_masks or can_share_prompts(self.policy, array_masks=True)
            )

    def _rollout(self, request: RolloutRequest, on_finished: OnFinished | None) -> Completions:
        """Draw responses with mlx-lm's batch generator; where memory runs out, what is left in smaller batches."""
        longest = max((len(prompt) for prompt in request.prompts), default=0)
        self.policy.check_length(longest + request.sampling.max_tokens)
        collector = self._collector(request) if request.proxy else None
        rollout = MlxRollout(self.policy, request, self._rollout_batch, self.version, collector)
        while True:
            try:
                return rollout.run(on_finished)
            except (RuntimeError, MemoryError) as error:
                if not exhausted(error):
                    raise
                if self._rollout_batch == 1:
                    raise BackendError(
                        "out of memory on a single response, after several at a time were too many; lower max_tokens "
                        "or choose a smaller model"
                    ) from error
                self._rollout_batch = rollout.batch = max(1, min(self._rollout_batch, len(request)) // 2)
            finally:
                mx.clear_cache()

    def _score(self, sequences: Sequences, proxy: Proxy | None) -> Scores:
        count = len(sequences.tokens)
        logps, entropies = np.zeros(count, np.float32), np.zeros(count, np.float32)
        head, temperature = self.policy.head(), sequences.temperature
        store = self._store(head, sequences, proxy) if proxy else None

        def score(at: Ids, hidden: mx.array, targets: mx.array) -> tuple[Ids, mx.array, mx.array, list[Any]]:
            log_softmax = head.log_softmax(hidden, temperature)
            logp, spread = pick(log_softmax, targets), entropy(log_softmax)
            if not (store and proxy):
                return at, logp, spread, []
            return at, logp, spread, store.cut(at, proxies(head, hidden, targets, log_softmax, proxy))

        for batch in self._hidden_states(sequences):  # which is read to its end before the next one's trunk
            for at, logp, spread, rows in computed_ahead(score(*chunk) for chunk in self._parts(*batch)):
                logps[at], entropies[at] = np.array(logp), np.array(spread)
                if store:
                    store.keep(rows)
        if not (store and proxy):
            return Scores(logps, entropies, None)
        scale = -np.expm1(logps) if proxy.kind == "output_row" else np.ones(count)  # 1 − p, exact where p is near 1
        return Scores(logps, entropies, MlxFeatures(store, scale.astype(np.float64)))

    def _collector(self, request: RolloutRequest) -> MlxFeatureCollector:
        budgets = self.settings.memory.feature_bytes, self.settings.memory.feature_host_bytes
        return MlxFeatureCollector(self.policy.head().width, self.dtype, budgets)

    def _store(self, head: MlxHead, sequences: Sequences, proxy: Proxy) -> MlxFeatureStore:
        budgets = self.settings.memory.feature_bytes, self.settings.memory.feature_host_bytes
        return MlxFeatureStore(head.width, self.dtype, budgets, self.recompute(sequences, proxy))

    def _rows(self, sequences: Sequences, proxy: Proxy, start: int, stop: int) -> Iterator[tuple[Ids, mx.array]]:
        """Flat positions and rows of the tokens start:stop, a chunk at a time; MLX computes of them what is used."""
        reached = np.flatnonzero((sequences.starts[1:] > start) & (sequences.starts[:-1] < stop))
        positions = token_index(sequences.starts, reached)
        head, temperature = self.policy.head(), sequences.temperature
        for at, hidden, targets in self._chunks(sequences.select(reached)):
            at = positions[at]
            inside = np.flatnonzero((at >= start) & (at < stop))
            if len(inside):
                rows = proxies(head, hidden, targets, head.log_softmax(hidden, temperature), proxy)
                yield at[inside], rows[mx.array(inside)]

    def _chunks(self, sequences: Sequences) -> Iterator[HeadChunk]:
        """Flat positions, hidden states in the type of the compute and token ids, as many as have logits at a time."""
        for batch in self._hidden_states(sequences):
            yield from self._parts(*batch)

    def _hidden_states(self, sequences: Sequences) -> Iterator[tuple[Ids, mx.array, Ids]]:
        """Flat positions, hidden states in the type of the compute and token ids, a micro-batch at a time."""
        for batch in self._micro_batches(sequences):
            hidden = self._hidden(batch).astype(self.dtype)
            mx.eval(hidden)  # what the trunk needed is freed before the first logits
            yield token_index(sequences.starts, batch.rows), hidden, batch.targets

    def _parts(self, positions: Ids, hidden: mx.array, targets: Ids) -> Iterator[HeadChunk]:
        for part in chunks(len(positions), self.settings.memory.head_chunk_tokens):
            yield positions[part], hidden[part], mx.array(targets[part])

    def _reference(self, sequences: Sequences) -> Floats:
        """Log-probabilities of the policy as it was loaded: without adapters, or of the weights kept then."""
        with self._as_loaded():
            return self._score(sequences, None).logprobs

    def _hidden_residuals(self, sequences: Sequences) -> Floats:
        found = np.zeros(len(sequences.tokens), np.float32)
        for batch in self._micro_batches(sequences):
            present = self._hidden(batch)
            mx.eval(present)  # before the weights change
            with self._as_loaded():
                moved = mx.linalg.norm(present - self._hidden(batch), axis=1)
                found[token_index(sequences.starts, batch.rows)] = np.array(moved)
        return found

    @contextmanager
    def _as_loaded(self) -> Iterator[None]:
        """With the weights that were loaded."""
        assert self.loaded is not None
        current = self.model.parameters()
        self.model.update(self.loaded)
        try:
            yield
        finally:
            self.model.update(current)

    def _keep_gradient(self) -> Callable[[], None]:
        return self.optimizer.keep_gradient()

    def _accumulate(self, sequences: Sequences, objective: Objective) -> float:
        temperature = sequences.temperature
        return sum(self._backward(batch, objective, temperature) for batch in self._micro_batches(sequences))

    def step(self, learning_rate: float, scale: float = 1.0) -> float:
        """Update the master weights and hand the model its copy. Returns the gradient's norm."""
        norm = self.optimizer.step(learning_rate, scale)
        self.version += 1
        self._update_model()
        mx.clear_cache()
        return norm

    def sample_weights(self) -> Floats:
        """A few values of every master weight, float32 [n]."""
        parts = [weight.reshape(-1)[:16].astype(mx.float32) for weight in self.optimizer.weights.values()]
        return np.array(mx.concatenate(parts)) if parts else np.zeros(0, np.float32)

    def save(self, folder: Path) -> FileDigests:
        """Write master weights (or adapters), moments and step count; mlx writes the files, so none is hashed here."""
        self.optimizer.save(folder)
        return {}

    def copy_state(self, room: int) -> WriteState | None:
        """Copy what ``save`` writes, if it fits into ``room`` bytes."""
        return self.optimizer.copy_state(room)

    def load(self, folder: Path) -> None:
        """Restore what ``save`` wrote, bit for bit."""
        self.optimizer.load(folder)
        self.version += 1
        self._update_model()

    def export(self, folder: Path) -> None:
        """Write a model folder, see ``export.export``; with adapters also ``adapter/``."""
        if self.collective.rank == 0:
            export(self.policy, folder, self.settings.model.dtype)
            if self.settings.model.lora:
                adapters.save(self.policy, self.settings.model.lora, folder / "adapter", self.settings.model.path)
        self.collective.barrier()

    def peak_memory(self) -> int:
        """Bytes: the most this process has used so far."""
        return peak()

    def close(self) -> None:
        """Drop the model and set MLX's memory limits to what they were. Closing twice is harmless."""
        for held in ("policy", "model", "optimizer", "loaded"):
            self.__dict__.pop(held, None)
        mx.clear_cache()
        self.limits.restore()

    def _micro_batches(self, sequences: Sequences) -> Iterator[MlxMicroBatch]:
        """Prompts once for all their responses where that is fewer tokens, padding included, than each with its own."""
        apart: list[MlxMicroBatch] = list(micro_batches(sequences, self.recovery.tokens))
        together: list[MlxMicroBatch] = (
            list(shared_batches(sequences, self.recovery.tokens)) if self.shares_prompts else apart
        )
        fewer = sum(batch.tokens for batch in together) < WORTH_SHARING * sum(batch.tokens for batch in apart)
        return self.recovery.track(together if fewer else apart)

    def _update_model(self) -> None:
        """Give the model the master weights: adapters in float32, others in the type of the compute."""
        dtype = mx.float32 if self.settings.model.lora else self.dtype
        weights = [(name, weight.astype(dtype)) for name, weight in self.optimizer.weights.items()]
        self.model.update(tree_unflatten(weights))
        mx.eval(self.model.parameters())
        adapters.refresh_norms(self.policy)

    def _call(self, batch: MlxMicroBatch) -> list[mx.array]:
        """Hidden states [·, T, H] of one or two calls of the trunk."""
        self.policy.check_length(batch.longest)
        with self.attention.active():
            if isinstance(batch, SharedPromptBatch):
                return call_trunk(self.policy, batch, padded_width, array_masks=self._array_masks)
            padding = padded_width(batch.longest) - batch.longest
            return [self.policy.trunk(mx.array(np.pad(batch.ids, ((0, 0), (0, padding)))))]

    def _hidden(self, batch: MlxMicroBatch) -> mx.array:
        """Hidden states of the positions that predict a response token, float32 [n, H]."""
        return self._chosen(batch, self._call(batch))

    def _chosen(self, batch: MlxMicroBatch, calls: list[mx.array]) -> mx.array:
        flat = mx.concatenate([hidden.reshape(-1, hidden.shape[-1]) for hidden in calls])
        return flat[predicting_positions(batch, calls)].astype(mx.float32)

    def _backward(self, batch: MlxMicroBatch, objective: Objective, temperature: float) -> float:
        """The loss of one micro-batch; its gradient goes to the optimizer.

        MLX differentiates the trunk alone, from what the head pulls back to its hidden states. The head, which needs
        their values for that, gets them from a forward a layer at a time, or, without checkpointing, from inside
        the trace, which keeps every intermediate array.
        """
        head = self.policy.head()  # with arrays from before the trace, so that nothing of the head is kept by it
        targets, size = mx.array(batch.targets), self.settings.memory.head_chunk_tokens
        most = sys.maxsize if getattr(objective, "needs_whole_micro_batch", False) else size
        loss, scale = 0.0, 1.0

        def add_to_head(gradient: mx.array) -> None:
            self.optimizer.add({head.name: gradient})

        add = add_to_head if head.name in self.optimizer.weights else None

        def at_head(hidden: mx.array) -> mx.array:
            nonlocal loss, scale
            known, pulled = mx.array(np.array(hidden)).astype(self.dtype), []
            for part, rows in response_chunks(batch, most):

                def slopes(logp: Floats, rows: Ids = rows) -> Floats:
                    nonlocal loss
                    more, found = objective(logp, rows)
                    loss += more
                    return found

                pulled.append(pullback(head, known[part], targets[part], slopes, temperature, size, add))
            dhidden = mx.concatenate(pulled)
            scale = loss_scale(dhidden) if self.dtype == mx.float16 else 1.0
            return dhidden * scale

        differentiate = self._gradient_by_layer if self._by_layer else self._gradient_traced
        with differentiable(self.model, self.attention, self.delta_rule):
            for found in differentiate(batch, at_head):
                self.optimizer.add({name: part / scale for name, part in found.items()} if scale != 1 else found)
        return float(loss)

    def _gradient_by_layer(
        self, batch: MlxMicroBatch, at_head: Callable[[mx.array], mx.array]
    ) -> Iterator[Mapping[str, mx.array]]:
        """The trunk's gradient, a layer at a time."""
        layerwise = LayerwiseGradient(self.model, self.policy.text.layers)

        def run() -> list[mx.array]:
            return self._call(batch)

        hidden, calls = layerwise.forward(run)
        pulled = at_head(self._chosen(batch, hidden))
        sizes = [state.shape[0] * state.shape[1] for state in hidden]
        slopes = mx.zeros((sum(sizes), pulled.shape[1])).at[predicting_positions(batch, hidden)].add(pulled)
        parts = mx.split(slopes, np.cumsum(sizes)[:-1].tolist())
        shaped = [part.reshape(state.shape).astype(state.dtype) for part, state in zip(parts, hidden, strict=True)]
        yield from layerwise.backward(run, calls, shaped)

    def _gradient_traced(
        self, batch: MlxMicroBatch, at_head: Callable[[mx.array], mx.array]
    ) -> Iterator[Mapping[str, mx.array]]:
        """The trunk's gradient in one trace."""
        layers = self.policy.text.layers if self.settings.model.gradient_checkpointing else []
        trained = self.model.trainable_parameters()
        with checkpointed(layers):
            ahead = at_head(self._hidden(batch)) if layers else None

            def weighted_states(parameters: dict[str, Any]) -> mx.array:
                self.model.update(parameters)
                hidden = self._hidden(batch)
                return mx.sum(hidden * (at_head(hidden) if ahead is None else ahead))

            try:
                found = mx.grad(weighted_states)(trained)
                mx.eval(found)
            finally:
                self.model.update(trained)
        yield dict(tree_flatten(found))
