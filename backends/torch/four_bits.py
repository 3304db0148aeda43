"""A frozen base in 4 bits (NF4), by bitsandbytes' layers: adapters train on it, exports are dequantised."""

from __future__ import annotations

import logging
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from backends.interface import BackendError

# On import, which PEFT does too, it warns that a kernel is missing that would be downloaded and is not used here.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)

INSTALL = "pip install 'delta-rlvr[quantised]'"


def settings(dtype: torch.dtype) -> Any:
    """What transformers is told for a model that is quantised as it is loaded: NF4, its scales in 8 bits.

    ``dtype`` is that of the products. Raises BackendError where bitsandbytes is not installed.
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
    """Let no forward without a gradient repack weights for a kernel that has none.

    bitsandbytes does so on some processors with layers in evaluation mode, which differ in nothing else.
    """
    for module in model.modules():
        if _packing(getattr(module, "weight", None)) is not None:
            module.training = True


def numbers(weight: Tensor) -> int:
    """How many numbers a weight stands for."""
    packing = _packing(weight)
    return weight.numel() if packing is None else int(packing.shape.numel())


def unpacked(weight: Tensor) -> Tensor:
    """The numbers that a weight stands for, in its own shape."""
    packing = _packing(weight)
    if packing is None:
        return weight
    from bitsandbytes.functional import dequantize_4bit

    numbers: Tensor = dequantize_4bit(weight.data, packing)
    return numbers


def _packing(weight: Tensor | None) -> Any:
    """How a weight of bitsandbytes' is packed; None where it is its own numbers."""
    return getattr(weight, "quant_state", None)
