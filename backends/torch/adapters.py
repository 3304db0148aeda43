"""Low-rank adapters through PEFT."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn

from backends import adapter_folder
from backends.interface import BackendError, LoraSettings


def attach(causal: Any, lora: LoraSettings, seed: int) -> Any:
    """Inject LoRA adapters into ``causal``, float32, B = 0 or those of ``lora.adapter``; returns PEFT's wrapper of it.

    Raises BackendError where a target is in no layer, there are too few layers, or other libraries could not open
    the adapters, or those to start from do not fit.
    """
    import peft

    names = {
        name.rsplit(".")[-1] for name, module in causal.base_model.named_modules() if isinstance(module, nn.Linear)
    }
    missing = [target for target in lora.targets if target not in names]
    if missing:
        experts = any(name.endswith(".experts") for name, _ in causal.base_model.named_modules())
        also = "; those of experts get no adapters, which would open in no other library" if experts else ""
        raise BackendError(
            f"lora target '{missing[0]}' is no projection of this model; it has {', '.join(sorted(names))}{also}"
        )
    depth = causal.config.num_hidden_layers
    if lora.layers is not None and not 0 < lora.layers <= depth:
        raise BackendError(f"lora layers = {lora.layers}, but the model has {depth}; choose 1 to {depth}")
    config = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=lora.rank,
        lora_alpha=lora.scale * lora.rank,
        target_modules=list(lora.targets),
        layers_to_transform=None if lora.layers is None else list(range(depth - lora.layers, depth)),
    )
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)  # PEFT asks by the former name
        torch.manual_seed(seed)
        wrapped = peft.get_peft_model(causal, config).eval()
    adapted = {name: module for name, module in causal.named_modules() if hasattr(module, "lora_A")}
    strange = [name for name in adapted if not adapter_folder.is_portable([name])]
    if strange:
        raise BackendError(
            f"[model.lora] would put an adapter on '{strange[0]}', which mlx-lm calls otherwise, so that it would not "
            "open there; train the whole model, or choose another"
        )
    if lora.adapter:
        _start_from(lora.adapter, adapted, lora)
    return wrapped


@torch.no_grad()
def _start_from(name: str, adapted: dict[str, Any], lora: LoraSettings) -> None:
    shapes = {path: (module.out_features, module.in_features) for path, module in adapted.items()}
    for path, halves in adapter_folder.fit(name, adapter_folder.read(name, lora), shapes).items():
        for part, matrix in zip((adapted[path].lora_A, adapted[path].lora_B), halves, strict=True):
            part["default"].weight.copy_(torch.from_numpy(matrix.copy()))
