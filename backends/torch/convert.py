"""Exported models in other forms: quantised by bitsandbytes for transformers and vLLM, GGUF for llama.cpp."""

from __future__ import annotations

import shutil
from importlib.util import find_spec
from pathlib import Path

import torch

from backends.interface import BackendError
from backends.torch.four_bits import INSTALL
from backends.torch.loading import exclusive_transformers
from backends.torch.model import COMPANIONS

BITS = (4, 8)
WRITTEN = ("config.json", "model.safetensors.index.json")  # by save_pretrained, for the quantised weights


def quantise(folder: Path, out: Path, bits: int) -> None:
    """Write the model in ``folder`` with weights of 4 or 8 bits to ``out``, which transformers and vLLM open.

    Raises BackendError if bitsandbytes is missing or cannot quantise the model.
    """
    if bits not in BITS:
        raise BackendError(f"bitsandbytes has 4 and 8 bits, not {bits}; choose one of them, or --for mlx")
    if find_spec("bitsandbytes") is None:
        raise BackendError(f"quantising for transformers needs bitsandbytes, which is not installed; run: {INSTALL}")
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    four = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.bfloat16}
    config = BitsAndBytesConfig(load_in_4bit=True, **four) if bits == 4 else BitsAndBytesConfig(load_in_8bit=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        with exclusive_transformers():
            model = AutoModelForCausalLM.from_pretrained(
                folder, quantization_config=config, dtype=torch.bfloat16, device_map={"": device}
            )
            model.save_pretrained(out)
    except (ValueError, RuntimeError, ImportError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise BackendError(f"bitsandbytes cannot quantise this model ({reason}); export it without") from error
    for pattern in COMPANIONS:
        for file in folder.glob(pattern):
            if file.name not in WRITTEN:
                shutil.copy(file, out / file.name)


def gguf(folder: Path, file: Path) -> None:
    """Write the model in ``folder`` as a GGUF file. Raises BackendError where that is not possible."""
    if find_spec("gguf") is None:
        raise BackendError("--gguf needs the package gguf, which is not installed; run: pip install 'delta-rlvr[gguf]'")
    from backends.torch.gguf_export import write_gguf

    write_gguf(folder, file)
