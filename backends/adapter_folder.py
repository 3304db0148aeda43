"""Adapters on disk in one folder that both PEFT and mlx-lm open.

The two name the same numbers differently: PEFT has A [r, in], B [out, r] and alpha, mlx-lm their transposes
and scale = alpha / r. Each reads a file of its own; adapter_config.json has the keys of both, of which PEFT says
that it does not know mlx-lm's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from backends.interface import LoraSettings

Array = NDArray[np.float32]

_LAYER = re.compile(r"model\.layers\.(\d+)\.([\w.]+)")


def is_portable(paths: Iterable[str]) -> bool:
    """Whether modules have the paths that both libraries use: those of a text model's layers."""
    return all(_LAYER.fullmatch(path) for path in paths)


def write(folder: Path, matrices: Mapping[str, tuple[Array, Array]], lora: LoraSettings, depth: int, base: str) -> None:
    """Write the adapters A [r, in] and B [out, r] of modules by path, of a model of ``depth`` layers.

    ``base`` is the model's folder or hub name. The paths are such as :func:`is_portable` tells.
    """
    found = [match for path in matrices if (match := _LAYER.fullmatch(path))]
    layers = sorted({int(match[1]) for match in found})
    keys = sorted({match[2] for match in found})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": lora.rank,
        "lora_alpha": lora.scale * lora.rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(lora.targets),
        "layers_to_transform": None if len(layers) == depth else layers,
        "fine_tune_type": "lora",
        "num_layers": depth - layers[0],
        "lora_parameters": {"rank": lora.rank, "scale": lora.scale, "dropout": 0.0, "keys": keys},
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    peft: dict[str, Array] = {}
    mlx: dict[str, Array] = {}
    for path, (a, b) in matrices.items():
        peft |= {f"base_model.model.{path}.lora_A.weight": a, f"base_model.model.{path}.lora_B.weight": b}
        mlx |= {f"{path}.lora_a": a.T, f"{path}.lora_b": b.T}
    for name, arrays in (("adapter_model.safetensors", peft), ("adapters.safetensors", mlx)):
        # safetensors writes the memory as it lies, whatever the strides say
        save_file({key: np.ascontiguousarray(array) for key, array in arrays.items()}, folder / name, {"format": "pt"})
