"""Open a quantised GGUF file as a float32 model folder, through transformers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import gguf  # noqa: F401  transformers reads the file with it
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from backends.torch.loading import exclusive_transformers


def unpack(file: Path, folder: Path, ends: Sequence[str]) -> None:
    """Write the model and tokenizer in ``file`` to ``folder``; ``ends`` are its end-of-sequence tokens."""
    place, name = str(file.parent), file.name
    with exclusive_transformers():
        model = AutoModelForCausalLM.from_pretrained(place, gguf_file=name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(place, gguf_file=name)
    del model.config.quantization_config  # the weights are float32 now and saved as such
    model.hf_quantizer = None
    model.generation_config.eos_token_id = [tokenizer.convert_tokens_to_ids(token) for token in ends]
    with exclusive_transformers():
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
