"""Load a causal language model, and refuse the ones that cannot be trained here."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors import safe_open
from torch import nn

from backends.batching import pack
from backends.collective import any_of, from_first
from backends.interface import BackendError, Collective, Sequences
from backends.settings import BackendSettings
from backends.torch import adapters, attention, four_bits, recurrent
from backends.torch.model import BY_TOKEN, COMPANIONS, WITHOUT_ATTENTION, TorchPolicy, layout_of
from backends.torch.parts import LanguagePart
from backends.weights import refuse_nonfinite, refuse_too_many_layers, refuse_unexpected

_ONE_THREAD = threading.Lock()
_ATTENTION = {"full_attention", "sliding_attention", "hybrid"}  # hybrid: attention beside a recurrence
_OWN_ATTENTION = (
    "model '{}' computes its attention outside transformers' attention interface, so responses cannot share their "
    "prompt; choose another architecture"
)


@contextmanager
def exclusive_transformers() -> Iterator[None]:
    """Make, read or write a model with transformers: one thread at a time, without its progress bars and warnings.

    Meanwhile transformers changes settings of the whole process, such as torch's default dtype and its own logging, so
    models that two threads make at once can get the wrong dtype or weights.
    """
    logging = transformers.utils.logging
    with _ONE_THREAD:
        verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        try:
            yield
        finally:
            logging.set_verbosity(verbosity)
            if bars:
                logging.enable_progress_bar()


def load_policy(settings: BackendSettings, device: torch.device) -> TorchPolicy:
    """Load the model of ``settings`` on ``device``. Raises BackendError with one line."""
    model = settings.model
    folder = resolve_folder(model.path)
    if model.dtype == "float16":
        raise BackendError(
            'model.dtype = "float16" is for Macs without bfloat16 (--backend mlx); here choose "bfloat16" or "float32"'
        )
    dtype = torch.bfloat16 if model.dtype == "bfloat16" else torch.float32
    packing = four_bits.quantization_config(dtype) if model.load_in_4bit else None
    policy = _read(folder, model.path, dtype, device, packing)
    if not Path(model.path).expanduser().is_dir():
        policy.causal.name_or_path = model.path  # adapters name the hub model as their base, not a local cache folder
    policy.carries_state = recurrent.adopt(policy.causal)
    _check_trunk(policy, model.path)
    _prepare(policy, settings)
    if model.lora:
        policy.mixed = dtype == torch.bfloat16
        policy.peft = adapters.attach(policy.causal, model.lora, model.adapter, settings.seed)
        four_bits.keep_differentiable(policy.causal)
    return policy


def load_for_rank(
    settings: BackendSettings, device: torch.device, ranks: Collective, splits: Callable[[int], bool]
) -> TorchPolicy:
    """Load a model on ``device``, or with several ranks on the host, because it may not fit a GPU before it is split.

    ``splits`` says whether so many trained weights are split. If they are, the first rank loads the model, and the
    others get its layers one by one as they are split. Otherwise, or if the model cannot be made without its numbers,
    every rank loads it. Raises BackendError on all ranks if the first one does.
    """
    if ranks.size == 1:
        return load_policy(settings, device)
    cpu = torch.device("cpu")
    empty = _empty(settings)
    if any_of(ranks, empty is None or not splits(sum(weight.numel() for _, weight in empty.trained()))):
        return load_policy(settings, cpu)
    assert empty is not None
    policy, fault = empty, None
    if ranks.rank == 0:
        try:
            policy = load_policy(settings, cpu)
        except BackendError as error:
            fault = str(error)
    found, fault = from_first(ranks, (layout_of(policy), fault))
    if fault is not None:
        raise BackendError(fault)
    if any_of(ranks, layout_of(policy) != found):
        return policy if ranks.rank == 0 else load_policy(settings, cpu)
    policy.loaded_on_first = True
    return policy


def _empty(settings: BackendSettings) -> TorchPolicy | None:
    """The model of ``settings`` on the meta device; None for adapters, 4 bits and recurrent layers."""
    model = settings.model
    if model.lora or model.load_in_4bit:
        return None
    folder, dtype = resolve_folder(model.path), torch.bfloat16 if model.dtype == "bfloat16" else torch.float32
    config, part = _config(folder, model.path)
    try:
        with exclusive_transformers(), torch.device("meta"):
            causal = transformers.AutoModelForCausalLM.from_config(
                config, dtype=dtype, attn_implementation=attention.NAME, trust_remote_code=False
            )
    except Exception:
        return None
    if any(recurrent.is_recurrent(module) for module in causal.modules()):
        return None
    causal.get_input_embeddings().padding_idx = None
    policy = TorchPolicy(causal, folder, dtype, part)
    _prepare(policy, settings)
    return policy


def _prepare(policy: TorchPolicy, settings: BackendSettings) -> None:
    """Switch on gradient checkpointing, and freeze the weights, if the settings ask for it."""
    if settings.model.gradient_checkpointing:
        causal = policy.causal  # older versions of transformers only know the other name
        enable = getattr(causal, "activation_checkpointing_enable", None) or causal.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    if settings.frozen:
        policy.causal.requires_grad_(False)


def resolve_folder(model: str) -> Path:
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
            f"model '{name}' is not a local folder and cannot be downloaded from the Hugging Face hub "
            f"({_first_line(error)}); check the name and the connection"
        ) from error


def _read(folder: Path, name: str, dtype: torch.dtype, device: torch.device, packing: Any = None) -> TorchPolicy:
    """The model in ``folder`` with every weight read from its files; ``packing`` says how matrices are quantised."""
    config, part = _config(folder, name)
    _check_size(config, folder, name)
    try:
        with exclusive_transformers():
            model, info = transformers.AutoModelForCausalLM.from_pretrained(
                folder,
                config=config,
                dtype=dtype,
                key_mapping=part.renamings if part else None,
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
    broken = sorted({*info["missing_keys"], *(name for name, *_ in info["mismatched_keys"])})
    if broken:
        raise BackendError(
            f"model '{name}': its weights do not fit its config.json: {len(broken)} are missing or have another shape, "
            f"{broken[0]} among them; get its files again"
        )
    unexpected = info["unexpected_keys"]
    if part:  # the other parts' weights, under whatever names transformers gave them, are not the language model's
        unexpected = [key for key in unexpected if key.startswith(("model.layers.", "lm_head."))]
    refuse_unexpected(f"model '{name}'", unexpected)
    refuse_nonfinite(
        f"model '{name}'", (key for key, weight in model.named_parameters() if not weight.isfinite().all())
    )
    model.get_input_embeddings().padding_idx = None  # if padding is also the end of sequence, it must be learned
    policy = TorchPolicy(model if packing else model.to(device), folder, dtype, part)
    # Some architectures keep a few weights in float32, which only autocast can mix with others.
    kept = packing is not None or any(weight.dtype != dtype for weight in model.parameters())
    policy.mixed = kept and dtype == torch.bfloat16
    return policy


def _check_size(config: Any, folder: Path, name: str) -> None:
    """Refuse a configuration that needs far more weights than the files hold, before allocating them.

    A broken config.json falls back on the defaults of its architecture, which may be billions of weights.
    """
    try:
        with exclusive_transformers(), torch.device("meta"):
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


def _config(folder: Path, name: str) -> tuple[Any, LanguagePart | None]:
    """The language model's configuration, and where it is if the folder holds more; refuses what cannot be trained."""
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
    text, part = config.get_text_config(), None
    unknown = sorted(set(getattr(text, "layer_types", None) or ()) - _ATTENTION - WITHOUT_ATTENTION)
    if unknown:
        raise BackendError(
            f"model '{name}' has layers of type {unknown[0]}, which this backend does not know; choose another model"
        )
    if text is not config:
        known = transformers.MODEL_FOR_CAUSAL_LM_MAPPING
        alone = type(config) in known and known[type(config)].config_class is type(text)
        part = LanguagePart.find(folder, "model." if alone else "model.language_model.")
        text.tie_word_embeddings = part.head is None
        if type(text) not in known:
            raise BackendError(
                f"model '{name}' is a '{config.model_type}', whose language model transformers cannot load by itself; "
                "choose a text-only version, or --backend mlx"
            )
    return text, part


@torch.no_grad()
def _check_trunk(policy: TorchPolicy, name: str) -> None:
    """Refuse a model whose logits are not head · trunk of a packed row, because its numbers would be silently wrong."""
    head = policy.causal.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise BackendError(f"model '{name}' has no output layer; choose another")
    ids = np.arange(4) % policy.vocabulary
    row = torch.from_numpy(ids).to(policy.device)[None]
    batch = pack(Sequences((ids[:2], ids[:2]), np.tile(ids[2:], 2), np.array([0, 2, 4])), [[0, 1]])
    layout = policy.layout(batch)
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
    kinds = getattr(policy.config, "layer_types", None) or [""] * policy.config.num_hidden_layers
    every = {layer for layer, kind in enumerate(kinds) if kind not in BY_TOKEN}
    if layout.reached != every or (head.logits(packed, 1.0) - expected[[0, 1, 2, 2]]).abs().max() > tolerance:
        raise BackendError(_OWN_ATTENTION.format(name))


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
