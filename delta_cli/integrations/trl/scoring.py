"""Token features from the forward that scores a generation batch, TRL's own or an equal one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from accelerate.utils import is_peft_model
from torch import Tensor
from torch.distributed.tensor import DTensor
from trl import GRPOTrainer
from trl.models.utils import disable_gradient_checkpointing
from trl.trainer.utils import maybe_gather_lm_head_ctx

from backends.interface import Proxy
from backends.torch.features import PositionedRows, TorchFeatures
from backends.torch.head import TorchHead
from delta_cli.integrations.trl.config import DelTAArguments

Forward = Callable[..., tuple[Tensor, Tensor, Any]]  # GRPOTrainer._get_per_token_logps_and_entropies, bound

HEAD_CHUNK = 512  # tokens whose logits are in memory at a time, with a proxy that needs logits
_LOGIT_TRANSFORMS = (
    "logit_scale",
    "logits_scaling",
    "final_logit_softcapping",
    "lm_head_multiplier",
    "output_multiplier",
)


@dataclass(frozen=True)
class ScoredCompletions:
    """A generation batch of B completions of at most T tokens, scored by the policy before its update."""

    logps: Tensor  # [B, T] at the sampling temperature
    entropies: Tensor | None  # [B, T] nats; None if not requested
    mask: Tensor  # [B, T] bool: tokens that have features, flat and in order
    features: TorchFeatures


class FeatureScorer:
    """Collects the features of completion tokens while the trainer's forward runs.

    A hook on the backbone receives the hidden states that TRL's head reads, one chunk of completions at a time.
    Features that do not fit into the byte budgets are recomputed for each reduction.
    """

    def __init__(self, trainer: GRPOTrainer, arguments: DelTAArguments) -> None:
        self._trainer = trainer
        self._proxy = Proxy(arguments.delta_proxy, arguments.delta_topk)
        self._budgets = (arguments.delta_feature_bytes, arguments.delta_feature_host_bytes)
        model = trainer.accelerator.unwrap_model(trainer.model)
        self._causal = model.get_base_model() if is_peft_model(model) else model
        self._config = self._causal.config.get_text_config()
        if self._proxy.kind != "output_row":
            self._check_head()

    def score(
        self,
        forward: Forward,
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor,
        tokens: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        **inputs: Any,
    ) -> ScoredCompletions:
        """Run ``forward`` on prompts and completions [B, P + T] and keep the features; ``tokens`` is T.

        Entropies cost TRL another [tokens, V] array and a pass over it.
        """
        mask = attention_mask[:, -tokens:].bool()
        size = batch_size or len(input_ids)
        chunks = [slice(first, first + size) for first in range(0, len(input_ids), size)]
        starts = np.concatenate([[0], np.cumsum([int(mask[chunk].sum()) for chunk in chunks])])

        def recompute(start: int, stop: int, reduce: Callable[[PositionedRows], Tensor]) -> Tensor:
            reached = [at for at in range(len(chunks)) if starts[at] < stop and starts[at + 1] > start]
            parts = [(input_ids[chunks[at]], attention_mask[chunks[at]], int(starts[at])) for at in reached]
            return reduce(self._again(partial(forward, model), parts, tokens, start, stop))

        features = self._allocate(int(starts[-1]), inputs.get("pixel_values") is not None, recompute)
        taken = 0

        def keep(rows: Tensor) -> None:
            nonlocal taken
            positions = np.arange(taken, taken + len(rows))
            taken += len(rows)
            features.put(positions, rows)

        with self._watch(input_ids[:, -tokens:], mask, keep):
            logps, entropies, _ = forward(
                model,
                input_ids,
                attention_mask,
                tokens,
                batch_size=batch_size,
                compute_entropy=compute_entropy,
                **inputs,
            )
        return ScoredCompletions(logps, entropies, mask, features)

    def _again(
        self, forward: Forward, parts: list[tuple[Tensor, Tensor, int]], tokens: int, start: int, stop: int
    ) -> PositionedRows:
        """Flat positions and rows of the tokens start:stop, by a forward of each part (ids, attention, first token)."""
        for ids, attention, first in parts:
            found: list[Tensor] = []
            with self.scoring(), self._watch(ids[:, -tokens:], attention[:, -tokens:].bool(), found.append):
                forward(ids, attention, tokens)
            rows = torch.cat(found)
            positions = np.arange(first, first + len(rows))
            inside = (positions >= start) & (positions < stop)
            yield positions[inside], rows[torch.from_numpy(inside).to(rows.device)]

    @contextmanager
    def scoring(self) -> Iterator[None]:
        """The conditions of TRL's own scoring forward; the state of the random generators is restored afterwards."""
        trainer = self._trainer
        device = trainer.accelerator.device
        devices = [device] if device.type == "cuda" else []
        with (
            torch.no_grad(),
            torch.random.fork_rng(devices),
            disable_gradient_checkpointing(trainer.model, trainer.args.gradient_checkpointing_kwargs),
        ):
            yield

    @contextmanager
    def _watch(self, targets: Tensor, mask: Tensor, keep: Callable[[Tensor], None]) -> Iterator[None]:
        """Pass the feature rows of the masked tokens [B, T] to ``keep`` on every forward of the backbone."""
        row, tokens = 0, mask.shape[1]

        def hook(_: Any, __: Any, output: Any) -> None:
            nonlocal row
            hidden = output.last_hidden_state[:, -tokens - 1 : -1]  # [b, T, H] predicts the completion's tokens
            part = slice(row, row + len(hidden))
            row += len(hidden)
            chosen = mask[part].to(hidden.device)
            keep(self._rows(hidden[chosen], targets[part].to(hidden.device)[chosen]))

        handle = self._causal.base_model.register_forward_hook(hook)
        try:
            yield
        finally:
            handle.remove()

    @torch.no_grad()
    def _rows(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Unscaled features [n, H] of tokens ``targets`` [n] predicted from ``hidden`` [n, H]."""
        if self._proxy.kind == "output_row":
            return hidden.detach()
        weight = self._causal.get_output_embeddings().weight
        if isinstance(weight, DTensor):
            weight = weight.full_tensor()
        mixed = self._dtype() == torch.bfloat16 and hidden.device.type == "cuda"  # CPUs have no bf16 → float32 product
        with maybe_gather_lm_head_ctx(weight), torch.autocast(hidden.device.type, enabled=False):
            head = TorchHead(weight.detach().to(hidden.device, torch.bfloat16 if mixed else torch.float32), HEAD_CHUNK)
            found = head.statistics(
                hidden, targets, self._trainer.temperature, entropies=False, proxy=self._proxy
            ).hidden_gradients
        assert found is not None
        return found

    def _allocate(self, count: int, images: bool, recompute: Any) -> TorchFeatures:
        """Allocate ``count`` features within the byte budgets; ``recompute`` provides the rest."""
        size, dtype = self._config.hidden_size, self._dtype()
        if count * size * dtype.itemsize > sum(self._budgets) and (reason := self._kept_whole(images)):
            raise ValueError(
                f"the features of {count} tokens take {count * size * dtype.itemsize} bytes, more than "
                f"delta_feature_bytes and delta_feature_host_bytes together, and {reason}; raise one of them"
            )
        return TorchFeatures.allocate(count, size, dtype, self._device(), self._budgets, recompute)

    def _kept_whole(self, images: bool) -> str | None:
        """Why features cannot be recomputed, or None."""
        if self._trainer.is_fsdp_enabled or self._trainer.is_deepspeed_enabled:
            return "with a sharded model all processes would have to recompute equally many of them"
        return "prompts with images are not scored twice" if images else None

    def _device(self) -> torch.device:
        """The device of the features: it needs float64 for the sums, which Apple's GPU does not have."""
        device = self._trainer.accelerator.device
        return torch.device("cpu") if device.type == "mps" else device

    def _dtype(self) -> torch.dtype:
        """The type of the computation, which is also that of the features."""
        mixed = {"bf16": torch.bfloat16, "fp16": torch.float16}
        precision: str = self._trainer.accelerator.mixed_precision
        own: torch.dtype = self._causal.dtype
        return mixed.get(precision, own)

    def _check_head(self) -> None:
        """Raise ValueError if the head is more than a matrix, because the hidden_* proxies assume a matrix."""
        head = self._causal.get_output_embeddings()
        found = [name for name in _LOGIT_TRANSFORMS if getattr(self._config, name, None) not in (None, 1)]
        if getattr(head, "bias", None) is not None:
            found.append("a bias of the head")
        if found:
            raise ValueError(
                f"delta_proxy '{self._proxy.kind}' does not support this model's logits ({found[0]}); "
                "set delta_proxy='output_row'"
            )
