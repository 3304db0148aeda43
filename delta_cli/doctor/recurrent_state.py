"""The states that layers without attention keep for each response while it is drawn."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ATTENTION = {"full_attention", "sliding_attention", "hybrid"}  # hybrid: attention beside a recurrence
_RECURRENT = {"linear_attention", "conv", "hybrid"}
_NAMES = {"attention": "full_attention", "mamba": "linear_attention"}
_PATTERN = {"M": "linear_attention", "*": "full_attention", "E": "moe", "-": "mlp"}  # of Nemotron-H


def recurrent_state(config: Mapping[str, Any]) -> dict[str, int]:
    """The fields ``attention_layers``, ``states`` and ``tails`` of a shape; none for a model that only attends."""
    kinds = layer_types(config)
    recurrent = sum(kind in _RECURRENT for kind in kinds)
    if not recurrent:
        return {}
    states, tails = _layer(config)
    attending = sum(kind in ATTENTION for kind in kinds)
    return {"attention_layers": attending, "states": recurrent * states, "tails": recurrent * tails}


def layer_types(config: Mapping[str, Any]) -> list[str]:
    """The kind of each layer, under any of the names by which published configs say it."""
    layers = range(config.get("num_hidden_layers") or 0)
    if kinds := config.get("layer_types") or config.get("layers_block_type"):
        return [_NAMES.get(kind, kind) for kind in kinds]
    if pattern := config.get("hybrid_override_pattern"):
        return [_PATTERN[letter] for letter in pattern]
    if period := config.get("attn_layer_period"):
        offset = config["attn_layer_offset"]
        return ["linear_attention" if layer % period != offset else "full_attention" for layer in layers]
    if config.get("model_type") == "falcon_h1":
        return ["hybrid" for _ in layers]
    if (attending := config.get("full_attn_idxs")) is not None:
        return ["full_attention" if layer in attending else "conv" for layer in layers]
    if interval := config.get("full_attention_interval"):
        return ["linear_attention" if (layer + 1) % interval else "full_attention" for layer in layers]
    return []


def _layer(config: Mapping[str, Any]) -> tuple[int, int]:
    """Numbers in the recurrent state and the convolution's last inputs of one layer."""
    if "linear_num_value_heads" in config:  # gated delta rule: a matrix for each head
        keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
        values = config["linear_num_value_heads"] * config["linear_value_head_dim"]
        return values * config["linear_key_head_dim"], (2 * keys + values) * config.get("linear_conv_kernel_dim", 4)
    if "conv_L_cache" in config:  # a convolution and no recurrence
        return 0, config["hidden_size"] * config["conv_L_cache"]
    if "mamba_dt_rank" in config:  # Mamba 1
        inner = config["mamba_expand"] * config["hidden_size"]
        return inner * config["mamba_d_state"], inner * config["mamba_d_conv"]
    if "mamba_num_heads" in config:  # Nemotron-H's names
        names = ("mamba_num_heads", "mamba_head_dim", "ssm_state_size", "n_groups", "conv_kernel")
    else:
        names = ("mamba_n_heads", "mamba_d_head", "mamba_d_state", "mamba_n_groups", "mamba_d_conv")
    heads, width, size, groups, kernel = (config[name] for name in names)  # Mamba 2
    return heads * width * size, (heads * width + 2 * groups * size) * kernel
