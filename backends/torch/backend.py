"""The engine interface on a model of transformers."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from backends.batching import PackedBatch, packed_batches
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
from backends.local_engine import LocalEngine, peak_resident
from backends.process import default_threads
from backends.settings import BackendSettings
from backends.torch import adapters, varlen_attention
from backends.torch.cache_size import CacheBudget
from backends.torch.compiled_layers import compile_layers
from backends.torch.device import add_at, explained, out_of_memory, repeatable
from backends.torch.export import adapter_weights, export, export_adapters, merged_weights
from backends.torch.features import TorchFeatureCollector, TorchFeatures
from backends.torch.four_bits import numel
from backends.torch.fused_norms import fuse_norms
from backends.torch.head import dense_gradient
from backends.torch.loading import load_for_rank
from backends.torch.model import TorchPolicy
from backends.torch.optimizer import TorchAdamW
from backends.torch.paged_attention import kernel_fault
from backends.torch.rollout import TorchRollout
from backends.torch.sharding import FILLER, DataParallel

# A CPU has no kernel for any of these.
PAGED = {"cpu": False, "cuda": True}  # keep keys and values in pages
VARLEN = {"cpu": False, "cuda": True}  # compute packed rows as sequences of any lengths
FUSED = {"cpu": False, "cuda": True}  # compute a norm as one kernel
COMPILED = {"cpu": False, "cuda": True}  # and rotary embeddings and gated feed-forwards


class TorchEngine(LocalEngine):
    """One model on one device. Its public methods are those of :class:`backends.interface.Engine`."""

    takes_prompts = True

    def __init__(self, settings: BackendSettings, name: str, collective: Collective = SOLO) -> None:
        super().__init__(settings, name, out_of_memory, self._free_cache)
        if settings.model.load_in_4bit and collective.size > 1:
            raise BackendError(
                "model.load_in_4bit: this backend trains adapters on a 4-bit base in one process only; set "
                "parallel.processes = 1, or model.load_in_4bit = false"
            )
        if settings.deterministic:  # cuBLAS reads it when it is first used
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        self._device = torch.device(name)
        self._collective = collective
        self._parallel = DataParallel(collective, settings.parallel, self._device)
        self._policy = load_for_rank(settings, self._device, collective, self._parallel.splits)
        self._frozen = self._policy.frozen_copy() if settings.keep_reference and not settings.model.lora else None
        self.parameters = sum(numel(weight) for weight in self._policy.causal.parameters())
        self.threads = settings.threads or default_threads(self.parameters)
        torch.set_num_threads(self.threads)
        self.trainable = sum(weight.numel() for _, weight in self._policy.trained())
        self.vocabulary = self._policy.vocabulary
        self._parallel.decide(self.trainable)
        if self._parallel.sharded and settings.optimizer.moments == "int8":
            raise BackendError(
                'update.moments = "int8": with split weights its blocks would depend on the number of processes; set '
                'parallel.sharding = "none", or update.moments = "float32"'
            )
        self.recovery.alone = not self._parallel.sharded
        for policy in (self._policy, self._frozen):
            if policy is not None:
                self._fuse(policy)
                self._parallel.place(policy)
        self._choose_attention()
        if settings.keep_reference and settings.model.adapter:
            self._policy.remember()
        if name == "cpu" and not self._parallel.sharded:
            self._policy.embed_sparsely()
        self._optimizer = TorchAdamW(dict(self._policy.trained()), settings.optimizer, self._parallel)
        self._cache_tokens = sys.maxsize  # of a rollout; shrinks if memory runs out
        self._paged: bool | None = None  # whether rollouts keep keys and values in pages; decided by the first

    def _fuse(self, policy: TorchPolicy) -> None:
        """Let the elementwise operations of a bfloat16 policy be few kernels."""
        if policy.dtype != torch.bfloat16 or policy.mixed:
            return
        if FUSED[self._device.type]:
            fuse_norms(policy.causal)
        if COMPILED[self._device.type] and (why := compile_layers(policy.causal, self._device, policy.dtype)):
            self._note_slower_path(f"rotary embeddings and feed-forwards take several kernels each: {why}")

    def _choose_attention(self) -> None:
        """Let packed rows be computed without padding, and long sequences as squares, by the kernels that compute the
        same as rectangles.
        """
        if not VARLEN[self._device.type] or self._policy.dtype != torch.bfloat16:  # which the kernels do not take
            return
        fault = varlen_attention.kernel_fault(self._policy)
        if fault:
            self._note_slower_path(f"attention pads responses to equal lengths: for a kernel without padding, {fault}")
        plain = not self._policy.has_sinks and not self._policy.caps_scores
        squares = (
            fault is None
            and plain
            and not self.settings.deterministic
            and varlen_attention.made_for_squares(self._device)
        )
        if squares and (wrong := varlen_attention.kernel_fault(self._policy, squares=True)):
            self._note_slower_path(f"long sequences take FlashAttention 2: for cuDNN's attention, {wrong}")
            squares = False
        for policy in (self._policy, self._frozen):
            if policy is not None:
                policy.varlen, policy.squares = fault is None, squares

    def _note_slower_path(self, why: str | None) -> None:
        if why and why not in (self.slower_path or ""):
            self.slower_path = "; ".join(filter(None, [self.slower_path, why]))

    # ------------------------------------------------------------------------------- generating

    def _rollout(self, request: RolloutRequest, on_finished: OnFinished | None) -> Completions:
        with self._parallel.gathered(self._policy):
            return self._draw(request, on_finished)

    def _draw(self, request: RolloutRequest, on_finished: OnFinished | None) -> Completions:
        self._free_cache()  # left by an update
        budget = self._cache_budget(request)
        rollout = TorchRollout(
            self._policy,
            request,
            on_finished,
            budget,
            prefill_tokens=self.recovery.tokens,
            head_chunk=self.settings.memory.head_chunk_tokens,
            version=self.version,
            collector=self._collector(request) if request.proxy else None,
        )
        try:
            with explained(
                "on a single response, although responses were drawn one at a time in the end; lower max_tokens or "
                "choose a smaller model"
            ):
                return rollout.run()
        finally:
            self._cache_tokens = budget.tokens
            self._note_slower_path(rollout.graphs.fault)
            self.add_graph_use(rollout.graphs.use())
            self._free_cache()

    def _cache_budget(self, request: RolloutRequest) -> CacheBudget:
        """What a rollout may hold. The first one checks whether attention reads pages correctly."""
        if self._paged is None:
            self._paged = PAGED[self._device.type]
            if self._paged and (fault := kernel_fault(self._policy)):
                self._paged = False
                self._note_slower_path(
                    f"keys and values are kept in slots instead of pages: for pages' kernel, {fault}"
                )
        memory, row = self.settings.memory, self._policy.head_weight.shape[1] * self._policy.dtype.itemsize
        features = min(memory.feature_bytes, len(request) * request.sampling.max_tokens * row) if request.proxy else 0
        states, slots = 1 if request.turns is None else 2, self.settings.rollout_batch
        return CacheBudget(slots, self._cache_tokens, self._paged, self.recovery.tokens, features, states)

    def _collector(self, request: RolloutRequest) -> TorchFeatureCollector:
        memory, policy = self.settings.memory, self._policy
        budgets, most = (memory.feature_bytes, memory.feature_host_bytes), len(request) * request.sampling.max_tokens
        return TorchFeatureCollector(policy.head_weight.shape[1], policy.dtype, self._device, budgets, most)

    # ---------------------------------------------------------------------------------- scoring

    def _score(self, sequences: Sequences, proxy: Proxy | None) -> Scores:
        return self._score_under(self._policy, sequences, proxy)

    def _reference(self, sequences: Sequences) -> Floats:
        if self._frozen is None:
            with self._policy.as_loaded() as policy:
                return self._score_under(policy, sequences, None).logprobs
        try:
            return self._score_under(self._frozen, sequences, None).logprobs
        finally:
            self._parallel.scatter(self._frozen)

    @torch.no_grad()
    def _hidden_residuals(self, sequences: Sequences) -> Floats:
        found = np.zeros(len(sequences.tokens), np.float32)
        frozen = self._frozen
        for batch in self._rounds(sequences):
            present, predicts, _ = self._hidden(self._policy, batch or FILLER)
            with self._policy.as_loaded() if frozen is None else nullcontext(frozen) as reference:
                loaded, _, _ = self._hidden(reference, batch or FILLER)
            if batch is not None:
                moved = (present[predicts].float() - loaded[predicts].float()).norm(dim=1)
                found[token_index(sequences.starts, batch.rows)] = moved.cpu().numpy()
        if frozen is not None:
            self._parallel.scatter(frozen)
        return found

    @torch.no_grad()
    def _score_under(self, policy: TorchPolicy, sequences: Sequences, proxy: Proxy | None) -> Scores:
        logprobs = np.empty(len(sequences.tokens), dtype=np.float32)
        scores = Scores(logprobs, np.empty_like(logprobs), self._allocate(sequences, proxy) if proxy else None)
        for batch in self._rounds(sequences):
            if batch is None:
                self._hidden(policy, FILLER)
            else:
                self._score_batch(policy, batch, sequences, proxy, scores)
        return scores

    def _score_batch(
        self, policy: TorchPolicy, batch: PackedBatch, sequences: Sequences, proxy: Proxy | None, scores: Scores
    ) -> None:
        """Fill in the scores of one micro-batch."""
        at = token_index(sequences.starts, batch.rows)
        hidden, predicts, targets = self._hidden(policy, batch)
        hidden = hidden[predicts]
        head = policy.head(self.settings.memory.head_chunk_tokens)
        parts = head.parts(batch)
        found = head.statistics(hidden, targets, sequences.temperature, entropies=True, proxy=proxy, parts=parts)
        assert found.entropies is not None
        scores.logprobs[at] = found.logprobs.cpu().numpy()
        scores.entropies[at] = found.entropies.cpu().numpy()
        if isinstance(scores.features, TorchFeatures):
            if found.hidden_gradients is None:
                scores.features.put(at, hidden, scale=-torch.expm1(found.logprobs))
            else:
                scores.features.put(at, found.hidden_gradients)

    def _allocate(self, sequences: Sequences, proxy: Proxy) -> TorchFeatures:
        policy, memory = self._policy, self.settings.memory
        return TorchFeatures.allocate(
            len(sequences.tokens),
            policy.head_weight.shape[1],
            policy.dtype,
            self._device,
            (memory.feature_bytes, memory.feature_host_bytes),
            self.recompute(sequences, proxy),
            self._parallel.anywhere,
        )

    @torch.no_grad()
    def _rows(self, sequences: Sequences, proxy: Proxy, start: int, stop: int) -> Iterator[tuple[Ids, Tensor]]:
        """Yield flat positions and unscaled features of the tokens start:stop, one micro-batch at a time."""
        reached = np.flatnonzero((sequences.starts[1:] > start) & (sequences.starts[:-1] < stop))
        for batch in self._rounds(sequences.select(reached)):
            if batch is None:
                self._hidden(self._policy, FILLER)
                continue
            at = token_index(sequences.starts, reached[batch.rows])
            inside = np.flatnonzero((at >= start) & (at < stop))
            hidden, predicts, targets = self._hidden(self._policy, batch)
            chosen = torch.from_numpy(inside).to(self._device)
            rows = hidden[predicts[chosen]]
            if proxy.kind != "output_row":
                head, temperature = self._policy.head(self.settings.memory.head_chunk_tokens), sequences.temperature
                parts = head.parts(batch) if len(inside) == len(at) else None  # as in scoring, to the same bits
                found = head.statistics(rows, targets[chosen], temperature, entropies=False, proxy=proxy, parts=parts)
                assert found.hidden_gradients is not None
                rows = found.hidden_gradients
            yield at[inside], rows

    # --------------------------------------------------------------------------------- training

    def _keep_gradient(self) -> Callable[[], None]:
        return self._optimizer.keep_gradient()

    def _accumulate(self, sequences: Sequences, objective: Objective) -> float:
        loss = 0.0
        with repeatable(self.settings.deterministic):
            for batch in self._rounds(sequences):
                if batch is None:
                    self._backward_nothing()
                else:
                    loss += self._backward(batch, sequences.temperature, objective)
        return loss

    def _backward(self, batch: PackedBatch, temperature: float, objective: Objective) -> float:
        """The loss of one micro-batch; adds its gradient to that of the weights."""
        with self._policy.checkpointing():
            hidden, predicts, targets = self._hidden(self._policy, batch)
            fixed = hidden.detach()[predicts]
            head = self._policy.head(self.settings.memory.head_chunk_tokens)
            weight_gradient = self._head_with_gradient
            loss, pulled = head.backward(batch, fixed, targets, temperature, objective, weight_gradient)
            if pulled is None:
                if not self._parallel.sharded:  # if it is, other ranks wait for this backward pass
                    return loss
                self._head_with_gradient()
                pulled = torch.zeros_like(fixed, dtype=torch.float32)
            dense_gradient(self._policy.sparse_embedding)
            hidden.backward(add_at(hidden.shape, predicts, pulled).to(hidden.dtype))
        return loss

    def _backward_nothing(self) -> None:
        """Run an empty backward pass, to keep step with ranks that have one more micro-batch."""
        with self._policy.checkpointing():
            hidden, _, _ = self._hidden(self._policy, FILLER)
            self._head_with_gradient()
            hidden.backward(torch.zeros_like(hidden))

    def _head_with_gradient(self) -> Tensor | None:
        """The gradient of the output matrix, zero at first; None if it is frozen. Call it after a forward pass."""
        dense_gradient(self._policy.head_bias)
        return dense_gradient(self._policy.head_weight)

    def step(self, learning_rate: float, scale: float = 1.0) -> float:
        self.version += 1
        self._parallel.scatter(self._policy)
        with explained(
            "in the middle of an update, so the weights are half updated; go on from the last checkpoint with "
            'update.offload = true or update.moments = "int8", or train adapters (lora)'
        ):
            norm = self._optimizer.step(learning_rate, scale)
            adapters.refresh_norms(self._policy.causal)
        return norm

    # ----------------------------------------------------------------------------------- keeping

    def sample_weights(self) -> Floats:
        if self._parallel.sharded or not self._optimizer.weights:
            return np.zeros(0, np.float32)
        return self._optimizer.samples(16).numpy()

    def save(self, folder: Path) -> FileDigests:
        return self._optimizer.save(folder)

    def copy_state(self, room: int) -> WriteState | None:
        return self._optimizer.copy_state(room)

    def load(self, folder: Path) -> None:
        self.version += 1
        self._parallel.scatter(self._policy)
        self._optimizer.load(folder)
        adapters.refresh_norms(self._policy.causal)

    def export(self, folder: Path) -> None:
        self._parallel.scatter(self._policy)
        weights, alone = merged_weights(self._policy, keep=self._collective.rank == 0)
        if self._collective.rank == 0:
            export(self._policy, folder, weights, alone)
        self._collective.barrier()

    def _write(self, inbox: Path) -> None:
        self._free_cache()  # an engine on the same GPU may need it
        lora = self.settings.model.lora
        if lora is None or lora.dora or not self.settings.publish_adapters:  # vLLM does not support DoRA adapters
            self.export(inbox)
            return
        self._parallel.scatter(self._policy)
        alone = adapter_weights(self._policy, keep=self._collective.rank == 0)
        if self._collective.rank == 0:
            export_adapters(self._policy, inbox, alone)
        self._collective.barrier()

    def peak_memory(self) -> int:
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        return peak_resident()

    def close(self) -> None:
        for part in ("_policy", "_frozen", "_optimizer"):
            self.__dict__.pop(part, None)
        self._free_cache()

    # ----------------------------------------------------------------------------------- details

    def _hidden(self, policy: TorchPolicy, batch: PackedBatch) -> tuple[Tensor, Tensor, Tensor]:
        """A micro-batch's hidden states [T, H], positions that predict response tokens [n], and those tokens [n]."""
        with policy.compute(cached=not self._parallel.sharded):  # copies of split weights would be the whole model
            hidden = policy.packed_hidden(batch)
        predicts, targets = (torch.from_numpy(array).to(self._device) for array in (batch.predicts, batch.targets))
        return hidden, predicts, targets

    def _rounds(self, sequences: Sequences) -> Iterator[PackedBatch | None]:
        """The micro-batches of the sequences, then None while other ranks still have some, to keep step with them."""
        return self.recovery.track(self._parallel.rounds(packed_batches(sequences, self.recovery.tokens)))

    def _free_cache(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
