"""A small Qwen3.5 with random weights for the benchmarks of hybrid models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

VOCABULARY = 512
HYBRID: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "tie_word_embeddings": True,
}


def write_hybrid(folder: Path, for_mlx: bool = False) -> None:
    """Write the model as transformers saves it, or with the keys of config.json that mlx-lm reads."""
    torch.manual_seed(0)
    Qwen3_5ForCausalLM(Qwen3_5TextConfig(**HYBRID)).save_pretrained(folder)
    if for_mlx:
        config = json.loads((folder / "config.json").read_text())
        config |= {"model_type": "qwen3_5", "full_attention_interval": 4}
        (folder / "config.json").write_text(json.dumps(config))
