"""Low-rank adapters through mlx-lm's own layers."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear
from mlx_lm.tuner.dora import DoRALinear
from mlx_lm.tuner.utils import linear_to_lora_layers

from backends import adapter_folder
from backends.adapter_folder import Adapter
from backends.errors import row_of_zeros, too_many_adapted_layers
from backends.interface import BackendError
from backends.mlx.model import MlxPolicy
from backends.settings import Lora

LINEAR, EXPERTS = (nn.Linear, nn.QuantizedLinear), (SwitchLinear, QuantizedSwitchLinear)
_NAMES = ("lora_a", "lora_b", "m")  # the parts of an Adapter, transposed
# transformers has the layers of a text model that is part of another under this name, but of those that it loads alone
_PEFT_PREFIX, _ALONE = "model.language_model.", {"qwen3_5": "model.", "qwen3_5_moe": "model."}


def attach(policy: MlxPolicy, settings: Lora, start: str | None, seed: int) -> None:
    """Freeze the model and put float32 adapters on the named projections of its last layers.

    They start from the adapters in the folder or hub repository ``start``; without one A is uniform in
    ±1/√(input size), a function of ``seed`` alone, and B is zero, so that the policy starts as the base. Raises
    BackendError if a target is in no layer, there are too few layers, the adapters to start from do not fit, or DoRA
    cannot be had.
    """
    policy.model.freeze()
    layers = policy.text.layers
    if settings.layers is not None and settings.layers > len(layers):
        raise too_many_adapted_layers(settings.layers, len(layers))
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
    if settings.dora:
        _check_bits([module for layer in layers for path, module in layer.named_modules() if path in keys])
    linear_to_lora_layers(policy.text, _count(policy, settings), parameters, use_dora=settings.dora)
    if start:
        _start_from(start, policy, settings)
    for path, module in adapted_layers(policy.model) if settings.dora else ():
        module.__class__ = _Scaled
        if not mx.all(module.m).item():
            raise row_of_zeros(path)
    refresh_norms(policy)
    mx.eval(policy.model.trainable_parameters())


def _paths(layers: list[nn.Module], kinds: tuple[type[nn.Module], ...]) -> list[str]:
    return sorted({path for layer in layers for path, module in layer.named_modules() if isinstance(module, kinds)})


def _check_bits(layers: list[nn.Module]) -> None:
    """Refuse what mlx-lm gives DoRA a wrong shape for."""
    for layer in layers:
        if 32 % (bits := getattr(layer, "bits", 32)):
            raise BackendError(
                f"model.lora.dora: mlx-lm opens no such adapters on a base of {bits} bits; choose one of 4 or 8 bits, "
                "or train without it"
            )


class _Scaled(DoRALinear):
    """mlx-lm's DoRA: what LoRA gives, every row times m/‖W + scale·B·A‖.

    No gradient goes through the norms, in mlx-lm and in PEFT neither, so between two updates they are constants.
    mlx-lm computes them at each call, and the product with dequantised weights; here they are what
    :func:`refresh_norms` left, and quantised weights stay packed.
    """

    norms: mx.array  # [out] float32

    def __call__(self, x: mx.array) -> mx.array:
        """[..., in] → [..., out]."""
        factor = self.m / self.norms
        scaled = (self.linear(x) + self.scale * (x @ self.lora_a @ self.lora_b)) * factor
        if "bias" in self.linear:  # which is not scaled
            scaled = scaled + (1 - factor) * self.linear.bias
        out: mx.array = scaled.astype(x.dtype)
        return out

    def refresh_norms(self) -> None:
        """Compute the norms of W + scale·B·A."""
        self.norms = mx.linalg.norm(self.total(), axis=1)
        self.freeze(recurse=False, keys="norms")
        mx.eval(self.norms)  # so that of several layers one has its matrix at a time

    def total(self) -> mx.array:
        """W + scale·B·A, float32 [out, in]."""
        base: mx.array = self._dequantized_weight().astype(mx.float32)
        low: mx.array = (self.scale * self.lora_b.T) @ self.lora_a.T
        return base + low

    def fuse(self, dequantize: bool = False) -> nn.Linear:
        """A plain layer with the merged weight, in the type of the base, which is not quantised."""
        fused = nn.Linear(1, 1, bias=False)
        fused.weight = ((self.m / self.norms)[:, None] * self.total()).astype(self.linear.weight.dtype)
        if "bias" in self.linear:
            fused.bias = self.linear.bias
        return fused


def refresh_norms(policy: MlxPolicy) -> None:
    """Compute the norms that DoRA divides by anew. To be called when adapters have changed."""
    for _, module in adapted_layers(policy.model):
        if isinstance(module, _Scaled):
            module.refresh_norms()


def _start_from(name: str, policy: MlxPolicy, settings: Lora) -> None:
    modules = dict(adapted_layers(policy.model))
    shapes = {path: (module.lora_b.shape[1], module.lora_a.shape[0]) for path, module in modules.items()}
    for path, adapter in adapter_folder.fit(name, adapter_folder.read(name, settings), shapes).items():
        parts = zip(_NAMES, adapter, strict=True)
        modules[path].update({key: mx.array(part.T) for key, part in parts if part is not None})


def adapted_layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Path and module of every adapted layer."""
    return [(path, module) for path, module in model.named_modules() if "lora_a" in module]


def save(policy: MlxPolicy, settings: Lora, folder: Path, base: str) -> None:
    """Write adapters of the model ``base`` that mlx-lm loads with ``adapter_path``, PEFT with ``from_pretrained``."""
    found = {
        path: Adapter(*(np.array(module[key].astype(mx.float32)).T for key in _NAMES if key in module))
        for path, module in adapted_layers(policy.model)
    }
    prefix = _ALONE.get(policy.model.model_type, _PEFT_PREFIX) if policy.prefix else ""
    adapter_folder.write(folder, found, settings, len(policy.text.layers), base, prefix)


def _count(policy: MlxPolicy, settings: Lora) -> int:
    return len(policy.text.layers) if settings.layers is None else settings.layers
