"""Low-rank adapters through mlx-lm's own layers."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_unflatten
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear
from mlx_lm.tuner.utils import linear_to_lora_layers

from backends import adapter_folder
from backends.interface import BackendError, LoraSettings
from backends.mlx.model import Policy

LINEAR, EXPERTS = (nn.Linear, nn.QuantizedLinear), (SwitchLinear, QuantizedSwitchLinear)
# transformers has the layers of a text model that is part of another under this name, but of those that it loads alone
_PEFT_PREFIX, _ALONE = "model.language_model.", {"qwen3_5": "model.", "qwen3_5_moe": "model."}


def attach(policy: Policy, settings: LoraSettings, seed: int) -> None:
    """Freeze the model and put float32 adapters on the named projections of its last layers.

    A starts uniform in ±1/√(input size), a function of ``seed`` alone, and B zero, so that the
    policy starts as the base; or both are those of ``settings.adapter``. Raises BackendError where a target is in no
    layer, there are too few layers, or the adapters to start from do not fit.
    """
    policy.model.freeze()
    layers = policy.text.layers
    if not 0 < _count(policy, settings) <= len(layers):
        raise BackendError(
            f"lora layers = {settings.layers}, but the model has {len(layers)}; choose 1 to {len(layers)}"
        )
    linear, experts = (_paths(layers, kinds) for kinds in (LINEAR, EXPERTS))
    kinds = {path.split(".")[-1] for path in linear}
    for target in settings.targets:
        if target in {path.split(".")[-1] for path in experts} - kinds:
            raise BackendError(
                f"[model.lora] targets '{target}', which only experts have; adapters on experts would open in no other "
                f"library and are not trained; choose from {', '.join(sorted(kinds))}"
            )
        if target not in kinds:
            choice = ", ".join(sorted(kinds))
            raise BackendError(f"[model.lora] targets '{target}', which no layer has; choose from {choice}")
    keys = [path for path in linear if path.split(".")[-1] in settings.targets]
    mx.random.seed(seed)
    parameters = {"rank": settings.rank, "scale": settings.scale, "dropout": 0.0, "keys": keys}
    linear_to_lora_layers(policy.text, _count(policy, settings), parameters)
    if settings.adapter:
        _start_from(settings.adapter, policy, settings)
    mx.eval(policy.model.trainable_parameters())


def _paths(layers: list[nn.Module], kinds: tuple[type[nn.Module], ...]) -> list[str]:
    return sorted({path for layer in layers for path, module in layer.named_modules() if isinstance(module, kinds)})


def _start_from(name: str, policy: Policy, settings: LoraSettings) -> None:
    modules = dict(lora_modules(policy.model))
    shapes = {path: (module.lora_b.shape[1], module.lora_a.shape[0]) for path, module in modules.items()}
    for path, (a, b) in adapter_folder.fit(name, adapter_folder.read(name, settings), shapes).items():
        modules[path].update(tree_unflatten([("lora_a", mx.array(a.T)), ("lora_b", mx.array(b.T))]))


def lora_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Path and module of every adapted layer."""
    return [(path, module) for path, module in model.named_modules() if "lora_a" in module]


def save(policy: Policy, settings: LoraSettings, folder: Path, base: str) -> None:
    """Write adapters of the model ``base`` that mlx-lm loads with ``adapter_path``, PEFT with ``from_pretrained``."""
    matrices = {
        path: (np.array(module.lora_a.astype(mx.float32)).T, np.array(module.lora_b.astype(mx.float32)).T)
        for path, module in lora_modules(policy.model)
    }
    prefix = _ALONE.get(policy.model.model_type, _PEFT_PREFIX) if policy.prefix else ""
    adapter_folder.write(folder, matrices, settings, len(policy.text.layers), base, prefix)


def _count(policy: Policy, settings: LoraSettings) -> int:
    return len(policy.text.layers) if settings.layers is None else settings.layers
