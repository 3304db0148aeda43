"""A causal language model as trunk, head and adapters."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from backends.batching import PackedBatch
from backends.torch import adapters, four_bits
from backends.torch.attention import PackedLayout
from backends.torch.head import TorchHead
from backends.torch.parts import LanguagePart
from backends.torch.recurrent import StateLayout

COMPANIONS = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken")  # the files of a model folder besides its weights
RECURRENT = {"linear_attention", "conv"}
BY_TOKEN = {"mlp", "moe"}  # layers that compute each token by itself
WITHOUT_ATTENTION = RECURRENT | BY_TOKEN


class TorchPolicy:
    """A causal language model as a trunk, which computes post-norm hidden states, and a head.

    ``dtype`` is the type of the compute. In bfloat16 the weights are bfloat16 too, and all layers compute with them;
    the optimizer has float32 masters of those that are trained. Adapters are float32 beside a bfloat16 base, so
    ``mixed`` policies compute under autocast, which casts each weight once while the context of :meth:`compute` is
    open.
    """

    def __init__(self, causal: Any, folder: Path, dtype: torch.dtype, part: LanguagePart | None = None) -> None:
        self.causal = causal.eval()  # no dropout anywhere, so that ratios start at 1
        four_bits.keep_differentiable(causal)
        self.folder = folder
        self.dtype = dtype
        self.part = part  # where the folder keeps the language model, if it holds more than that
        self.loaded_on_first = False  # whether only the first rank has the weights until they are split
        self.mixed = False  # whether a bfloat16 policy has weights in float32
        self.varlen = False  # whether a kernel for sequences of any lengths computes attention over packed rows
        self.squares = False  # and another one its long sequences
        self.carries_state: bool | None = None  # whether recurrent layers can start from a state; None without any
        self.peft: Any = None
        self._first: dict[str, Tensor] = {}  # the adapters that the policy was loaded with, unless they were new

    @property
    def config(self) -> Any:
        return self.causal.config

    @property
    def device(self) -> torch.device:
        return self.head_weight.device

    @property
    def head_weight(self) -> Tensor:
        """The stored output matrix [V, H]."""
        weight: Tensor = self.causal.get_output_embeddings().weight
        return weight

    @property
    def head_bias(self) -> Tensor | None:
        """The bias of the output layer [V]; most models have none."""
        bias: Tensor | None = self.causal.get_output_embeddings().bias
        return bias

    def embed_sparsely(self) -> None:
        """Compute the embedding's gradient as rows for the ids in the batch, and add these to a dense gradient.

        Otherwise every backward pass would allocate and add a gradient of the whole vocabulary, mostly zeros.
        """
        embedding = self.causal.get_input_embeddings()
        if isinstance(embedding, nn.Embedding) and embedding.weight.requires_grad:
            embedding.sparse = True

    @property
    def sparse_embedding(self) -> Tensor | None:
        """The embedding [V, H] that needs a dense gradient before rows are added to it."""
        embedding = self.causal.get_input_embeddings()
        weight: Tensor = embedding.weight
        return weight if getattr(embedding, "sparse", False) else None

    @property
    def output_scale(self) -> float:
        """The factor on logits, under any of the names configurations use for it."""
        factor = getattr(self.config, "logit_scale", None) or getattr(self.config, "lm_head_multiplier", None) or 1
        return float(factor / (getattr(self.config, "logits_scaling", None) or 1))

    @property
    def vocabulary(self) -> int:
        """The number of ids that the model can read and write."""
        return min(len(self.head_weight), len(self.causal.get_input_embeddings().weight))

    @property
    def windows(self) -> dict[str, int]:
        """The kinds of attention among the layers, each with its window in tokens; 0 means all."""
        window = getattr(self.config, "sliding_window", None) or 0
        kinds = getattr(self.config, "layer_types", None) or ["sliding_attention" if window else "full_attention"]
        attending = [kind for kind in kinds if kind not in WITHOUT_ATTENTION]
        return {kind: window if kind == "sliding_attention" else 0 for kind in attending}

    @property
    def layer_windows(self) -> tuple[int, ...]:
        """The window of each layer in tokens; 0 means all."""
        kinds = getattr(self.config, "layer_types", None)
        windows = self.windows
        return tuple(windows.get(kind, 0) for kind in kinds or [*windows] * self.config.num_hidden_layers)

    @property
    def has_sinks(self) -> bool:
        """Whether attention has sinks, learned scores without a value."""
        return any(name.endswith(".sinks") for name, _ in self.causal.named_parameters())

    @property
    def caps_scores(self) -> bool:
        """Whether attention keeps its scores within ± a number."""
        return bool(getattr(self.config, "attn_logit_softcapping", None))

    def trained(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Names and weights that updates change."""
        return ((name, weight) for name, weight in self.causal.named_parameters() if weight.requires_grad)

    def compute(self, cached: bool = True) -> torch.autocast:
        """The context of forward passes; ``cached`` keeps the bfloat16 copies of weights between them."""
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.mixed, cache_enabled=cached)

    def hidden(self, ids: Tensor, **inputs: Any) -> Tensor:
        """Post-norm hidden states [B, T, H] of ids [B, T], times the model's logit scale if it has one."""
        if isinstance(mask := inputs.get("attention_mask"), dict):
            inputs["attention_mask"] = {**dict.fromkeys(WITHOUT_ATTENTION), **mask}
        trunk = getattr(self.causal, "trunk", self.causal.base_model)  # the former where weights are split over ranks
        states: Tensor = trunk(input_ids=ids, **inputs).last_hidden_state
        return states if self.output_scale == 1 else states * self.output_scale

    def layout(self, batch: PackedBatch, keep_states: bool = False) -> PackedLayout:
        """How layers compute a packed row; ``keep_states`` keeps the states of recurrent layers after the prompts."""
        states = None
        if self.carries_state is not None:
            states = StateLayout.of(batch, self.device, carried=self.carries_state, keep=keep_states)
        return PackedLayout(batch, self.layer_windows, self.device, states, self.varlen, self.squares)

    def packed_hidden(self, batch: PackedBatch, cache: Any = None, layout: PackedLayout | None = None) -> Tensor:
        """Post-norm hidden states [T, H] of a packed row; stores keys and values in ``cache``."""
        return self.hidden(
            torch.from_numpy(batch.ids).to(self.device)[None],
            position_ids=torch.from_numpy(batch.positions).to(self.device)[None],
            layout=layout or self.layout(batch),
            past_key_values=cache,
            use_cache=cache is not None,
        )[0]

    def head(self, chunk: int) -> TorchHead:
        """The present head. On CUDA with bfloat16 it holds a copy of the weight, so release it soon."""
        mixed = self.dtype == torch.bfloat16 and self.device.type == "cuda"  # a CPU has no bf16 → float32 product
        weight = self.head_weight.detach().to(torch.bfloat16 if mixed else torch.float32)
        return TorchHead(weight, chunk, getattr(self.config, "final_logit_softcapping", None), self.head_bias)

    def frozen_copy(self) -> TorchPolicy:
        """A second model that computes exactly what this one computes now, with matrices in the compute dtype."""
        shared: dict[int, Any] = {}
        if self.loaded_on_first:  # splitting copies the weights, so until then both policies can have the same
            shared = {id(weight): nn.Parameter(weight.detach()) for weight in self.causal.parameters()}
        causal = copy.deepcopy(self.causal, shared).requires_grad_(False)
        for module in causal.base_model.modules():
            if isinstance(module, nn.Linear):
                module.to(self.dtype)
        copied = TorchPolicy(causal, self.folder, self.dtype, self.part)
        copied.carries_state, copied.mixed, copied.varlen = self.carries_state, self.mixed, self.varlen
        copied.squares, copied.loaded_on_first = self.squares, self.loaded_on_first
        return copied

    def remember(self) -> None:
        """Keep the present adapters for :meth:`as_loaded`."""
        self._first = {name: weight.detach().clone() for name, weight in self.trained()}

    @contextlib.contextmanager
    def as_loaded(self) -> Iterator[TorchPolicy]:
        """This policy as it was loaded: with adapters switched off, or with the ones it started from."""
        if not self._first:
            with self.peft.disable_adapter():
                yield self
            return
        now = {name: weight.detach().clone() for name, weight in self.trained()}
        self._set_adapters(self._first)
        try:
            yield self
        finally:
            self._set_adapters(now)

    @torch.no_grad()
    def _set_adapters(self, weights: dict[str, Tensor]) -> None:
        for name, weight in self.trained():
            weight.copy_(weights[name])
        adapters.refresh_norms(self.causal)

    @contextlib.contextmanager
    def checkpointing(self) -> Iterator[None]:
        """Keep only the inputs of layers for the backward pass, if gradient checkpointing is on.

        transformers checkpoints layers in training mode only, and then drops their cache. So only the layers enter
        that mode, only during the gradient, and the modules inside them stay without dropout.
        """
        layers = [module for module in self.causal.modules() if isinstance(module, GradientCheckpointingLayer)]
        for layer in layers:
            layer.training = True
        try:
            yield
        finally:
            for layer in layers:
                layer.training = False


def tensors_of(causal: nn.Module) -> Iterator[tuple[dict[str, Any], str, Tensor]]:
    """Every parameter, buffer and other tensor of a model's modules: the dictionary that holds it, its key, and it."""
    for module in causal.modules():
        for holder in (module._parameters, module._buffers, vars(module)):
            yield from ((holder, key, value) for key, value in [*holder.items()] if isinstance(value, Tensor))


def layout_of(policy: TorchPolicy) -> list[tuple[Any, ...]]:
    """The names, shapes and types of all tensors, and which of them are the same: equal if two policies differ in
    their numbers alone."""
    first: dict[int, int] = {}
    return [
        (key, tuple(tensor.shape), tensor.dtype, tensor.requires_grad, first.setdefault(id(tensor), place))
        for place, (_, key, tensor) in enumerate(tensors_of(policy.causal))
    ] + [(policy.mixed, policy.carries_state)]
