"""Adapters on disk, in one folder that both PEFT and mlx-lm open.

The two store the same numbers differently: PEFT has A [r, in], B [out, r] and alpha, mlx-lm their transposes and scale
= alpha / r; DoRA's row lengths are a ``lora_magnitude_vector`` in PEFT and ``m`` in mlx-lm. Each library reads its own
weight file; adapter_config.json has the keys of both, and PEFT warns that it does not know mlx-lm's.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, deserialize
from safetensors.numpy import save_file

from backends.interface import BackendError
from backends.settings import Lora

Array = NDArray[np.float32]


class Adapter(NamedTuple):
    """The trained parts of a projection with the weight W [out, in]."""

    a: Array  # [r, in]
    b: Array  # [out, r]
    magnitude: Array | None = None  # [out], with DoRA: the length of each row


PEFT_FILE, MLX_FILE, CONFIG = "adapter_model.safetensors", "adapters.safetensors", "adapter_config.json"
_LAYER = re.compile(r"(?:language_model\.)?model\.(?:language_model\.)?layers\.(\d+)\.([\w.]+)")
_PEFT = re.compile(r"base_model\.model\.(.+)\.(lora_A\.weight|lora_B\.weight|lora_magnitude_vector)")
_MLX = re.compile(r"(.+)\.(lora_a|lora_b|m)")
_PEFT_NAMES = ("lora_A.weight", "lora_B.weight", "lora_magnitude_vector")  # in the order of an Adapter's fields
_MLX_NAMES = ("lora_a", "lora_b", "m")
_TYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2"}
# Options of PEFT that are not supported here, with the values that mean "off".
_UNSUPPORTED = {
    "bias": ("none",),
    "fan_in_fan_out": (False,),
    "modules_to_save": ([],),
    "rank_pattern": ({},),
    "alpha_pattern": ({},),
    "trainable_token_indices": (),
    "target_parameters": ([],),
    "use_bdlora": (),
    "arrow_config": (),
}


def is_portable(paths: Iterable[str]) -> bool:
    """Whether modules have the paths that both libraries use, those of a text model's layers."""
    return all(_LAYER.fullmatch(path) for path in paths)


def place(path: str) -> tuple[int, str]:
    """The layer of a module and its path inside the layer, wherever the text model sits in a larger one.

    Raises BackendError for a module outside the layers.
    """
    match = _LAYER.fullmatch(path)
    if match is None:
        raise BackendError(
            f"there is an adapter on '{path}', which is not a projection of a layer; such adapters cannot be trained"
        )
    return int(match[1]), match[2]


def write(
    folder: Path,
    adapters: Mapping[str, Adapter],
    lora: Lora,
    depth: int,
    base: str,
    peft_prefix: str = "",
) -> None:
    """Write the adapters of modules, by path, of a model with ``depth`` layers.

    ``base`` is the model's folder or hub name. Paths are mlx-lm's, as :func:`is_portable` checks; ``peft_prefix`` is
    where transformers keeps the layers if its paths differ.
    """
    places = [place(path) for path in adapters]
    layers = sorted({layer for layer, _ in places})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": lora.rank,
        "lora_alpha": lora.scale * lora.rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "use_dora": lora.dora,
        "target_modules": sorted(lora.targets),
        "layers_to_transform": None if len(layers) == depth else layers,
        "fine_tune_type": "dora" if lora.dora else "lora",
        "num_layers": depth - layers[0],
        "lora_parameters": {
            "rank": lora.rank,
            "scale": lora.scale,
            "dropout": 0.0,
            "keys": sorted({inside for _, inside in places}),
        },
    }
    if peft_prefix not in ("", "model."):  # image-text models have projections of these names in their other parts too
        config["exclude_modules"] = f"(?!{re.escape(peft_prefix)}).*"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    peft: dict[str, Array] = {}
    mlx: dict[str, Array] = {}
    for (layer, inside), (path, adapter) in zip(places, adapters.items(), strict=True):
        name = f"base_model.model.{peft_prefix}layers.{layer}.{inside}" if peft_prefix else f"base_model.model.{path}"
        parts = [part for part in adapter if part is not None]
        peft |= {f"{name}.{end}": part for end, part in zip(_PEFT_NAMES, parts, strict=False)}
        mlx |= {f"{path}.{end}": part.T for end, part in zip(_MLX_NAMES, parts, strict=False)}
    for name, arrays in ((PEFT_FILE, peft), (MLX_FILE, mlx)):
        # safetensors ignores strides
        save_file({key: np.ascontiguousarray(array) for key, array in arrays.items()}, folder / name, {"format": "pt"})


def find(name: str) -> Path:
    """The folder of adapters: ``name`` itself, or its snapshot from the Hugging Face hub. Raises BackendError."""
    folder = Path(name).expanduser()
    if not folder.is_dir():
        if folder.is_absolute() or name.startswith((".", "~")) or name.count("/") != 1:
            raise BackendError(f"adapter folder '{name}' does not exist; give a folder, or a hub name like owner/name")
        folder = _download(name)
    if not (folder / CONFIG).is_file():
        raise BackendError(f"adapter '{name}' has no {CONFIG}; give the folder that PEFT or mlx-lm wrote")
    return folder


def _download(name: str) -> Path:
    import huggingface_hub

    patterns = [CONFIG, PEFT_FILE, MLX_FILE]
    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=patterns))
    except (OSError, ValueError, huggingface_hub.errors.HfHubHTTPError) as error:
        reason = str(error).strip().splitlines()[0]
        raise BackendError(f"adapter '{name}' is not a local folder and cannot be downloaded: {reason}") from error


def read(name: str, lora: Lora) -> dict[tuple[int, str], Adapter]:
    """The adapters in a folder or on the hub, in PEFT's or mlx-lm's format, by layer and path inside it.

    Raises BackendError if they do not match ``lora``, or contain more than adapters of projections.
    """
    folder = find(name)
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        peft = config.get("peft_type") is not None
        rank, scale, dora = _peft_settings(name, config) if peft else _mlx_settings(name, config)
        arrays = _load(folder / (PEFT_FILE if peft else MLX_FILE))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise BackendError(f"adapter '{name}' cannot be read ({reason}); get its files again") from error
    for key, found, wanted in (("rank", rank, lora.rank), ("scale", scale, lora.scale)):
        if not math.isclose(found, wanted, rel_tol=1e-9):
            raise BackendError(
                f"adapter '{name}' has {key} {found:g}, but the recipe has {wanted:g}; set model.lora.{key} = {found:g}"
            )
    if dora != lora.dora:
        kind = "was trained with DoRA" if dora else "has no magnitudes of DoRA"
        raise BackendError(f"adapter '{name}' {kind}; set model.lora.dora = {str(dora).lower()}")
    return {place(path): adapter for path, adapter in _adapters(name, arrays, peft, dora).items()}


def fit(
    name: str, found: Mapping[tuple[int, str], Adapter], shapes: Mapping[str, tuple[int, int]]
) -> dict[str, Adapter]:
    """The adapters ``found``, by the paths of ``shapes``: the model's modules that get one, as [out, in] by path.

    Raises BackendError if modules or shapes differ.
    """
    wanted = {place(path): path for path in shapes}
    for missing, there in ((wanted.keys() - found.keys(), "no"), (found.keys() - wanted.keys(), "an")):
        if missing:
            layer, inside = min(missing)
            raise BackendError(
                f"adapter '{name}' has {there} adapter on {inside} of layer {layer}, which contradicts model.lora; "
                f"set model.lora.targets to {sorted({inside.split('.')[-1] for _, inside in found})}, and "
                "model.lora.layers to the number of layers that have one"
            )
    for key, path in wanted.items():
        adapter = found[key]
        size = len(adapter.b), adapter.a.shape[1]
        if size != shapes[path] or (adapter.magnitude is not None and len(adapter.magnitude) != size[0]):
            raise BackendError(
                f"adapter '{name}' belongs to another model: {path} is {shapes[path]} in this model and {size} in the "
                "adapter; choose the model it was trained on"
            )
    return {path: found[key] for key, path in wanted.items()}


def _peft_settings(name: str, config: Mapping[str, Any]) -> tuple[float, float, bool]:
    if config["peft_type"] != "LORA":
        raise BackendError(f"adapter '{name}' has PEFT's type {config['peft_type']}; only LORA can be trained further")
    for key, off in _UNSUPPORTED.items():
        if (value := config.get(key)) is not None and value not in off:
            raise BackendError(f"adapter '{name}' has {key} = {value}, which is not supported; merge it first")
    rank = config["r"]
    scale = config["lora_alpha"] / (math.sqrt(rank) if config.get("use_rslora") else rank)
    return rank, scale, bool(config.get("use_dora"))


def _mlx_settings(name: str, config: Mapping[str, Any]) -> tuple[float, float, bool]:
    if (kind := config.get("fine_tune_type", "lora")) not in ("lora", "dora"):
        raise BackendError(
            f"adapter '{name}' has mlx-lm's type {kind}; only lora and dora can be trained further; fuse it first"
        )
    parameters = config["lora_parameters"]
    return parameters["rank"], parameters["scale"], kind == "dora"


def _load(file: Path) -> dict[str, Array]:
    """The arrays of a safetensors file as float32."""
    arrays = {}
    for key, stored in deserialize(file.read_bytes()):
        if stored["dtype"] == "BF16":  # numpy has no bfloat16, the upper half of a float32
            array = (np.frombuffer(stored["data"], "<u2").astype("<u4") << 16).view(np.float32)
        else:
            array = np.frombuffer(stored["data"], _TYPES[stored["dtype"]]).astype(np.float32)
        if not np.isfinite(array).all():
            raise ValueError(f"'{key}' holds NaN or infinity")
        arrays[key] = array.reshape(stored["shape"])
    return arrays


def _adapters(name: str, arrays: Mapping[str, Array], peft: bool, dora: bool) -> dict[str, Adapter]:
    """The adapter parts of each path, under either library's names."""
    names = (_PEFT_NAMES if peft else _MLX_NAMES)[: 3 if dora else 2]
    found: dict[str, dict[str, Array]] = {}
    for key, array in arrays.items():
        match = (_PEFT if peft else _MLX).fullmatch(key)
        if match is None or match[2] not in names or array.ndim != (1 if match[2] in names[2:] else 2):
            raise BackendError(
                f"adapter '{name}' holds '{key}', which is not a low-rank matrix of a projection; merge it first"
            )
        found.setdefault(match[1], {})[match[2]] = array if peft else array.T
    for path, parts in found.items():
        if missing := [part for part in names if part not in parts]:
            raise BackendError(f"adapter '{name}' lacks {missing[0]} of {path}; get its files again")
    return {path: Adapter(*(parts[part] for part in names)) for path, parts in found.items()}
