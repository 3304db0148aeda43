"""Low-rank adapters through PEFT."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from backends import adapter_folder
from backends.errors import row_of_zeros, too_many_adapted_layers
from backends.interface import BackendError
from backends.settings import Lora
from backends.torch.four_bits import unpacked

NAME = "default"  # PEFT's name for the only adapter of a model


def attach(causal: Any, lora: Lora, start: str | None, seed: int) -> Any:
    """Inject float32 LoRA adapters into ``causal`` and return PEFT's wrapper of it.

    They start from the adapters in the folder or hub repository ``start``; without one, B = 0. Raises BackendError if
    a target is in no layer, there are too few layers, other libraries could not open the adapters, or those to start
    from do not fit.
    """
    import peft

    names = {
        name.rsplit(".")[-1] for name, module in causal.base_model.named_modules() if isinstance(module, nn.Linear)
    }
    missing = [target for target in lora.targets if target not in names]
    if missing:
        experts = any(name.endswith(".experts") for name, _ in causal.base_model.named_modules())
        also = "; adapters on experts would open in no other library and are not trained" if experts else ""
        raise BackendError(
            f"model.lora.targets: '{missing[0]}' is not a projection of this model; it has "
            f"{', '.join(sorted(names))}{also}"
        )
    depth = causal.config.num_hidden_layers
    if lora.layers is not None and lora.layers > depth:
        raise too_many_adapted_layers(lora.layers, depth)
    config = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=lora.rank,
        lora_alpha=lora.scale * lora.rank,
        target_modules=list(lora.targets),
        use_dora=lora.dora,
        layers_to_transform=None if lora.layers is None else list(range(depth - lora.layers, depth)),
    )
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)  # PEFT uses the old name
        torch.manual_seed(seed)
        wrapped = peft.get_peft_model(causal, config).eval()
    adapted = modules(causal)
    unportable = [name for name in adapted if not adapter_folder.is_portable([name])]
    if unportable:
        raise BackendError(
            f"[model.lora] would put an adapter on '{unportable[0]}', which has another name in mlx-lm, so mlx-lm "
            "could not open the adapter; train the whole model, or choose another model"
        )
    if start:
        _start_from(start, adapted, lora)
    if lora.dora:
        for name, module in adapted.items():
            module.lora_variant[NAME] = _DoraVariant
            module.register_buffer("row_norms", None, persistent=False)
            if not (unpacked(module.get_base_layer().weight) != 0).any(1).all():
                raise row_of_zeros(name)
        refresh_norms(causal)
    return wrapped


def modules(causal: Any) -> dict[str, Any]:
    """The adapted layers by path."""
    return {name: module for name, module in causal.named_modules() if hasattr(module, "lora_A")}


class _DoraVariant:
    """DoRA in place of PEFT's own: LoRA's output with every row times m/‖W + scale·B·A‖.

    No gradient flows through the norms, as in PEFT and mlx-lm, so they are constants between two updates. PEFT
    computes them in every call, with two more matrices of W's size; here :func:`refresh_norms` computes them once.
    """

    @staticmethod
    def forward(module: Any, active_adapter: str, x: Tensor, result: Tensor, **_: Any) -> Tensor:
        """The output [..., out] of the adapted layer; ``result`` is the base layer's output for ``x`` [..., in]."""
        low = module.lora_B[active_adapter](module.lora_A[active_adapter](x))
        factor = module.lora_magnitude_vector[active_adapter].weight / module.row_norms
        scaled = (result + low * module.scaling[active_adapter]) * factor
        bias = module.get_base_layer().bias  # part of ``result``, but not scaled
        if bias is not None:
            scaled = scaled + (1 - factor) * bias
        out: Tensor = scaled.to(result.dtype)
        return out


def refresh_norms(causal: Any) -> None:
    """Recompute DoRA's norms. Every rank must call it whenever adapters have changed."""
    for module in modules(causal).values():
        if NAME in module.lora_magnitude_vector:
            module.row_norms = torch.linalg.vector_norm(_sum(module), dim=1)


def merged(module: Any) -> Tensor:
    """The float32 weight [out, in] of an adapted layer, adapter included; every rank must call it."""
    weight = _sum(module)
    if NAME not in module.lora_magnitude_vector:
        return weight
    factor: Tensor = whole(module.lora_magnitude_vector[NAME].weight) / module.row_norms
    return weight * factor[:, None]


@torch.no_grad()
def _sum(module: Any) -> Tensor:
    """W + scale·B·A."""
    base = unpacked(whole(module.get_base_layer().weight))
    return base.float() + whole(module.get_delta_weight(NAME)).float()


def whole(tensor: Tensor) -> Tensor:
    """The whole tensor, of which each rank may hold a part."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def _start_from(name: str, adapted: dict[str, Any], lora: Lora) -> None:
    shapes = {path: (module.out_features, module.in_features) for path, module in adapted.items()}
    for path, adapter in adapter_folder.fit(name, adapter_folder.read(name, lora), shapes).items():
        module = adapted[path]
        parts = module.lora_A, module.lora_B, module.lora_magnitude_vector
        for part, numbers in zip(parts, adapter, strict=True):
            if numbers is not None:
                part[NAME].weight.copy_(torch.from_numpy(numbers.copy()))
