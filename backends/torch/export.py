"""Writing a model folder that transformers and mlx-lm open."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from backends.torch.model import COMPANIONS, Policy

_OWN = {"config.json", "adapter_config.json"}


def export(policy: Policy, folder: Path) -> None:
    """Write config, tokenizer and weights of ``policy``, adapters merged and beside them in ``adapter``.

    The weights are of the compute dtype. The policy itself stays as it is.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for pattern in COMPANIONS:
        for file in policy.folder.glob(pattern):
            if file.name not in _OWN and not file.name.endswith(".index.json"):
                shutil.copyfile(file, folder / file.name)
    config = json.loads((policy.folder / "config.json").read_text())
    config.pop("torch_dtype", None)  # the former name of dtype
    config["dtype"] = str(policy.dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file(merged_weights(policy), folder / "model.safetensors", metadata={"format": "pt"})
    if policy.peft is not None:
        # Named parameters, whole while an export gathers them: PEFT's own state_dict would split them again.
        adapters = {name: weight.detach() for name, weight in policy.peft.named_parameters() if "lora_" in name}
        policy.peft.save_pretrained(folder / "adapter", state_dict=adapters, save_embedding_layers=False)
        (folder / "adapter" / "README.md").unlink(missing_ok=True)  # a form that nobody filled in
    for file in folder.rglob("*.safetensors"):
        shutil.copymode(folder / "config.json", file)  # safetensors lets nobody but the owner read


@torch.no_grad()
def merged_weights(policy: Policy) -> dict[str, Tensor]:
    """The model's own weights by name, in the compute dtype on the host, each adapter added to its matrix.

    Sums are taken in float32, one matrix at a time: no second model is held on the device.
    """
    adapted = {name: module for name, module in policy.causal.named_modules() if hasattr(module, "get_delta_weight")}
    weights = {}
    for name, weight in policy.causal.named_parameters():  # a tied head comes once, as the embedding
        if "lora_" in name:
            continue
        module = name.removesuffix(".base_layer.weight")
        if module != name and module in adapted:
            weight = weight.float() + adapted[module].get_delta_weight("default").float()
        weights[name.replace(".base_layer.", ".")] = weight.detach().to("cpu", policy.dtype).contiguous()
    return weights
