"""The states that layers without attention keep for each response while it is drawn."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_ATTENTION = {"full_attention", "sliding_attention", "hybrid"}  # hybrid: attention beside a recurrence
_RECURRENT = {"linear_attention", "conv", "mamba", "hybrid"}


def recurrent_state(config: Mapping[str, Any]) -> dict[str, int]:
    """The fields ``attention_layers``, ``states`` and ``tails`` of a shape; none for a model that only attends."""
    kinds = _layer_types(config)
    recurrent = sum(kind in _RECURRENT for kind in kinds)
    if not recurrent:
        return {}
    states, tails = _layer(config)
    attending = sum(kind in _ATTENTION for kind in kinds)
    return {"attention_layers": attending, "states": recurrent * states, "tails": recurrent * tails}


def _layer_types(config: Mapping[str, Any]) -> list[str]:
    """The kind of each layer, under any of the names by which published configs say it."""
    layers = range(config["num_hidden_layers"])
    if kinds := config.get("layer_types") or config.get("layers_block_type"):
        return ["full_attention" if kind == "attention" else kind for kind in kinds]
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
    inner, size = config["mamba_n_heads"] * config["mamba_d_head"], config["mamba_d_state"]  # Mamba 2
    return inner * size, (inner + 2 * config["mamba_n_groups"] * size) * config["mamba_d_conv"]
