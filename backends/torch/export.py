"""Writing a model folder that transformers and mlx-lm open."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from backends.torch.model import COMPANIONS, Policy

_OWN = {"config.json", "adapter_config.json"}


def export(policy: Policy, folder: Path, weights: dict[str, Tensor], adapters: dict[str, Tensor]) -> None:
    """Write config, tokenizer and the merged ``weights`` of ``policy``, ``adapters`` beside them in ``adapter``."""
    folder.mkdir(parents=True, exist_ok=True)
    for pattern in COMPANIONS:
        for file in policy.folder.glob(pattern):
            if file.name not in _OWN and not file.name.endswith(".index.json"):
                shutil.copyfile(file, folder / file.name)
    config = json.loads((policy.folder / "config.json").read_text())
    config.pop("torch_dtype", None)  # the former name of dtype
    config["dtype"] = str(policy.dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    if policy.peft is not None:
        policy.peft.save_pretrained(folder / "adapter", state_dict=adapters, save_embedding_layers=False)
        (folder / "adapter" / "README.md").unlink(missing_ok=True)  # a form that nobody filled in
    for file in folder.rglob("*.safetensors"):
        shutil.copymode(folder / "config.json", file)  # safetensors lets nobody but the owner read


@torch.no_grad()
def merged_weights(policy: Policy, keep: bool = True) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The model's own weights and its adapters' by name, on the host; each adapter is added to its matrix as well.

    The first in the compute dtype, added up in float32; one matrix at a time, so that no second model is held on
    the device. Ranks that hold parts put each matrix together, and only those that ``keep`` it go on with it.
    """
    adapted = {name: module for name, module in policy.causal.named_modules() if hasattr(module, "get_delta_weight")}
    weights, adapters = {}, {}
    for name, part in policy.causal.named_parameters():  # a tied head comes once, as the embedding
        weight = _whole(part)
        if "lora_" in name:
            if keep:
                adapters[f"base_model.model.{name}"] = weight.cpu().contiguous()
            continue
        module = name.removesuffix(".base_layer.weight")
        if module != name and module in adapted:
            weight = weight.float() + _whole(adapted[module].get_delta_weight("default")).float()
        if keep:
            weights[name.replace(".base_layer.", ".")] = weight.detach().to("cpu", policy.dtype).contiguous()
    return weights, adapters


def _whole(tensor: Tensor) -> Tensor:
    """All of a tensor, of which each rank may hold a part."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
