"""The hub's config.json files in published.json, and the same ones made tiny.

Every flag, multiplier and rotary setting stays as published. Only widths, depths, vocabularies, windows and numbers of
experts shrink, each to a size in the table below that keeps its ratios: query to key heads, a head size that is not
hidden size / heads, key to value heads, one layer of every kind.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

HIDDEN, HEADS, VOCAB, WINDOW = 64, 4, 64, 5
PUBLISHED: dict[str, dict[str, Any]] = {
    name: entry["config"] for name, entry in json.loads(Path(__file__).with_name("published.json").read_text()).items()
}

SIZES = {
    "hidden_size": HIDDEN,
    "block_dim": HIDDEN,
    "conv_dim": HIDDEN,
    "conv_dim_out": HIDDEN,
    "intermediate_size": 96,
    "block_ff_dim": 144,  # LFM2 takes two thirds of it, rounded up to a multiple
    "block_multiple_of": 32,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 48,
    "num_attention_heads": HEADS,
    "num_heads": HEADS,
    "hidden_size_per_layer_input": 8,
    "laurel_rank": 4,
    "vocab_size": VOCAB,
    "vocab_size_per_layer_input": VOCAB,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "mamba_n_heads": 8,
    "mamba_num_heads": 8,
    "mamba_d_head": 16,
    "mamba_head_dim": 16,
    "mamba_d_ssm": 128,
    "mamba_d_state": 8,
    "ssm_state_size": 8,
    "mamba_dt_rank": 4,
    "mamba_chunk_size": 8,
    "chunk_size": 8,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": None,
    "initializer_range": 0.2,
    "dtype": "float32",
    "torch_dtype": "float32",
}
MOST = {  # sizes that shrink only if they are larger
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "experts_per_token": 2,
    "top_k_experts": 2,
    "num_global_key_value_heads": 1,
    "n_groups": 2,
    "num_kv_shared_layers": 2,
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    "full_attention_interval": 2,
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    "no_rope_layer_interval": 2,
}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "depth": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_heads": 2,
    "head_dim": 8,
    "global_head_dim": 8,
    "out_hidden_size": HIDDEN,
    "image_size": 56,
    "num_position_embeddings": 16,
    "position_embedding_size": 16,
}


def tiny(name: str) -> dict[str, Any]:
    """The published config.json of a model, made tiny. gpt-oss and Devstral are taken unquantised."""
    config = {key: value for key, value in PUBLISHED[name].items() if key != "quantization_config"}
    if "text_config" not in config:
        return _text(config)
    config["text_config"] = _text(config["text_config"])
    if config["model_type"].startswith("gemma"):
        config["vocab_size"] = VOCAB  # for mlx-lm, which reads it there, and otherwise takes the published one
    config["vision_config"] = {key: VISION.get(key, value) for key, value in config["vision_config"].items()}
    return {
        key: SIZES[key] if key in ("dtype", "torch_dtype", "eos_token_id") else value for key, value in config.items()
    }


def _text(config: dict[str, Any]) -> dict[str, Any]:
    """A language model's config, made tiny."""
    small = {
        key: value if value == 0 else SIZES.get(key, min(value, MOST[key]) if key in MOST else value)
        for key, value in config.items()
    }
    small["initializer_range"] = SIZES["initializer_range"]
    small |= {key: SIZES[key] for key in ("vocab_size", "pad_token_id", "eos_token_id", "bos_token_id")}
    return small | _heads(config) | _layers(config) | _window(config) | _rotary(config)


def _heads(config: dict[str, Any]) -> dict[str, Any]:
    """Head sizes and numbers of heads that keep the published ratios."""
    small: dict[str, Any] = {}
    heads, keys = config.get("num_attention_heads", 0), config.get("num_key_value_heads", 0)
    if keys:
        small["num_key_value_heads"] = HEADS if keys == heads else 2
    if "head_dim" in config or "attention_head_dim" in config:
        size = config.get("head_dim") or config["attention_head_dim"]
        small["head_dim"] = 16 if size * heads == config["hidden_size"] or "qk_rope_head_dim" in config else 32
        small |= {"attention_head_dim": small["head_dim"]} if "attention_head_dim" in config else {}
        if "query_pre_attn_scalar" in config:
            small["query_pre_attn_scalar"] = small["head_dim"] * config["query_pre_attn_scalar"] // size
        if "global_head_dim" in config:
            small["global_head_dim"] = small["head_dim"] * config["global_head_dim"] // size
    if "linear_num_value_heads" in config:
        small["linear_num_value_heads"] = 2 * config["linear_num_value_heads"] // config["linear_num_key_heads"]
    if config.get("shared_intermediate_size"):
        small["shared_intermediate_size"] = 96
    return small


def _layers(config: dict[str, Any]) -> dict[str, Any]:
    """One layer of each kind, in the order of their first appearance; two if all are of one kind."""
    small: dict[str, Any] = {"num_hidden_layers": 6 if config["model_type"] == "gemma3_text" else 2}  # its pattern is 6
    if kinds := config.get("layer_types"):
        once = list(dict.fromkeys(kinds))
        small["layer_types"] = once if len(once) > 1 else 2 * once
    if pattern := config.get("hybrid_override_pattern"):
        small["hybrid_override_pattern"] = "".join(dict.fromkeys(pattern))
        small["num_hidden_layers"] = len(small["hybrid_override_pattern"])
    if "full_attn_idxs" in config:
        small["full_attn_idxs"] = [1]
    if "sliding_window_pattern" in config:
        small["sliding_window_pattern"] = "LG"
    if "no_rope_layers" in config:
        small["no_rope_layers"] = [1, 0]
    if config.get("num_kv_shared_layers"):  # each kind of layer shares the keys of an earlier one of its kind
        small |= {"num_hidden_layers": 4, "layer_types": 2 * small["layer_types"]}
        sparse = config.get("activation_sparsity_pattern", ())
        small |= {"activation_sparsity_pattern": [sparse[0], *3 * [sparse[-1]]], "intermediate_size": 4 * [96]}
    return small


def _window(config: dict[str, Any]) -> dict[str, Any]:
    """A window shorter than the test's sequences, if the published one is shorter than the published context."""
    window = config.get("sliding_window")
    return {"sliding_window": WINDOW} if window and window < config.get("max_position_embeddings", 1e9) else {}


def _rotary(config: dict[str, Any]) -> dict[str, Any]:
    """Lists with a number for each rotary frequency, cut to as many as the tiny head has."""
    small: dict[str, Any] = {}
    if "long_factor" in (scaling := config.get("rope_scaling") or {}):
        count = int(HIDDEN // HEADS * config["partial_rotary_factor"]) // 2
        small["rope_scaling"] = {
            key: value[-count:] if isinstance(value, list) else value for key, value in scaling.items()
        }
    if "mrope_section" in (found := config.get("rope_parameters") or {}):
        small["rope_parameters"] = found | {"mrope_section": [2, 1, 1]}
    if "rotary_dim" in config:
        small["rotary_dim"] = 16 * config["rotary_dim"] * config["num_attention_heads"] // config["hidden_size"]
    return small
