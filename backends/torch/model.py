"""Load a causal language model and split it into trunk, head and adapters."""

from __future__ import annotations

import contextlib
import copy
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors import safe_open
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from backends.batching import PackedBatch, pack
from backends.interface import BackendError, Sequences
from backends.settings import BackendSettings
from backends.torch import adapters, attention, four_bits
from backends.torch.attention import PackedLayout
from backends.torch.head import TorchHead
from backends.weights import refuse_nonfinite, refuse_too_many_layers, refuse_unexpected

COMPANIONS = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken")  # the files of a model folder besides its weights
_ATTENTION = {"full_attention", "sliding_attention"}
_STATE = (
    "model '{}' has layers of type {}, which pass a state from token to token; in the packed rows of this backend the "
    "state would run from one response into the next; train it with --backend mlx, or choose a transformer"
)
_OWN_ATTENTION = (
    "model '{}' computes its attention outside transformers' attention interface, so responses cannot share their "
    "prompt; choose another architecture"
)


class TorchPolicy:
    """A causal language model as a trunk, which computes post-norm hidden states, and a head.

    ``dtype`` is the type of the compute. Trained weights are always float32; bfloat16 products run under autocast,
    which casts each weight once while the context of :meth:`compute` is open.
    """

    def __init__(self, causal: Any, folder: Path, dtype: torch.dtype) -> None:
        self.causal = causal.eval()  # no dropout anywhere, so that ratios start at 1
        four_bits.keep_differentiable(causal)
        self.folder = folder
        self.dtype = dtype
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
        return {kind: window if kind == "sliding_attention" else 0 for kind in kinds}

    @property
    def layer_windows(self) -> tuple[int, ...]:
        """The window of each layer in tokens; 0 means all."""
        kinds = getattr(self.config, "layer_types", None)
        windows = self.windows
        return tuple(windows[kind] for kind in kinds or [*windows] * self.config.num_hidden_layers)

    def trained(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Names and weights that updates change."""
        return ((name, weight) for name, weight in self.causal.named_parameters() if weight.requires_grad)

    def compute(self, cached: bool = True) -> torch.autocast:
        """The context of forward passes; ``cached`` keeps the bfloat16 copies of weights between them."""
        mixed = self.dtype == torch.bfloat16
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=mixed, cache_enabled=cached)

    def hidden(self, ids: Tensor, **inputs: Any) -> Tensor:
        """Post-norm hidden states [B, T, H] of ids [B, T], times the model's logit scale if it has one."""
        trunk = getattr(self.causal, "trunk", self.causal.base_model)  # the former where weights are split over ranks
        states: Tensor = trunk(input_ids=ids, **inputs).last_hidden_state
        return states if self.output_scale == 1 else states * self.output_scale

    def packed_hidden(self, batch: PackedBatch, cache: Any = None, layout: PackedLayout | None = None) -> Tensor:
        """Post-norm hidden states [T, H] of a packed row; stores keys and values in ``cache``."""
        return self.hidden(
            torch.from_numpy(batch.ids).to(self.device)[None],
            position_ids=torch.from_numpy(batch.positions).to(self.device)[None],
            layout=layout or PackedLayout.of(batch, self.layer_windows, self.device),
            past_key_values=cache,
            use_cache=cache is not None,
        )[0]

    def head(self, chunk: int) -> TorchHead:
        """The present head. On CUDA with bfloat16 it holds a copy of the weight, so release it soon."""
        mixed = self.dtype == torch.bfloat16 and self.device.type == "cuda"  # a CPU has no bf16 → float32 product
        weight = self.head_weight.detach().to(torch.bfloat16 if mixed else torch.float32)
        return TorchHead(weight, chunk, getattr(self.config, "final_logit_softcapping", None))

    def frozen_copy(self) -> TorchPolicy:
        """A second model that computes exactly what this one computes now, with matrices in the compute dtype."""
        causal = copy.deepcopy(self.causal).requires_grad_(False)
        for module in causal.base_model.modules():
            if isinstance(module, nn.Linear):
                module.to(self.dtype)
        return TorchPolicy(causal, self.folder, self.dtype)

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
        adapters.renew(self.causal)

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


def dense_gradient(weight: Tensor | None) -> Tensor | None:
    """The gradient of a weight, zeros if it has none yet; None for weights without a gradient."""
    if weight is None or not weight.requires_grad:
        return None
    if weight.grad is None:
        weight.grad = torch.zeros_like(weight)
    return weight.grad


def load_policy(settings: BackendSettings, device: torch.device) -> TorchPolicy:
    """Load the model of ``settings`` on ``device``. Raises BackendError with one line."""
    model = settings.model
    folder = _resolve(model.path)
    if model.dtype == "float16":
        raise BackendError(
            'model.dtype = "float16" is for Macs without bfloat16 (--backend mlx); here choose "bfloat16" or "float32"'
        )
    dtype = torch.bfloat16 if model.dtype == "bfloat16" else torch.float32
    stored = dtype if model.lora else torch.float32  # trained weights are float32; a frozen base need not be
    packing = four_bits.settings(dtype) if model.load_in_4bit else None
    policy = TorchPolicy(_read(folder, model.path, stored, device, packing), folder, dtype)
    if not Path(model.path).expanduser().is_dir():
        policy.causal.name_or_path = model.path  # adapters name the hub model as their base, not a local cache folder
    _check_trunk(policy, model.path)
    if model.gradient_checkpointing:
        causal = policy.causal  # older versions of transformers only know the other name
        enable = getattr(causal, "activation_checkpointing_enable", None) or causal.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    if settings.frozen:
        policy.causal.requires_grad_(False)
    if model.lora:
        policy.peft = adapters.attach(policy.causal, model.lora, model.adapter, settings.seed)
        four_bits.keep_differentiable(policy.causal)
    return policy


def _resolve(model: str) -> Path:
    """The folder of a model: itself, or its snapshot from the Hugging Face hub."""
    folder = Path(model).expanduser()
    if not folder.is_dir():
        if folder.is_absolute() or model.startswith((".", "~")) or model.count("/") > 1:
            raise BackendError(
                f"model folder '{model}' does not exist; give a folder or a name on the Hugging Face hub"
            )
        folder = _download(model)
    if not (folder / "config.json").is_file():
        raise BackendError(f"model '{model}' has no config.json, so it is not a model folder; choose another")
    if not any(folder.glob("*.safetensors")):
        pickled = any(folder.glob("*.bin")) or any(folder.glob("*.pt*"))
        why = "has only pickled weights, which can run code when opened" if pickled else "has no *.safetensors weights"
        raise BackendError(f"model '{model}' {why}; use a version saved as safetensors")
    return folder


def _download(name: str) -> Path:
    import huggingface_hub

    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=[*COMPANIONS, "*.safetensors"]))
    except (OSError, ValueError, huggingface_hub.errors.HfHubHTTPError) as error:
        raise BackendError(
            f"model '{name}' is no local folder and cannot be downloaded from the Hugging Face hub "
            f"({_first_line(error)}); check the name and the connection"
        ) from error


def _read(folder: Path, name: str, dtype: torch.dtype, device: torch.device, packing: Any = None) -> Any:
    """The model in ``folder`` with every weight read from its files; ``packing`` says how matrices are quantised."""
    config = _config(folder, name)
    _check_size(config, folder, name)
    logging = transformers.utils.logging
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            attn_implementation=attention.NAME,
            use_safetensors=True,
            trust_remote_code=False,
            ignore_mismatched_sizes=True,  # reported below, by name
            output_loading_info=True,
            **({"quantization_config": packing, "device_map": {"": device}} if packing else {}),
        )
    except Exception as error:  # a broken file can make transformers raise anything
        if attention.NAME in str(error):
            raise BackendError(_OWN_ATTENTION.format(name)) from error
        raise BackendError(f"model '{name}' cannot be loaded: {_first_line(error)}; check its files") from error
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
    broken = sorted({*info["missing_keys"], *(name for name, *_ in info["mismatched_keys"])})
    if broken:
        raise BackendError(
            f"model '{name}': its weights do not fit its config.json: {len(broken)} are missing or have another shape, "
            f"{broken[0]} among them; get its files again"
        )
    refuse_unexpected(f"model '{name}'", info["unexpected_keys"])
    refuse_nonfinite(
        f"model '{name}'", (key for key, weight in model.named_parameters() if not weight.isfinite().all())
    )
    model.get_input_embeddings().padding_idx = None  # if padding is also the end of sequence, it must be learned
    return model if packing else model.to(device)


def _check_size(config: Any, folder: Path, name: str) -> None:
    """Refuse a configuration that needs far more weights than the files hold, before allocating them.

    A broken config.json falls back on the defaults of its architecture, which may be billions of weights.
    """
    try:
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=False)
        asked = sum(weight.numel() for weight in model.parameters())
        there = 0
        for file in folder.glob("*.safetensors"):
            with safe_open(file, "pt") as stored:
                there += sum(math.prod(stored.get_slice(key).get_shape()) for key in stored.keys())  # noqa: SIM118
    except Exception as error:  # a broken file can make the libraries raise anything
        raise BackendError(f"model '{name}' cannot be loaded: {_first_line(error)}; check its files") from error
    if asked > 2 * there:
        raise BackendError(
            f"model '{name}': its weights do not fit its config.json, which asks for {asked:,} numbers, while its "
            f"files have {there:,}; get its files again"
        )


def _config(folder: Path, name: str) -> Any:
    """The model's configuration; refuses models that cannot be trained here."""
    try:
        plain = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        if isinstance(plain, dict):
            refuse_too_many_layers(folder, plain)
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except BackendError:
        raise
    except Exception as error:  # broken JSON, unknown model types, wrong fields
        if "trust_remote_code" in str(error):
            raise BackendError(
                f"model '{name}' brings Python code of its own, which is never run here; "
                "choose a model whose architecture is part of transformers"
            ) from error
        raise BackendError(f"model '{name}' has a config.json that cannot be used: {_first_line(error)}") from error
    if getattr(config, "quantization_config", None):
        raise BackendError(f"model '{name}' is quantised and cannot be trained; choose its unquantised version")
    text = config.get_text_config()
    unknown = sorted(set(getattr(text, "layer_types", None) or ()) - _ATTENTION)
    if unknown:
        raise BackendError(_STATE.format(name, unknown[0]))
    if text is not config:
        raise BackendError(
            f"model '{name}' is a '{config.model_type}', which has more parts than the language model that this "
            "backend trains; choose a text-only version, or --backend mlx"
        )
    return config


@torch.no_grad()
def _check_trunk(policy: TorchPolicy, name: str) -> None:
    """Refuse a model whose logits are not head · trunk of a packed row, because its numbers would be silently wrong."""
    head = policy.causal.get_output_embeddings()
    if not isinstance(head, nn.Linear) or head.bias is not None:
        raise BackendError(
            f"model '{name}' has no output layer, or one with a bias, which is not supported; choose another"
        )
    ids = np.arange(4) % policy.vocabulary
    row = torch.from_numpy(ids).to(policy.device)[None]
    batch = pack(Sequences((ids[:2], ids[:2]), np.tile(ids[2:], 2), np.array([0, 2, 4])), [[0, 1]])
    layout = PackedLayout.of(batch, policy.layer_windows, policy.device)
    try:
        with policy.compute():
            expected = policy.causal(input_ids=row, use_cache=False).logits[0].float()
            plain = policy.hidden(row, use_cache=False)[0]
            packed = policy.packed_hidden(batch, layout=layout)
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        raise BackendError(f"model '{name}' cannot be run: {_first_line(error)}; choose another") from error
    tolerance = (0.05 if policy.dtype == torch.bfloat16 else 1e-3) * expected.abs().max()
    head = policy.head(len(ids))
    if (head.logits(plain, 1.0) - expected).abs().max() > tolerance:
        raise BackendError(
            f"model '{name}' computes its logits with more than the output matrix, a scale and a cap, which is not "
            "supported; choose another"
        )
    every = set(range(policy.config.num_hidden_layers))
    if layout.reached != every or (head.logits(packed, 1.0) - expected[[0, 1, 2, 2]]).abs().max() > tolerance:
        raise BackendError(_OWN_ATTENTION.format(name))


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
