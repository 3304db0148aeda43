"""From a folder or a hub name to an mlx-lm model whose trunk and head can be called one after the other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from huggingface_hub import snapshot_download
from mlx.utils import tree_flatten
from mlx_lm.utils import DEFAULT_ALLOW_PATTERNS, load_model

from backends.interface import BackendError
from backends.mlx.head import Head
from backends.weights import refuse_nonfinite


@dataclass(frozen=True)
class Policy:
    """A language model and the names under which its two halves are found."""

    model: nn.Module
    folder: Path  # it was loaded from
    prefix: str  # of the text model's parameters: "" or "language_model."

    @property
    def text(self) -> nn.Module:
        """The text model, which holds trunk and head."""
        return self.model.language_model if self.prefix else self.model

    @property
    def trunk(self) -> Callable[..., mx.array]:
        """Ids [B, T] → hidden states [B, T, H] after the last norm."""
        trunk: Callable[..., mx.array] = self.text.model
        return trunk

    @property
    def quantised(self) -> bool:
        """Whether any layer holds packed weights."""
        return any(hasattr(module, "bits") for _, module in self.model.named_modules())

    @property
    def vocabulary(self) -> int:
        """Ids the model can read and write."""
        return min(len(self.head().weight), len(self.text.model.embed_tokens.weight))

    def head(self) -> Head:
        """The LM head with the weights of this moment."""
        if "lm_head" in self.text:
            return Head.of(self.text.lm_head, f"{self.prefix}lm_head")
        return Head.of(self.text.model.embed_tokens, f"{self.prefix}model.embed_tokens")

    def cast(self, dtype: mx.Dtype) -> None:
        """Store the weights in this type, but float16 scales of quantised layers, which bfloat16 would round."""
        kept = [
            (module, {key: module[key] for key in ("scales", "biases") if key in module})
            for _, module in self.model.named_modules()
            if hasattr(module, "bits") and module.scales.dtype == mx.float16
        ]
        self.model.set_dtype(dtype)
        for module, arrays in kept:
            module.update(arrays)


def load(name: str) -> Policy:
    """Load a model folder, or a model from the hub, with the weights as they are stored.

    Raises BackendError where the folder, its config or its weights are missing or broken, where
    the model wants its own code, and where trunk and head do not compose to the whole model.
    """
    folder = find(name)
    try:
        model, _ = load_model(folder)
    except KeyError as error:
        raise BackendError(f"cannot load the model in {folder}: its config.json lacks or misnames {error}") from error
    except (OSError, ValueError, TypeError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0].rstrip(".:")
        raise BackendError(
            f"cannot load the model in {folder}: {reason}; it takes a config.json, model*.safetensors "
            "and an architecture that mlx-lm knows"
        ) from error
    policy = Policy(model, folder, "language_model." if "language_model" in model else "")
    refuse_nonfinite(folder, nonfinite(dict(tree_flatten(model.parameters()))))
    check_halves(policy)
    return policy


def nonfinite(weights: dict[str, mx.array]) -> list[str]:
    """Names of the weights that hold NaN or infinity; packed ones are integers and cannot."""
    real = {name: weight for name, weight in weights.items() if mx.issubdtype(weight.dtype, mx.floating)}
    found = {name: mx.isfinite(weight).all() for name, weight in real.items()}
    mx.eval(found)
    return [name for name, finite in found.items() if not finite.item()]


def find(name: str) -> Path:
    """The folder of a model: ``name`` itself, or what the hub calls so. Raises BackendError."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise BackendError(f"model '{name}' is a file; give the folder that holds config.json")
    if name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise BackendError(f"model folder '{name}' does not exist; give a model folder or a hub name like owner/name")
    try:
        return Path(snapshot_download(name, allow_patterns=DEFAULT_ALLOW_PATTERNS))
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise BackendError(f"model '{name}' is no folder here and cannot be had from the hub: {reason}") from error


def check_halves(policy: Policy) -> None:
    """Raise BackendError unless head(trunk(ids)) is what the whole model computes.

    Some architectures scale or cap their logits; what is computed from the halves would be wrong.
    """
    kind = getattr(policy.model, "model_type", type(policy.model).__name__)
    ids = mx.array([[0, 1, 2]])
    try:
        head, text = policy.head(), policy.text
        # with the layer itself, which rounds as the whole model does
        halves = (text.lm_head if "lm_head" in text else text.model.embed_tokens.as_linear)(policy.trunk(ids))
    except AttributeError as error:
        raise BackendError(
            f"models of type '{kind}' keep trunk and head where the mlx backend cannot find them"
        ) from error
    if head.bias or not mx.allclose(halves, policy.model(ids), rtol=1e-3, atol=1e-3).item():
        raise BackendError(
            f"models of type '{kind}' put more than one matrix between trunk and logits, which the mlx backend "
            "does not know; choose --backend cpu or cuda"
        )
