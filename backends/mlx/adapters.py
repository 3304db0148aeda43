"""Low-rank adapters through mlx-lm's own layers."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear
from mlx_lm.tuner.utils import linear_to_lora_layers

from backends import adapter_folder
from backends.interface import BackendError, LoraSettings
from backends.mlx.model import Policy

LINEAR = (nn.Linear, nn.QuantizedLinear, SwitchLinear, QuantizedSwitchLinear)


def attach(policy: Policy, settings: LoraSettings, seed: int) -> None:
    """Freeze the model and put float32 adapters on the named projections of its last layers.

    A starts uniform in ±1/√(input size), a function of ``seed`` alone, and B zero, so that the
    policy starts as the base. Raises BackendError where a target is in no layer, or there are too few layers.
    """
    policy.model.freeze()
    layers = policy.text.layers
    if not 0 < _count(policy, settings) <= len(layers):
        raise BackendError(
            f"lora layers = {settings.layers}, but the model has {len(layers)}; choose 1 to {len(layers)}"
        )
    linear = sorted({path for layer in layers for path, module in layer.named_modules() if isinstance(module, LINEAR)})
    kinds = {path.split(".")[-1] for path in linear}
    for target in settings.targets:
        if target not in kinds:
            choice = ", ".join(sorted(kinds))
            raise BackendError(f"[model.lora] targets '{target}', which no layer has; choose from {choice}")
    keys = [path for path in linear if path.split(".")[-1] in settings.targets]
    mx.random.seed(seed)
    linear_to_lora_layers(policy.text, _count(policy, settings), _parameters(settings, keys))
    mx.eval(policy.model.trainable_parameters())


def lora_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Path and module of every adapted layer."""
    return [(path, module) for path, module in model.named_modules() if "lora_a" in module]


def save(policy: Policy, settings: LoraSettings, folder: Path) -> None:
    """Write adapters that mlx-lm loads with ``adapter_path`` and PEFT with ``from_pretrained``.

    Those of experts, and of models whose modules mlx-lm calls otherwise, are in mlx-lm's format alone.
    """
    adapted = dict(lora_modules(policy.model))
    depth = len(policy.text.layers)
    if adapter_folder.is_portable(adapted) and all(module.lora_a.ndim == 2 for module in adapted.values()):
        matrices = {
            path: (np.array(module.lora_a.astype(mx.float32)).T, np.array(module.lora_b.astype(mx.float32)).T)
            for path, module in adapted.items()
        }
        adapter_folder.write(folder, matrices, settings, depth, str(policy.folder))
        return
    folder.mkdir(exist_ok=True)
    mx.save_safetensors(str(folder / "adapters.safetensors"), dict(tree_flatten(policy.model.trainable_parameters())))
    layers = policy.text.layers
    keys = sorted({path for layer in layers for path, module in layer.named_modules() if "lora_a" in module})
    config = {
        "fine_tune_type": "lora",
        "num_layers": _count(policy, settings),
        "lora_parameters": _parameters(settings, keys),
    }
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")


def _count(policy: Policy, settings: LoraSettings) -> int:
    return len(policy.text.layers) if settings.layers is None else settings.layers


def _parameters(settings: LoraSettings, keys: list[str]) -> dict[str, object]:
    return {"rank": settings.rank, "scale": settings.scale, "dropout": 0.0, "keys": keys}
