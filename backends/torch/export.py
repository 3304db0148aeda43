"""Write model folders that transformers and mlx-lm open."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor

from backends import adapter_folder
from backends.adapter_folder import Adapter
from backends.settings import Lora
from backends.torch.adapters import NAME, merged, modules, whole
from backends.torch.four_bits import unpacked
from backends.torch.model import COMPANIONS, TorchPolicy

_OWN = {"config.json", "adapter_config.json"}


def export(policy: TorchPolicy, folder: Path, weights: dict[str, Tensor], adapters: dict[str, Tensor]) -> None:
    """Write config, tokenizer and the merged ``weights`` of ``policy``; ``adapters`` go to the subfolder adapter."""
    folder.mkdir(parents=True, exist_ok=True)
    for pattern in COMPANIONS:
        for file in policy.folder.glob(pattern):
            if file.name not in _OWN and not file.name.endswith(".index.json"):
                shutil.copyfile(file, folder / file.name)
    config = json.loads((policy.folder / "config.json").read_text())
    for key in ("torch_dtype", "quantization_config"):  # the old name of dtype; and exports are dequantised
        config.pop(key, None)
    config["dtype"] = str(policy.dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    if policy.part is not None:
        weights = {policy.part.stored(name): weight for name, weight in weights.items()}
        weights |= policy.part.others(policy.folder)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    if policy.peft is not None:
        export_adapters(policy, folder, adapters)
    _make_readable(folder, folder / "config.json")


def _make_readable(folder: Path, like: Path) -> None:
    for file in folder.rglob("*.safetensors"):
        shutil.copymode(like, file)  # safetensors creates files that only the owner can read


def export_adapters(policy: TorchPolicy, model: Path, adapters: dict[str, Tensor]) -> None:
    """Write only ``adapters``, into the subfolder ``adapter`` of a model, for PEFT, vLLM and mlx-lm."""
    folder = model / "adapter"
    config = policy.peft.peft_config[NAME]
    lora = Lora(
        rank=config.r,
        scale=config.lora_alpha / config.r,
        targets=tuple(config.target_modules),
        dora=bool(config.use_dora),
    )
    parts = [f"lora_{part}.{NAME}.weight" for part in ("A", "B", "magnitude_vector")][: 3 if lora.dora else 2]
    outer, opened = ("", "") if policy.part is None else ("language_model.", policy.part.opened)
    found = {
        outer + path: Adapter(*(_numpy(adapters[f"base_model.model.{path}.{part}"]) for part in parts))
        for path in modules(policy.causal)
    }
    depth = policy.causal.config.num_hidden_layers
    adapter_folder.write(folder, found, lora, depth, policy.causal.name_or_path, opened)
    _make_readable(folder, folder / "adapter_config.json")


def _numpy(weight: Tensor) -> NDArray[np.float32]:
    return weight.detach().float().cpu().numpy()


@torch.no_grad()
def merged_weights(policy: TorchPolicy, keep: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The model's weights with adapters merged in, and the adapters' own weights, by name and on the host.

    Merging runs in float32, one matrix at a time, so that the device never holds a second model; the result is in the
    compute dtype. Ranks that hold parts assemble each matrix together; only those that ``keep`` it continue with it.
    """
    adapted = modules(policy.causal)
    weights = {}
    for name, part in policy.causal.named_parameters():  # a tied head is stored once, as the embedding
        if "lora_" in name:
            continue
        module = name.removesuffix(".base_layer.weight")
        weight = merged(adapted[module]) if module != name and module in adapted else unpacked(whole(part))
        if keep:
            weights[name.replace(".base_layer.", ".")] = weight.detach().to("cpu", policy.dtype).contiguous()
    return weights, adapter_weights(policy, keep)


@torch.no_grad()
def adapter_weights(policy: TorchPolicy, keep: bool) -> dict[str, Tensor]:
    """The adapters' weights by PEFT's names, on the host; every rank must call it."""
    adapters = {}
    for name, part in policy.causal.named_parameters():
        if "lora_" in name:
            weight = whole(part)
            if keep:
                adapters[f"base_model.model.{name}"] = weight.cpu().contiguous()
    return adapters
