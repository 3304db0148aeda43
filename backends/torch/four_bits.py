"""A frozen base in 4 bits (NF4) with bitsandbytes' layers: adapters train on it, exports are dequantised."""

from __future__ import annotations

import logging
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from backends.interface import BackendError

# On import, also by PEFT, it warns about a missing kernel to download, which is not used here.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)

INSTALL = "pip install 'delta-rlvr[quantised]'"


def quantization_config(dtype: torch.dtype) -> Any:
    """Transformers' settings to quantise a model while loading: NF4 with 8-bit scales.

    ``dtype`` is that of the products. Raises BackendError if bitsandbytes is not installed.
    """
    if find_spec("bitsandbytes") is None:
        raise BackendError(f"model.load_in_4bit needs bitsandbytes, which is not installed; run: {INSTALL}")
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )


def keep_differentiable(model: torch.nn.Module) -> None:
    """Stop forward passes without a gradient from repacking weights for a kernel that has no gradient.

    bitsandbytes does that on some CPUs for layers in evaluation mode, so the layers stay in training mode.
    """
    for module in model.modules():
        if _packing(getattr(module, "weight", None)) is not None:
            module.training = True


def numel(weight: Tensor) -> int:
    """The number of elements of a weight before it was packed into 4 bits."""
    packing = _packing(weight)
    return weight.numel() if packing is None else int(packing.shape.numel())


def unpacked(weight: Tensor) -> Tensor:
    """The dequantised weight in its original shape."""
    packing = _packing(weight)
    if packing is None:
        return weight
    from bitsandbytes.functional import dequantize_4bit

    numbers: Tensor = dequantize_4bit(weight.data, packing)
    return numbers


def _packing(weight: Tensor | None) -> Any:
    """How bitsandbytes packed a weight; None if it is not packed."""
    return getattr(weight, "quant_state", None)
