"""From a folder or a hub name to an mlx-lm model whose trunk and head can be called one after the other."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from huggingface_hub import snapshot_download
from mlx.utils import tree_flatten
from mlx_lm.models import gemma2
from mlx_lm.models.rope_utils import SuScaledRoPE
from mlx_lm.utils import DEFAULT_ALLOW_PATTERNS, load_model, quantize_model

from backends.interface import BackendError
from backends.mlx.head import MlxHead
from backends.weights import refuse_nonfinite, refuse_too_many_layers

WRONG = {  # what mlx-lm 0.32 does wrong with these
    "jamba": "draw wrong tokens in mlx-lm's batches",
    "falcon_h1": "lack their key_multiplier in mlx-lm",
}
GROUP = 64  # numbers that share a scale where the base is quantised here, as in mlx-lm


@dataclass(frozen=True)
class MlxPolicy:
    """A language model and the names under which its two halves are found."""

    model: nn.Module
    folder: Path  # it was loaded from
    prefix: str  # of the text model's parameters: "" or "language_model."
    window: int | None = None  # tokens beyond which mlx-lm computes another model

    @property
    def text(self) -> nn.Module:
        """The text model, which holds trunk and head."""
        return self.model.language_model if self.prefix else self.model

    @property
    def trunk(self) -> Callable[..., mx.array]:
        """Ids [B, T] → hidden states [B, T, H] after the last norm, times the scale of the logits if there is one."""
        model: Callable[..., mx.array] = self.text.model
        scale = self.output_scale
        return model if scale == 1 else lambda *args, **options: model(*args, **options) * scale

    @property
    def output_scale(self) -> float:
        """The factor of the logits, under any of the names that configurations have for it."""
        args = getattr(self.text, "args", None)
        return float(getattr(args, "logit_scale", None) or 1) / float(getattr(args, "logits_scaling", None) or 1)

    @property
    def softcap(self) -> float | None:
        """Logits stay within ± this, where the model caps them."""
        return getattr(getattr(self.text, "args", None), "final_logit_softcapping", None)

    @property
    def quantised(self) -> bool:
        """Whether any layer holds packed weights."""
        return any(hasattr(module, "bits") for _, module in self.model.named_modules())

    @property
    def vocabulary(self) -> int:
        """Ids the model can read and write."""
        return min(len(self.head().weight), len(self.text.model.embed_tokens.weight))

    def head(self) -> MlxHead:
        """The LM head with the weights of this moment."""
        if "lm_head" in self.text:
            return MlxHead.of(self.text.lm_head, f"{self.prefix}lm_head", self.softcap)
        return MlxHead.of(self.text.model.embed_tokens, f"{self.prefix}model.embed_tokens", self.softcap)

    @property
    def attention_shape(self) -> tuple[int, int, int]:
        """Query heads, key heads and numbers in a head; usual ones where the configuration names them otherwise."""
        args = getattr(self.text, "args", None)
        heads = int(getattr(args, "num_attention_heads", None) or 4)
        size = getattr(args, "head_dim", None) or getattr(args, "hidden_size", 64 * heads) // heads
        return heads, int(getattr(args, "num_key_value_heads", None) or heads), int(size)

    @property
    def recurrence_shape(self) -> tuple[int, int, int] | None:
        """Key heads, value heads and key size of the gated delta rule; None if the model has no such layers."""
        args = getattr(self.text, "args", None)
        names = ("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim")
        if not all(getattr(args, name, None) for name in names):
            return None
        key_heads, heads, size = (int(getattr(args, name)) for name in names)
        return key_heads, heads, size

    def check_length(self, tokens: int) -> None:
        """Raise BackendError for a sequence so long that mlx-lm computes another model.

        It leaves out some models' sliding window, and has only one of the two sets of rotary factors of LongRoPE.
        """
        if self.window is not None and tokens > self.window:
            raise BackendError(
                f"{tokens} tokens, but beyond {self.window} mlx-lm computes models of type '{self.model.model_type}' "
                "otherwise than they were made; keep prompt and response within it, or choose --backend cpu or cuda"
            )

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


def load(name: str, in_4bit: bool = False) -> MlxPolicy:
    """Load a model folder, or a model from the hub, with the weights as they are stored, or quantised to 4 bits.

    Raises BackendError where the folder, its config or its weights are missing or broken, where
    the model wants its own code, and where trunk and head do not compose to the whole model.
    """
    folder = find(name)
    config = _config(folder)
    refuse_too_many_layers(folder, config)
    try:
        model, config = load_model(folder, model_config=_changes(config))
    except KeyError as error:
        raise BackendError(f"cannot load the model in {folder}: its config.json lacks or misnames {error}") from error
    except (OSError, ValueError, TypeError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0].rstrip(".:")
        raise BackendError(
            f"cannot load the model in {folder}: {reason}; it takes a config.json, model*.safetensors "
            "and an architecture that mlx-lm knows"
        ) from error
    if (kind := getattr(model, "model_type", None)) in WRONG:
        raise BackendError(f"models of type '{kind}' {WRONG[kind]}; choose --backend cpu or cuda")
    policy = MlxPolicy(model, folder, "language_model." if "language_model" in model else "")
    window = _lost_window(config.get("text_config") or config, getattr(policy.text, "args", None))
    policy = replace(policy, window=_short_rotary_factors(policy.text, config) or window)
    for layer in policy.text.layers:
        if type(attention := getattr(layer, "self_attn", None)) is gemma2.Attention:
            attention.__class__ = _Gemma2Attention
    refuse_nonfinite(folder, nonfinite(dict(tree_flatten(model.parameters()))))
    if in_4bit and not policy.quantised:
        with contextlib.redirect_stdout(io.StringIO()):  # it prints what it has done
            quantize_model(model, config, GROUP, 4)
        mx.eval(model.parameters())
    check_trunk_and_head(policy)
    return policy


class _Gemma2Attention(gemma2.Attention):
    """mlx-lm's own, whose scores have an axis more than the masks of batches: [B, heads, repeats, tokens, keys]."""

    def __call__(self, x: mx.array, mask: mx.array | None = None, cache: Any = None) -> mx.array:
        if mask is not None and mask.ndim == 4 and self.repeats > 1:
            mask = mask[:, :, None]
        attended: mx.array = super().__call__(x, mask, cache)
        return attended


def _rope(config: dict[str, Any]) -> dict[str, Any]:
    """Rotary embeddings as mlx-lm reads them, of a config.json of transformers 5, which names them otherwise.

    Without this most architectures would take their default base, and the log-probabilities would be another
    model's.
    """
    found = config.get("rope_parameters")
    if not isinstance(found, dict):
        return {}
    whole = found.get("full_attention") or found
    names: dict[str, Any] = {key: whole[key] for key in ("rope_theta", "partial_rotary_factor") if key in whole}
    if "rope_theta" in (sliding := found.get("sliding_attention") or {}):
        names["rope_local_base_freq"] = sliding["rope_theta"]
    kind = whole.get("rope_type", "default")
    names["rope_scaling"] = None if kind == "default" else {**whole, "type": kind}
    return {key: value for key, value in names.items() if config.get(key) is None}


def _changes(config: dict[str, Any]) -> dict[str, Any]:
    """The entries of config.json that mlx-lm must read differently; a text model may be described inside it."""
    changes, text = _rope(config), config.get("text_config")
    if isinstance(text, dict) and (names := _rope(text)):
        changes["text_config"] = text | names
    return changes


def _config(folder: Path) -> dict[str, Any]:
    """config.json; empty where it is missing or broken, which mlx-lm reports."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


def _lost_window(config: dict[str, Any], args: Any) -> int | None:
    """Tokens that layers look back on by config.json, where mlx-lm computes the model without that limit."""
    window, kinds = config.get("sliding_window"), config.get("layer_types")
    if not window or not config.get("use_sliding_window", True) or (kinds and "sliding_attention" not in kinds):
        return None
    slides = "sliding_attention" in (getattr(args, "layer_types", None) or ["sliding_attention"])
    return None if slides and getattr(args, "sliding_window", None) is not None else int(window)


def _short_rotary_factors(text: nn.Module, config: dict[str, Any]) -> int | None:
    """Give LongRoPE its factors for short sequences; returns the tokens up to which they hold.

    mlx-lm takes those for long sequences at every length. None if the model has no such factors.
    """
    ropes = [module for _, module in text.named_modules() if isinstance(module, SuScaledRoPE)]
    for rope in ropes:
        factors = config["rope_scaling"]
        rope._freqs = rope._freqs * mx.array(factors["short_factor"]) / mx.array(factors["long_factor"])
    return ropes[0].original_max_position_embeddings if ropes else None


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
        raise BackendError(
            f"model '{name}' is not a local folder and cannot be downloaded from the hub: {reason}"
        ) from error


def check_trunk_and_head(policy: MlxPolicy) -> None:
    """Raise BackendError unless head(trunk(ids)) is what the whole model computes.

    Some architectures do more to their logits; what is computed from the halves would be wrong.
    """
    kind = getattr(policy.model, "model_type", type(policy.model).__name__)
    ids = mx.array([[0, 1, 2]])
    try:
        head, text = policy.head(), policy.text
        # with the layer itself, which rounds as the whole model does
        halves = (text.lm_head if "lm_head" in text else text.model.embed_tokens.as_linear)(policy.trunk(ids))
        if head.softcap is not None:
            halves = head.softcap * mx.tanh(halves / head.softcap)
        whole = policy.model(ids)
    except (AttributeError, TypeError) as error:
        raise BackendError(
            f"models of type '{kind}' keep trunk and head where the mlx backend cannot find them; choose another "
            "architecture, or --backend cpu or cuda"
        ) from error
    if head.bias or not mx.allclose(halves, whole, rtol=1e-3, atol=1e-3).item():
        raise BackendError(
            f"models of type '{kind}' put more than one matrix, a scale and a cap between trunk and logits, which the "
            "mlx backend does not know; choose --backend cpu or cuda"
        )
