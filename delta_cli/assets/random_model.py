"""A Qwen3 model folder with random weights, in the ordinary format: for the tiny base and for tests."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

Weights = dict[str, NDArray[np.float32]]


def write_qwen3(
    folder: Path,
    *,
    vocab_size: int,
    hidden: int = 64,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    intermediate: int = 192,
    max_positions: int = 1024,
    tie: bool = True,
    eos_id: int = 0,
    pad_id: int | None = None,
    seed: int = 0,
    scale: float = 0.02,
) -> None:
    """Write config.json, generation_config.json and model.safetensors (float32), no tokenizer.

    Matrices are normal with standard deviation ``scale``, norms are one plus the same, so that
    a norm applied in the wrong place shows.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": max_positions,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": tie,
        "bos_token_id": None,
        "eos_token_id": eos_id,
        "pad_token_id": eos_id if pad_id is None else pad_id,
        "torch_dtype": "float32",
    }
    generation = {"eos_token_id": eos_id, "pad_token_id": config["pad_token_id"], "do_sample": True}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")

    rng = np.random.default_rng(seed)

    def matrix(rows: int, columns: int) -> NDArray[np.float32]:
        return (scale * rng.standard_normal((rows, columns))).astype(np.float32)

    def norm(size: int) -> NDArray[np.float32]:
        return (1 + scale * rng.standard_normal(size)).astype(np.float32)

    weights: Weights = {"model.embed_tokens.weight": matrix(vocab_size, hidden), "model.norm.weight": norm(hidden)}
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        weights |= {
            f"{prefix}.input_layernorm.weight": norm(hidden),
            f"{prefix}.post_attention_layernorm.weight": norm(hidden),
            f"{prefix}.self_attn.q_proj.weight": matrix(heads * head_dim, hidden),
            f"{prefix}.self_attn.k_proj.weight": matrix(kv_heads * head_dim, hidden),
            f"{prefix}.self_attn.v_proj.weight": matrix(kv_heads * head_dim, hidden),
            f"{prefix}.self_attn.o_proj.weight": matrix(hidden, heads * head_dim),
            f"{prefix}.self_attn.q_norm.weight": norm(head_dim),
            f"{prefix}.self_attn.k_norm.weight": norm(head_dim),
            f"{prefix}.mlp.gate_proj.weight": matrix(intermediate, hidden),
            f"{prefix}.mlp.up_proj.weight": matrix(intermediate, hidden),
            f"{prefix}.mlp.down_proj.weight": matrix(hidden, intermediate),
        }
    if not tie:
        weights["lm_head.weight"] = matrix(vocab_size, hidden)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
